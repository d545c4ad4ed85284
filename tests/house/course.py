"""The lessons of the course in their order, what they hold, and what tests have heard of their checks."""

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from source_tree import PACKAGE, ROOT, parse

from amplab.lessons.exercises import NOT_ANSWERED, Verdict

__all__ = [
    "COURSE",
    "FOLDER",
    "Heard",
    "checks_in",
    "exercise_cells",
    "lesson_links",
    "lesson_module",
    "number_of",
    "read",
    "sections",
    "text_of",
    "unheard",
    "written",
]

FOLDER = ROOT / "notebooks"
COURSE = (
    "00_the_lab",
    "01_number_formats",
    "02_rounding_and_underflow",
    "03_why_scale_the_loss",
    "04_opt_levels",
    "05_casting_policies",
    "06_dynamic_loss_scaling",
    "07_fused_unscale",
    "08_master_weights",
    "09_several_losses",
    "10_accumulation",
    "11_your_own_functions",
    "12_torch_amp",
    "13_fused_optimizers",
    "14_more_than_one_process",
    "15_finding_out_why",
    "16_the_clinic",
)
Notebook = dict[str, Any]
Heard = list[tuple[str, Verdict]]


def written() -> list[Path]:
    """Return the lessons that exist, in order."""
    return [path for name in COURSE if (path := FOLDER / f"{name}.ipynb").exists()]


def number_of(path: Path) -> str:
    """Return the two digits of a lesson."""
    return path.name[:2]


def read(path: Path) -> Notebook:
    """Return a notebook as it is stored."""
    return json.loads(path.read_text(encoding="utf-8"))


def text_of(cell: Notebook) -> str:
    """Return the source of a cell as one string."""
    return "".join(cell["source"])


def sections(notebook: Notebook) -> dict[str, list[Notebook]]:
    """Return the cells below each heading of the second level, without the cells before the first."""
    found: dict[str, list[Notebook]] = {}
    for cell in notebook["cells"]:
        heading = re.search(r"^## (.+)$", text_of(cell), re.MULTILINE) if cell["cell_type"] == "markdown" else None
        if heading:
            found[heading[1].strip()] = []
        if found:
            found[[*found][-1]].append(cell)
    return found


def exercise_cells(notebook: Notebook) -> list[Notebook]:
    """Return the code cells in which a reader answers."""
    cells = notebook["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and re.fullmatch(r"exercise-\d", cell.get("id", ""))]


def lesson_links(text: str) -> list[str]:
    """Return the names of the lessons that a text links to."""
    return re.findall(r"\]\((?:\.\./)?(\d\d_\w+)\.ipynb(?:#[^)]*)?\)", text)


def lesson_module(path: Path) -> Path:
    """Return where the data and the checks of a lesson are."""
    return PACKAGE / "lessons" / f"lesson_{number_of(path)}.py"


def checks_in(module: Path) -> dict[str, str]:
    """Return the name of each function that `@exercise` decorates, and the exercise's name."""
    found = {}
    for node in parse(module).body if module.exists() else []:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "exercise":
                found[node.name] = ast.literal_eval(call.args[0])
    return found


def unheard(names: Iterable[str], heard: Heard) -> list[str]:
    """Return what no test has heard of the exercises `names`."""
    kinds = {"right": lambda verdict: verdict.right, "open": lambda verdict: verdict.text == NOT_ANSWERED}
    kinds["wrong"] = lambda verdict: not verdict.right and verdict.text != NOT_ANSWERED
    return [
        f"{name}: no {kind} answer"
        for name in names
        for kind, fits in kinds.items()
        if not any(each == name and fits(verdict) for each, verdict in heard)
    ]
