"""The tool that runs the lessons: what it stores, what it removes, and which drift it finds."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from source_tree import ROOT

import notebooks as tool

CELLS = {
    "prints": "print('a', 1)",
    "times": "import time; time.time()",
    "draws": "from amplab.views import Explorable, Slider\nExplorable(lambda x: x + 1, x=Slider(1, 9))",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook that the tool has built, once without outputs and with what an editor leaves."""
    path = tmp_path_factory.mktemp("lessons") / "90_a_lesson.ipynb"
    cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in CELLS.items()]
    cells[1].metadata = nbformat.from_dict({"tags": ["nbval-ignore-output"], "scrolled": True})
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "widgets": {"application/vnd.jupyter.widget-state+json": {}},
    }
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    assert tool.main(["build", str(path)]) == 0
    return path


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_outputs_ids_and_tags_are_stored_and_nothing_else(built: Path) -> None:
    notebook = read(built)
    assert [cell.id for cell in notebook.cells] == list(CELLS)
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert notebook.cells[0].outputs[0].text == "a 1\n"
    assert [dict(cell.metadata) for cell in notebook.cells] == [{}, {"tags": ["nbval-ignore-output"]}, {}]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    (drawn,) = notebook.cells[2].outputs
    assert drawn.data["text/plain"] == "Explorable(x=1): 2"
    assert "<pre>2</pre>" in drawn.data["text/html"]
    assert tool.WIDGET not in drawn.data


def test_a_second_build_and_a_check_find_no_drift(built: Path) -> None:
    assert tool.check(built) == []


def change(notebook: Any, cell: int, **changes: Any) -> Any:
    changed = copy.deepcopy(notebook)
    changed.cells[cell].outputs[0].update(changes)
    return changed


def test_drift_is_found_with_its_lines(built: Path) -> None:
    notebook = read(built)
    (fault,) = tool.differences(notebook, change(notebook, 0, text="a 2\n"))
    assert "cell prints" in fault
    assert "-a 1" in fault
    assert "+a 2" in fault
    data = {**notebook.cells[2].outputs[0].data, "text/plain": "Explorable(x=1): 3"}
    assert len(list(tool.differences(notebook, change(notebook, 2, data=data)))) == 1
    never = copy.deepcopy(notebook)
    never.cells[0].execution_count = None
    assert "never executed" in next(tool.differences(never, notebook))


def test_times_widgets_and_coordinates_are_no_drift(built: Path) -> None:
    notebook = read(built)
    assert list(tool.differences(notebook, change(notebook, 1, data={"text/plain": "0.0"}))) == []
    data = dict(notebook.cells[2].outputs[0].data)
    drawn = [{**data, "text/html": f"<p>1</p><svg><path d='{d}'/>\n</svg>", tool.WIDGET: {"model_id": d}} for d in "ab"]
    pair = [change(notebook, 2, data=nbformat.from_dict(each)) for each in drawn]
    assert list(tool.differences(*pair)) == []


def test_the_command_fails_on_drift_and_on_leftovers(built: Path, tmp_path: Path) -> None:
    notebook = change(read(built), 0, text="b\n")
    notebook.metadata["widgets"] = {}
    path = tmp_path / "91_drifted.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "tests.house.notebooks", "check", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "cell prints" in result.stdout
    assert "build it" in result.stdout


def test_a_translation_gets_code_and_outputs_and_keeps_its_markdown(built: Path, tmp_path: Path) -> None:
    lesson, path = read(built), tmp_path / "92_a_lesson.ipynb"
    prose = [nbformat.v4.new_markdown_cell(text, id=name) for name, text in (("title", "# Half"), ("new", "More"))]
    lesson.cells = [*prose, *lesson.cells]
    nbformat.write(lesson, path)
    old = change(lesson, 2, text="old\n")
    old.cells[0].source = "# 半精度"
    del old.cells[1]
    (tmp_path / "zh").mkdir()
    nbformat.write(old, tmp_path / "zh" / path.name)
    assert tool.main(["translate", str(path)]) == 0
    new = read(tmp_path / "zh" / path.name)
    assert [cell.source for cell in new.cells[:2]] == ["# 半精度", "More"]
    assert new.cells[2:] == lesson.cells[2:]
    assert read(path) == lesson


ACTS = "total = globals().get('total', 0) + 1; print(total)"
ASKS = "answer = ...\nprint('Right.' if answer == 2 else 'Not yet')"


def with_solutions(*solutions: str) -> Any:
    """Return a notebook with two cells, one of which acts again, and an exercise before each solution."""
    cells = [nbformat.v4.new_code_cell(ACTS, id="acts"), nbformat.v4.new_code_cell("print(1)", id="prints")]
    for number, solution in enumerate(solutions, 1):
        cells += [nbformat.v4.new_code_cell(ASKS, id=f"exercise-{number}")]
        cells += [nbformat.v4.new_markdown_cell(f"<details>{solution}</details>", id=f"solution-{number}")]
    for cell, said in zip(cells[:3] + cells[4::2], ("1\n", "1\n", "Not yet\n", "Not yet\n"), strict=True):
        cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", name="stdout", text=said)], 1
    return nbformat.v4.new_notebook(cells=cells)


def test_cells_that_act_again_and_solutions_that_are_wrong_are_found(tmp_path: Path) -> None:
    path = tmp_path / "93_a_lesson.ipynb"
    nbformat.write(with_solutions("`answer = 2`", "```python\nanswer = 3\n```"), path)
    twice, wrong = tool.again(path)
    assert twice.startswith("cell acts: run again, the outputs differ")
    assert "-1\n    +2" in twice
    assert wrong.startswith("cell exercise-2: the check does not accept the solution")


def test_a_solution_is_put_before_the_check() -> None:
    notebook = with_solutions("It is 2.", "`answer = 2`, or\n```python\nanswer = 3\n```")
    first, second = notebook.cells[2], notebook.cells[4]
    with pytest.raises(ValueError, match="exercise-1"):
        tool.solution_of(notebook, first)
    assert tool.solution_of(notebook, second) == "answer = 2"
    assert tool.solved("import os\nanswer = ...\ncheck(answer)", "answer = 2") == (
        "import os\nanswer = ...\nanswer = 2\ncheck(answer)"
    )
