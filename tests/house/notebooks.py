"""Run the lessons and store their outputs, or check that they still give what is stored.

    python -m tests.house.notebooks build notebooks/03_why_scale_the_loss.ipynb    run it, write it cleaned
    python -m tests.house.notebooks check                                          run all, list what differs
    python -m tests.house.notebooks again                                          run cells twice, try the solutions
    python -m tests.house.notebooks translate                                      copy code and outputs to translations

All but `translate` run the notebooks with the Python that runs this command, on one thread. A cleaned notebook keeps
its cell ids and tags, and has no state of widgets and no times. `check` compares as pytest does with nbval: not the
outputs of cells tagged nbval-ignore-output, no models of widgets, no bitmaps, and no coordinates of drawings.

`again` runs each cell a second time before the next one, as a reader does, and lists the cells whose output or whose
effect on later cells is then another one. Last, it puts the folded solution of each exercise into its cell, and lists
those that the check does not accept.

Translations (notebooks/zh) are not run: they have their own markdown, and the code and outputs of the lesson, which
`build` and `translate` copy.
"""

import argparse
import ast
import copy
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat

__all__ = ["SOLUTION", "again", "cleaned", "differences", "executed", "main", "solution_of", "solved", "translated"]

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SECONDS_PER_CELL = 120
KEPT = ("kernelspec", "language_info")
IGNORED = "nbval-ignore-output"
# As in nbval.cfg: how a drawing of a training looks differs between CPUs by less than a pixel.
DRAWING = re.compile(r"<svg[\s\S]*?</svg>|data:image/svg.xml;base64,[\w+/=]*")
SOLUTION = re.compile(r"```python\n(?P<block>.*?)```|`(?P<inline>answer = .*?)`", re.DOTALL)
WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_COMPARED = {WIDGET, "image/png", "image/jpeg", "image/svg+xml"}

Notebook = Any


