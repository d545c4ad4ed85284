"""JupyterLab's server signs the lessons that are unchanged, before its first page opens.

A part of the server that `amplab lab` starts, named in ``jupyter/jupyter_server_config.d``. A working copy is signed
with the server's own notary only where its content equals the shipped lesson. JupyterLab then trusts its outputs, and
signs it again when it saves it: without that, a reload of the page does not show the dashboard.

It also tells the page the names of the lessons, for the extension in ``jupyter/labextensions``.
"""

import json
import os
from pathlib import Path
from typing import Any

from amplab.launch.lessons import LaunchError, find_lessons, lesson_names, unchanged_lessons

__all__ = ["HIDDEN_SOURCES", "sign_lessons"]

HIDDEN_SOURCES = "AMPLAB_HIDDEN_SOURCES"
"""Environment variable of the server: "1" hides the sources of the lessons."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    try:
        shipped = find_lessons()
    except LaunchError as error:
        server.log.warning(f"amplab: {error}")
        return
    page = server.web_app.settings.setdefault("page_config_data", {})
    page["amplabLessons"] = json.dumps(lesson_names(shipped))
    page["amplabSources"] = "hidden" if os.environ.get(HIDDEN_SOURCES) == "1" else "shown"
    sign_lessons(server.contents_manager.notary, shipped, Path(server.root_dir))


def sign_lessons(notary: Any, shipped: Path, folder: Path) -> None:
    """Sign the lessons in `folder` that equal the shipped ones, with a notary of nbformat."""
    import nbformat

    for lesson in unchanged_lessons(shipped, folder):
        notary.sign(nbformat.read(lesson, as_version=4))  # type: ignore[no-untyped-call]
