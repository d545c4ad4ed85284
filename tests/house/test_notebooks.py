"""Rules for notebooks, so that they open without changes, run again and compare equal."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT, files_under, relative

LONGEST_CELL = 8
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,3}(-[0-9a-f]{12})?")
Notebook = dict[str, Any]


def code_lines(cell: Notebook) -> list[str]:
    """Return the lines of a cell without blank ones and comments."""
    lines = "".join(cell["source"]).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def faults(notebook: Notebook) -> Iterator[str]:
    """Yield a sentence for each rule that a notebook breaks."""
    metadata, cells = notebook["metadata"], notebook["cells"]
    if "widgets" in metadata:
        yield "metadata.widgets: large state that is never used; remove it"
    if metadata.get("language_info", {}).get("name") != "python":
        yield "metadata.language_info: without it JupyterLab marks the notebook changed when it opens"
    if metadata.get("kernelspec", {}).get("name") != "python3":
        yield "metadata.kernelspec: expected python3, which every installation has"
    if cells[0]["cell_type"] != "markdown" or not "".join(cells[0]["source"]).startswith("# "):
        yield "the first cell is not a title"
    ids = [cell.get("id", "") for cell in cells]
    yield from (f"cell id {name!r} is missing or random: write a word" for name in ids if not is_word(name))
    if len(set(ids)) < len(ids):
        yield "two cells have the same id"
    for cell in cells:
        if cell["cell_type"] == "code":
            yield from (f"cell {cell.get('id')}: {fault}" for fault in cell_faults(cell))


def is_word(name: str) -> bool:
    """Return whether the id of a cell is a readable name, not a random one."""
    return bool(re.fullmatch(r"[a-z][a-z0-9_-]*", name)) and not RANDOM_ID.fullmatch(name)


def cell_faults(cell: Notebook) -> Iterator[str]:
    """Yield a sentence for each rule that a code cell breaks."""
    if not isinstance(cell["execution_count"], int):
        yield "never executed: nbval would run it and compare nothing"
    if len(code_lines(cell)) > LONGEST_CELL:
        yield f"{len(code_lines(cell))} lines of code; at most {LONGEST_CELL}"
    for output in cell["outputs"]:
        if output["output_type"] == "error" and "raises-exception" not in cell["metadata"].get("tags", []):
            yield "stores an error without the tag raises-exception"
        if output.get("name") == "stderr":
            yield "stores output on stderr"
        html = output.get("data", {}).get("text/html", "")
        if has_bare_drawing(html if isinstance(html, str) else "".join(html)):
            yield "stores a drawing that JupyterLab shows as loose words before the cell runs: use Chart.html()"


def has_bare_drawing(html: str) -> bool:
    """Return whether HTML has a drawing that is not `styled`. Small ones have their words in a title."""
    rest = re.sub(r'<div class="drawn" style="display:none">.*?</div>', "", html, flags=re.DOTALL)
    return bool(re.search(r'<svg (?!class="small")', rest))


def notebooks() -> list[Path]:
    return [path for path in files_under(ROOT / "notebooks") if path.suffix == ".ipynb"]


def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def sound_notebook() -> Notebook:
    """Return a notebook that follows every rule."""
    code = {"cell_type": "code", "id": "first", "execution_count": 1, "metadata": {}, "outputs": [], "source": ["1\n"]}
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# A title\n"]}
    metadata = {"language_info": {"name": "python"}, "kernelspec": {"name": "python3"}}
    return {"cells": [title, code], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def test_there_are_notebooks_to_check() -> None:
    assert {"00_the_lab", "01_number_formats"} <= {path.stem for path in notebooks()}


@pytest.mark.parametrize("path", notebooks(), ids=relative)
def test_notebook_keeps_to_the_rules(path: Path) -> None:
    assert list(faults(read(path))) == []


def test_the_rules_accept_a_sound_notebook() -> None:
    assert list(faults(sound_notebook())) == []


ERROR = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
BARE = {"output_type": "display_data", "data": {"text/html": ["<p>memory</p>\n", "<svg width='9'>...</svg>"]}}
WARNING = {"output_type": "stream", "name": "stderr", "text": ["careful\n"]}


@pytest.mark.parametrize(
    ("cell", "change", "said"),
    [
        (None, {"widgets": {}}, "metadata.widgets"),
        (None, {"language_info": {}}, "language_info"),
        (None, {"kernelspec": {"name": "my-env"}}, "kernelspec"),
        (0, {"source": ["no title"]}, "not a title"),
        (1, {"id": "3f2a9b1c"}, "random"),
        (1, {"id": "title"}, "same id"),
        (1, {"execution_count": None}, "never executed"),
        (1, {"source": ["x = 1\n"] * 9}, "9 lines"),
        (1, {"outputs": [ERROR]}, "raises-exception"),
        (1, {"outputs": [WARNING]}, "stderr"),
        (1, {"outputs": [BARE]}, "loose words"),
    ],
)
def test_each_rule_fires(cell: int | None, change: Notebook, said: str) -> None:
    notebook = sound_notebook()
    (notebook["metadata"] if cell is None else notebook["cells"][cell]).update(change)
    assert [fault for fault in faults(notebook) if said in fault]
