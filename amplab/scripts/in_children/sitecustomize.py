"""Run by an interpreter that a script under ``amplab run`` has started, before its program.

It does what `amplab.scripts.children` describes, then runs the next ``sitecustomize`` on the path, if there is one.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

__all__: list[str] = []


def _find_amplab() -> None:
    """Import the amplab of the parent process, even if the path has another or none."""
    folder = Path(__file__).resolve().parents[2]
    places = [str(folder)]
    spec = importlib.util.spec_from_file_location("amplab", folder / "__init__.py", submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder}: expected the package amplab; install it again.")
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
