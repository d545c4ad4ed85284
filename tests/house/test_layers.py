"""Rooms import only rooms listed before them, and rooms before the views need only torch and numpy."""

import re
import sys
from pathlib import Path

import pytest
from import_graph import Import, imports_of
from source_tree import PACKAGE, module_name, python_files, relative

# The order of the rooms.
ROOMS = (
    "formats",
    "display",
    "kernels",
    "policies",
    "scalers",
    "optimizers",
    "parallel",
    "normalization",
    "multi_tensor_apply",
    "amp",
    "fp16_utils",
    "trace",
    "diagnose",
    "lab",
    "views",
    "lessons",
    "bench",
    "launch",
    "scripts",
    "cli",
)
CORE = ROOMS[: ROOMS.index("views")]
CORE_NEEDS = {"torch", "numpy", "amplab"} | sys.stdlib_module_names
# The only exception: functions of this file return a dashboard, so they import the views when they are called.
DOOR = "amplab.lab.open"


def room_of(module: str) -> str | None:
    """Return the room of a module; None for the index of the package."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] == "__main__":
        return None if len(parts) < 2 else "cli"
    return parts[1] if parts[1] in ROOMS else None


def upward_imports(source: str, *, module: str, is_package: bool = False) -> list[Import]:
    """Return the imports of `source` from later rooms."""
    room = room_of(module)
    if room is None:
        return []
    return [
        found
        for found in imports_of(source, module=module, is_package=is_package)
        if found.target.split(".")[0] == "amplab"
        and (target := room_of(found.target)) is not None
        and ROOMS.index(target) > ROOMS.index(room)
        and not (module == DOOR and target == "views" and (found.function or found.for_types))
    ]


def foreign_imports(source: str, *, module: str, is_package: bool = False) -> list[Import]:
    """Return the imports of a core module's `source` beyond torch, numpy, the standard library and amplab."""
    if room_of(module) not in CORE:
        return []
    return [
        found
        for found in imports_of(source, module=module, is_package=is_package)
        if (name := found.target.split(".")[0]) not in CORE_NEEDS
        # The bundled data sets, imported on use.
        and not (name == "sklearn" and room_of(module) == "lab" and found.function)
    ]


def private_imports(source: str, *, module: str, is_package: bool = False) -> list[Import]:
    """Return the imports of private names (``_name``) of other files of the package."""
    return [
        found
        for found in imports_of(source, module=module, is_package=is_package)
        if found.target.startswith("amplab.") and re.search(r"\._(?!_)", found.target)
    ]


def read(path: Path) -> dict[str, object]:
    return {"source": path.read_text(), "module": module_name(path), "is_package": path.name == "__init__.py"}


every_module = pytest.mark.parametrize("path", python_files(PACKAGE), ids=relative)


@every_module
def test_imports_only_rooms_before_its_own(path: Path) -> None:
    assert upward_imports(**read(path)) == []


@every_module
def test_core_needs_torch_and_numpy_alone(path: Path) -> None:
    assert foreign_imports(**read(path)) == []


@every_module
def test_private_names_stay_in_their_file(path: Path) -> None:
    assert private_imports(**read(path)) == []


def test_the_check_of_private_names_fires() -> None:
    source = "from amplab.scalers.rules import _clamp\nfrom . import _clamp\nfrom amplab import __version__, lab"
    assert len(private_imports(source, module="amplab.scalers.unscaler")) == 2


def test_every_room_has_its_place_in_the_order() -> None:
    known = {*ROOMS, "__init__", "__main__"}
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert found - {"__pycache__"} <= known


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from amplab.lab import Trainer", "amplab.amp.session"),
        ("import amplab.views", "amplab.lab.trainer"),
        ("from amplab import views", "amplab.lab.trainer"),
        ("from ..amp import initialize", "amplab.scalers.rules"),
        ("from .. import amp", "amplab.scalers.rules"),
        ("from amplab.views import Dashboard", DOOR),
        ("def open():\n    from amplab.views import Dashboard", "amplab.lab.trainer"),
        ("if TYPE_CHECKING:\n    from amplab.lab import Trainer", "amplab.trace.records"),
        ("import importlib\nimportlib.import_module('amplab.lab')", "amplab.formats"),
    ],
)
def test_the_check_of_the_order_fires(source: str, module: str) -> None:
    assert len(upward_imports(source, module=module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from amplab.formats import FLOAT16\nfrom . import rules", "amplab.scalers.master_weights"),
        ("def open(config=None):\n    from amplab.views import Dashboard", DOOR),
        ("if TYPE_CHECKING:\n    from amplab.views import Dashboard", DOOR),
        ("from amplab import __version__, lab", "amplab.cli"),
    ],
)
def test_the_check_of_the_order_lets_the_rest_pass(source: str, module: str) -> None:
    assert upward_imports(source, module=module) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import ipywidgets", "amplab.trace.records"),
        ("def draw():\n    from plotly import graph_objects", "amplab.lab.console"),
        ("import sklearn.datasets", "amplab.lab.tasks"),
        ("def load():\n    import sklearn.datasets", "amplab.amp.session"),
    ],
)
def test_the_check_of_the_core_fires(source: str, module: str) -> None:
    assert len(foreign_imports(source, module=module)) == 1


def test_the_check_of_the_core_lets_the_rest_pass() -> None:
    source = "import math, torch\nimport numpy as np\ndef load():\n    from sklearn import datasets"
    assert foreign_imports(source, module="amplab.lab.tasks") == []
    assert foreign_imports("import ipywidgets", module="amplab.views.dashboard") == []
