"""Run by an interpreter that a script under ``amplab run`` has started, before anything of its program.

It does what `amplab.scripts.children` says, then runs the ``sitecustomize`` that it stands before, if there is one.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

__all__: list[str] = []


def _find_amplab() -> None:
    """Import the very amplab of the parent, wherever it lies and whatever else is called so."""
    folder = Path(__file__).resolve().parents[2]
    places = {"submodule_search_locations": [str(folder)]}
    spec = importlib.util.spec_from_file_location("amplab", folder / "__init__.py", **places)
    sys.modules["amplab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["amplab"])


def _run_the_next_one() -> None:
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    _find_amplab()
    importlib.import_module("amplab.scripts.children").follow_parent()
    _run_the_next_one()