def executed(notebook: Notebook, folder: Path, *, allow_errors: bool = False) -> Notebook:
    """Return a copy of a notebook with the outputs of a fresh kernel in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises and has no tag raises-exception; with `allow_errors` the
            error is its output, and the next cell runs.
    """
    from nbclient import NotebookClient

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this Python
    ran = copy.deepcopy(notebook)
    client = NotebookClient(
        ran,
        timeout=SECONDS_PER_CELL,
        allow_errors=allow_errors,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return ran


def cleaned(notebook: Notebook) -> Notebook:
    """Return a copy without what a run or an editor leaves: state of widgets, times, models of widgets."""
    clean = copy.deepcopy(notebook)
    clean.metadata = nbformat.from_dict({key: clean.metadata[key] for key in KEPT if key in clean.metadata})
    clean.metadata.get("language_info", {}).pop("version", None)
    for cell in clean.cells:
        tags = cell.metadata.get("tags")
        source_hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if source_hidden:
            cell.metadata["jupyter"] = nbformat.from_dict({"source_hidden": True})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "text/html" in output.get("data", {}):  # the static picture, which JupyterLab shows without the model
                output.data.pop(WIDGET, None)
    return clean


def differences(stored: Notebook, fresh: Notebook) -> Iterator[str]:
    """Yield a sentence, with the lines that differ, for each cell whose fresh outputs are not the stored ones."""
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if before.cell_type != "code" or _is_ignored(before):
            continue
        if before.execution_count is None:
            yield f"cell {before.id}: never executed"
        lines = [_lines(cell.outputs) for cell in (before, after)]
        if lines[0] != lines[1]:
            changed = list(difflib.unified_diff(*lines, lineterm="", n=0))[2:]
            yield "\n    ".join([f"cell {before.id}: the outputs differ", *(line[:200] for line in changed[:12])])


def _is_ignored(cell: Notebook) -> bool:
    return IGNORED in cell.metadata.get("tags", [])


def _lines(outputs: Sequence[Any]) -> list[str]:
    """The compared parts of the outputs."""
    lines: list[str] = []
    for output in outputs:
        parts = dict(output.get("data", {}))
        parts.update({f"stream {output.name}": output.text} if output.output_type == "stream" else {})
        parts.update({f"error {output.ename}": output.evalue} if output.output_type == "error" else {})
        for name in sorted(parts.keys() - NOT_COMPARED):
            text = parts[name] if isinstance(parts[name], str) else repr(parts[name])
            lines += [f"[{name}]", *DRAWING.sub("<svg/>", text).splitlines()]
    return lines


def solution_of(notebook: Notebook, exercise: Notebook) -> str:
    """Return the code of the folded solution after an exercise: its first block, or the inline ``answer = …``.

    Raises:
        ValueError: there is no solution with code.
    """
    after = notebook.cells[notebook.cells.index(exercise) + 1 :]
    folded = next((cell.source for cell in after if "<details>" in cell.source), "")
    if found := SOLUTION.search(folded):
        return found["block"] or found["inline"]
    raise ValueError(f"cell {exercise.id}: no solution with a block of code or with `answer = …` follows it")


def solved(exercise: str, solution: str) -> str:
    """Return the code of an exercise with its solution before the call of the check, its last statement."""
    *before, check = [ast.get_source_segment(exercise, each) or "" for each in ast.parse(exercise).body]
    return "\n".join([*before, solution, check])


def again(path: Path) -> list[str]:
    """Run each cell of a notebook twice, then the exercises with their solutions, and return what is wrong."""
    stored = _with_cells(notebook := nbformat.read(path, as_version=4), _code_cells(notebook))
    exercises = [cell for cell in stored.cells if re.fullmatch(r"exercise-\d", cell.id)]
    answers = [solved(cell.source, solution_of(notebook, cell)) for cell in exercises]
    twice = [cell for cell in stored.cells for _ in range(2)]
    ran = executed(_with_cells(notebook, [*twice, *map(_new_cell, answers)]), path.parent, allow_errors=True).cells
    first, second = (_with_outputs(stored, ran[start : len(twice) : 2]) for start in (0, 1))
    faults = [*differences(stored, first)]
    faults += [fault.replace("the outputs", "run again, the outputs") for fault in differences(first, second)]
    for exercise, answered in zip(exercises, ran[len(twice) :], strict=True):
        said = "\n".join(_lines(answered.outputs))
        if not re.search(r"^Right\b", said, re.MULTILINE):
            faults.append(f"cell {exercise.id}: the check does not accept the solution\n    {said[:300]}")
    return faults


def _code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _with_cells(notebook: Notebook, cells: Sequence[Notebook]) -> Notebook:
    """Return a notebook with copies of these cells, which may repeat: their ids are numbered in the second place."""
    changed, seen = copy.deepcopy(notebook), set[str]()
    changed.cells = [copy.deepcopy(cell) for cell in cells]
    for number, cell in enumerate(changed.cells):
        cell.id = f"{cell.id}-{number}" if cell.id in seen else cell.id
        seen.add(cell.id)
    return changed


def _with_outputs(notebook: Notebook, ran: Sequence[Notebook]) -> Notebook:
    """Return a copy of a notebook with the outputs of other cells."""
    changed = copy.deepcopy(notebook)
    for cell, source in zip(changed.cells, ran, strict=True):
        cell.outputs = source.outputs
    return changed


def _new_cell(source: str) -> Notebook:
    return nbformat.v4.new_code_cell(source)


def translated(lesson: Notebook, translation: Notebook) -> Notebook:
    """Return a copy of a lesson with the markdown of its translation; cells that it lacks keep the lesson's."""
    prose = {cell.id: cell.source for cell in translation.cells if cell.cell_type == "markdown"}
    copied = copy.deepcopy(lesson)
    for cell in copied.cells:
        if cell.cell_type == "markdown":
            cell.source = prose.get(cell.id, cell.source)
    return copied


def translate(path: Path) -> None:
    """Copy the code and the outputs of a lesson to its translation, if it has one."""
    translation = path.parent / "zh" / path.name
    if translation.exists():
        write(translated(*(nbformat.read(each, as_version=4) for each in (path, translation))), translation)


def write(notebook: Notebook, path: Path) -> None:
    """Write a notebook that ends with one newline."""
    path.write_text(nbformat.writes(notebook, version=4).rstrip("\n") + "\n", encoding="utf-8")


def build(path: Path) -> None:
    """Run a notebook and write it, cleaned; its translation gets the same outputs."""
    stored = nbformat.read(path, as_version=4)
    fresh = cleaned(executed(stored, path.parent))
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if any("image/png" in output.get("data", {}) for output in before.get("outputs", [])) and _is_ignored(before):
            after.outputs = before.outputs  # a picture of the page, which tests.browser.pictures takes
    write(fresh, path)
    translate(path)


def check(path: Path) -> list[str]:
    """Run a notebook and return what is wrong with the stored one."""
    notebook = nbformat.read(path, as_version=4)
    faults = list(differences(notebook, executed(notebook, path.parent)))
    if cleaned(notebook) != notebook:
        faults.append("it has metadata of a run or of an editor: build it")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check or translate notebooks, or run them again; return 1 if one has drifted."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("build", "check", "translate", "again"))
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all if there are none")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.paths or sorted(FOLDER.glob("[0-9][0-9]_*.ipynb")):
        if options.action == "translate":
            translate(path)
            continue
        if options.action == "build":
            build(path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            continue
        faults = (again if options.action == "again" else check)(path)
        status = 1 if faults else status
        print(f"{path}: " + ("as stored" if not faults else "\n  ".join(["", *faults])), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
