"""Rules for the lessons as a course: their form, their exercises and their links. Each has a test that it fires."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from course import (
    COURSE,
    FOLDER,
    checks_in,
    exercise_cells,
    lesson_links,
    lesson_module,
    number_of,
    read,
    sections,
    text_of,
    written,
)
from source_tree import ROOT, parse, relative

LARGEST = 400_000  # bytes
WIDEST = 105  # columns of code; JupyterLab shows about 100 in a window of 1000 pixels
UNPREDICTED = 2  # sections that only set up or declare something
# Lesson 00 is one dashboard: it has no numbered sections and nothing random.
FORMED = [path for path in written() if number_of(path) != "00"]
Notebook = dict[str, Any]


def form_faults(notebook: Notebook, number: str) -> Iterator[str]:
    """Yield a sentence for each rule of the form of a lesson that is broken."""
    cells = notebook["cells"]
    title = text_of(cells[0])
    if not re.match(rf"# {int(number)} \w", title):
        yield f"the title does not start with '# {int(number)} '"
    start = " ".join(text_of(cell) for cell in cells[:4] if cell["cell_type"] == "markdown")
    if "After this" not in start:
        yield "no promise: 'After this you can …'"
    if "ou will need" not in start:
        yield "it does not say what 'You will need'"
    setup = " ".join([text_of(cell) for cell in cells if cell["cell_type"] == "code"][:2])
    if not re.search(r"manual_seed\(", setup):
        yield "the first two code cells set no seed"
    yield from section_faults(notebook, number)
    for cell in cells:
        if cell["cell_type"] == "code":
            widest = max(map(len, text_of(cell).splitlines()), default=0)
            if widest > WIDEST:
                yield f"cell {cell['id']}: a line of {widest} columns; at most {WIDEST}"


def section_faults(notebook: Notebook, number: str) -> Iterator[str]:
    """Yield what the sections lack: a prediction before a measurement, the summary."""
    parts = sections(notebook)
    numbered = [name for name in parts if re.match(rf"{int(number)}\.\d", name)]
    if len(numbered) < 2:
        yield f"fewer than two sections are numbered {int(number)}.1, {int(number)}.2"
    silent = []
    for name in numbered:
        kinds = [cell["cell_type"] for cell in parts[name]]
        predicts = [place for place, cell in enumerate(parts[name]) if re.search(r"\*\*Predict", text_of(cell))]
        if "code" in kinds and not (predicts and "code" in kinds[predicts[0] :]):
            silent.append(name)
    if len(silent) > min(UNPREDICTED, len(numbered) // 2):
        yield f"sections measure without '**Predict:**' before: {', '.join(silent)}"
    if "Summary" not in parts:
        yield "no section 'Summary'"


def link_faults(notebook: Notebook, name: str, names: list[str]) -> Iterator[str]:
    """Yield the missing link to the next lesson, and the links to lessons that are none."""
    linked = {link for cell in notebook["cells"] for link in lesson_links(text_of(cell))}
    yield from (f"{link}.ipynb: no lesson has this name" for link in sorted(linked - set(COURSE)))
    follows = COURSE[COURSE.index(name) + 1] if name in COURSE[:-1] else None
    summary = " ".join(map(text_of, sections(notebook).get("Summary", [])))
    if follows in names and follows not in lesson_links(summary):
        yield f"the summary does not link to the next lesson, {follows}.ipynb"


def exercise_faults(notebook: Notebook, checks: dict[str, str], number: str) -> Iterator[str]:
    """Yield what is wrong with the exercises: their number, names, solutions, stored verdicts and checks."""
    cells = exercise_cells(notebook)
    if not 2 <= len(cells) <= 6:
        yield f"{len(cells)} cells with the id exercise-N; expected 2 to 4, or the 6 of the clinic"
    places = [notebook["cells"].index(cell) for cell in cells]
    for cell, place, end in zip(cells, places, [*places[1:], None], strict=True):
        called = re.findall(r"\b(check_\w+)\(", text_of(cell))
        if not called:
            yield f"cell {cell['id']}: no call of a check_…"
        if not any("<details>" in text_of(after) for after in notebook["cells"][place + 1 : end]):
            yield f"cell {cell['id']}: no folded solution after it"
        if not re.search("Not answered yet|Not yet: ", str(cell["outputs"])):
            yield f"cell {cell['id']}: its stored output is neither 'Not answered yet' nor 'Not yet: …'"
    used = set(re.findall(r"\b(check_\w+)\(", "\n".join(map(text_of, cells))))
    yield from (f"{check} is used in no exercise" for check in sorted(checks.keys() - used))
    yield from (f"{check} is no exercise of the lesson's module" for check in sorted(used - checks.keys()))
    yield from (f"{check}: exercise({name!r})" for check, name in checks.items() if name[:2] != number)
    if len(set(checks.values())) < len(checks):
        yield "two checks have the same name"


def untested_checks(checks: dict[str, str], tests: Path) -> list[str]:
    """Return the checks whose name is not in the lesson's tests; that the tests hear each verdict is checked there."""
    names = set(re.findall(r"\bcheck_\w+", tests.read_text(encoding="utf-8"))) if tests.exists() else set()
    return sorted(checks.keys() - names)


