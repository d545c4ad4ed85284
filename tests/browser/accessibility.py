"""Deque's axe-core in a page of JupyterLab: the rules that a screen reader, a keyboard and weak eyes need."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from lab_page import LabPage

__all__ = ["AXE", "THEMES", "axe_script", "violations"]

AXE = "axe-core@4.14.1"
THEMES = ("JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast")
OUTPUTS = ".jp-OutputArea-output"
"""What a cell shows: the rest of the page is JupyterLab's own."""

RUN = """async (scope) => {
  const { violations } = await axe.run({ include: [[scope]] }, { resultTypes: ["violations"] });
  const said = ({ html, failureSummary }) => `${html.slice(0, 160)} ${failureSummary}`;
  return violations.map(({ id, nodes }) => [id, nodes.map(said)]);
}"""


def axe_script(folder: Path) -> Path | None:
    """Install axe-core in a folder and return its script; None without npm."""
    named = os.environ.get("AMPLAB_AXE")
    if named:
        return Path(named)
    if shutil.which("npm") is None:
        return None
    install = ["npm", "install", "--silent", "--no-save", "--no-fund", "--no-audit", "--prefix", str(folder), AXE]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "node_modules" / "axe-core" / "axe.min.js"


def violations(page: LabPage, script: Path, scope: str = OUTPUTS) -> dict[str, list[str]]:
    """Return the broken rules in what the cells show, each with its elements."""
    if not page.page.evaluate("() => 'axe' in window"):
        page.page.add_script_tag(path=script)
    found: list[Any] = page.page.evaluate(RUN, scope)
    return dict(found)