every_lesson = pytest.mark.parametrize("path", written(), ids=relative)


@pytest.mark.parametrize("path", FORMED, ids=relative)
def test_lesson_has_the_form(path: Path) -> None:
    assert list(form_faults(read(path), number_of(path))) == []


@every_lesson
def test_lesson_links_to_the_next(path: Path) -> None:
    assert list(link_faults(read(path), path.stem, [each.stem for each in written()])) == []


@every_lesson
def test_exercises_have_checks_and_solutions(path: Path) -> None:
    assert list(exercise_faults(read(path), checks_in(lesson_module(path)), number_of(path))) == []


@every_lesson
def test_every_check_is_tested(path: Path) -> None:
    tests = ROOT / "tests" / "lessons" / f"test_lesson_{number_of(path)}.py"
    assert untested_checks(checks_in(lesson_module(path)), tests) == []


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.ipynb")), ids=relative)
def test_lesson_is_small(path: Path) -> None:
    assert path.stat().st_size <= LARGEST


# ---- that the rules fire -------------------------------------------------------------------------

CHECKS = {"check_a": "03-1", "check_b": "03-2"}


def markdown(name: str, text: str) -> Notebook:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": [text]}


def code(name: str, text: str, said: str = "") -> Notebook:
    outputs = [{"output_type": "stream", "name": "stdout", "text": [said]}] if said else []
    return {"cell_type": "code", "id": name, "metadata": {}, "source": [text], "outputs": outputs}


def sound_lesson() -> Notebook:
    """Return a lesson that follows every rule."""
    cells = [
        markdown("title", "# 3 Why scale the loss\n\nAfter this you can choose. **You will need** lesson 1."),
        code("setup", "import torch\ntorch.manual_seed(0)"),
        markdown("one", "## 3.1 Gradients\n\n**Predict:** how many?"),
        code("count", "print(1)"),
        markdown("two", "## 3.2 Scales"),
        markdown("predict-two", "**Predict:** which?"),
        code("scale", "print(2)"),
        markdown("summary", "## Summary\n* It helps.\n\n[Next: opt levels](04_opt_levels.ipynb)"),
        markdown("exercises", "## Exercises"),
        code("exercise-1", "answer = ...\ncheck_a(answer)", "Not answered yet"),
        markdown("solution-1", "<details><summary>Solution</summary>1</details>"),
        code("exercise-2", "answer = ...\ncheck_b(answer)", "Not answered yet"),
        markdown("solution-2", "<details><summary>Solution</summary>2</details>"),
    ]
    return {"cells": cells}


def all_faults(lesson: Notebook, checks: dict[str, str] = CHECKS) -> list[str]:
    names = ["03_why_scale_the_loss", "04_opt_levels"]
    return [
        *form_faults(lesson, "03"),
        *link_faults(lesson, "03_why_scale_the_loss", names),
        *exercise_faults(lesson, checks, "03"),
    ]


def test_the_rules_accept_a_sound_lesson() -> None:
    assert all_faults(sound_lesson()) == []


@pytest.mark.parametrize(
    ("cell", "source", "said"),
    [
        ("title", "# Why\nAfter this you can. You will need", "title"),
        ("title", "# 3 Why\nYou will need", "promise"),
        ("title", "# 3 Why\nAfter this you can", "You will need"),
        ("setup", "import torch", "seed"),
        ("two", "Scales", "fewer than two"),
        ("summary", "[Next](04_opt_levels.ipynb)", "no section 'Summary'"),
        ("summary", "## Summary", "next lesson"),
        ("summary", "## Summary\n[a](04_opt_levels.ipynb) [b](04_levels.ipynb)", "no lesson has this name"),
        ("count", "print(" + "1 + " * 30 + "1)", "columns"),
        ("exercise-1", "answer = ...", "no call"),
        ("exercise-1", "check_c(...)", "check_c is no exercise"),
        ("exercise-1", "check_c(...)", "check_a is used in no"),
        ("solution-1", "It is 1.", "folded"),
    ],
)
def test_each_rule_fires(cell: str, source: str, said: str) -> None:
    lesson = sound_lesson()
    next(each for each in lesson["cells"] if each["id"] == cell)["source"] = [source]
    assert [fault for fault in all_faults(lesson) if said in fault]


def test_a_lesson_that_predicts_too_late_or_not_at_all_is_found() -> None:
    lesson = sound_lesson()
    one, two = lesson["cells"][2], lesson["cells"][5]
    two["source"] = ["Run it."]
    assert all_faults(lesson) == []  # one section may only set something up
    one["source"], lesson["cells"][3:4] = ["## 3.1 Gradients"], [lesson["cells"][3], markdown("late", "**Predict:** ?")]
    assert [fault for fault in all_faults(lesson) if "3.1 Gradients, 3.2 Scales" in fault]


def test_the_rules_of_the_exercises_fire() -> None:
    lesson = sound_lesson()
    assert any("same name" in fault for fault in all_faults(lesson, {"check_a": "03-1", "check_b": "03-1"}))
    assert any("04-1" in fault for fault in all_faults(lesson, {"check_a": "03-1", "check_b": "04-1"}))
    answered = copy.deepcopy(lesson)
    answered["cells"][9]["outputs"][0]["text"] = ["Right."]
    assert any("stored output" in fault for fault in all_faults(answered))
    few = {"cells": lesson["cells"][:11]}
    assert any("expected 2 to 4" in fault for fault in all_faults(few))


def test_the_check_of_the_tests_fires(tmp_path: Path) -> None:
    tests = tmp_path / "test_lesson_03.py"
    assert untested_checks(CHECKS, tests) == ["check_a", "check_b"]
    tests.write_text("check_b(1)")
    assert untested_checks(CHECKS, tests) == ["check_a"]


def test_the_checks_of_a_module_are_read(tmp_path: Path) -> None:
    module = tmp_path / "lesson_03.py"
    module.write_text("@exercise('03-1')\ndef check_a(answer): ...\n@other\ndef check_b(): ...\ndef draw(): ...\n")
    assert checks_in(module) == {"check_a": "03-1"}
    assert checks_in(tmp_path / "absent.py") == {}
    assert parse(module)


# ---- the course ---------------------------------------------------------------------------------

COURSE_PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_course_has_a_row_for_each_lesson_and_links_to_no_other() -> None:
    rows = re.findall(r"^\| \[\d\d [^\]]+\]\((\w+)\.ipynb\)", COURSE_PAGE, re.MULTILINE)
    assert rows == list(COURSE)
    assert set(lesson_links(COURSE_PAGE)) == set(COURSE)


def test_the_course_has_three_paths() -> None:
    paths = COURSE_PAGE.split("## Three paths")[1].split("## For teachers")[0]
    assert len(re.findall(r"^\*\*", paths, re.MULTILINE)) == 3


def test_the_course_is_whole() -> None:
    assert {path.stem for path in FOLDER.glob("[0-9][0-9]_*.ipynb")} == set(COURSE)
