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

from notebooks import SOLUTION

LARGEST = 400_000  # bytes
WIDEST = 100  # columns of code; JupyterLab shows about as many in a window of 1000 pixels
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
    if silent:
        yield f"sections measure without '**Predict:**' before: {', '.join(silent)}"
    if "Summary" not in parts:
        yield "no section 'Summary'"


def row_faults(notebook: Notebook, row: list[str]) -> Iterator[str]:
    """Yield where a lesson's row of the course, split at its bars, is not what the lesson says of itself."""
    _, _, assumes, minutes, _, exercises, _ = (part.strip() for part in row)
    start = " ".join(text_of(notebook["cells"][0]).split())
    needs = re.split(r"[.:] ", start.split("You will need", 1)[-1])[0]
    said, listed = (set(map(int, re.findall(r"\b\d+\b", text))) for text in (re.sub(r"\(.*?\)", "", needs), assumes))
    if said != listed:
        yield f"it assumes the lessons {sorted(listed)}, and the lesson says {sorted(said)}"
    length = re.search(r"(\d+(?: to \d+)?) minutes", start)
    if length is None or not re.match(rf"{length[1]}(?! to)\b", minutes):
        yield f"it takes {minutes} minutes, and the lesson says {length and length[1]}"
    if not exercises.startswith(f"{len(exercise_cells(notebook))}: "):
        yield f"it has {exercises.split(':')[0]} exercises, and the lesson {len(exercise_cells(notebook))}"


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
        folded = "".join(
            text_of(after) for after in notebook["cells"][place + 1 : end] if "<details>" in text_of(after)
        )
        if not SOLUTION.search(folded):
            yield f"cell {cell['id']}: no folded solution after it with code that solves it"
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
        markdown("solution-1", "<details><summary>Solution</summary>`answer = 1`</details>"),
        code("exercise-2", "answer = ...\ncheck_b(answer)", "Not answered yet"),
        markdown("solution-2", "<details><summary>Solution</summary>\n```python\nanswer = 2\n```\n</details>"),
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
        ("solution-1", "<details>It is 1.</details>", "code that solves it"),
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
    assert [fault for fault in all_faults(lesson) if "before: 3.2 Scales" in fault]
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


ROWS = [line.split("|") for line in COURSE_PAGE.splitlines() if re.match(r"\| \[\d\d", line)]
PATHS = dict(
    re.findall(r"^\*\*(One hour|An afternoon|An evening)(.*?)(?=^\*\*|^\[16)", COURSE_PAGE, re.MULTILINE | re.DOTALL)
)
MINUTES = {"One hour": 60, "An afternoon": 240, "An evening": 180}


@pytest.mark.parametrize(("path", "row"), list(zip(written(), ROWS, strict=True)), ids=COURSE)
def test_the_course_says_of_a_lesson_what_the_lesson_says(path: Path, row: list[str]) -> None:
    assert list(row_faults(read(path), row)) == []


def lessons_of(text: str) -> list[str]:
    """Return the numbers of the lessons that a path links to; `[01](…) to [03](…)` are three."""
    numbers = [name[:2] for name in lesson_links(text)]
    for first, last in re.findall(r"\[(\d\d)\]\(\w+\.ipynb\) to\s+\[(\d\d)\]", text):
        numbers += [f"{number:02}" for number in range(int(first) + 1, int(last))]
    return sorted(numbers)


@pytest.mark.parametrize("name", MINUTES)
def test_a_path_takes_no_longer_than_it_says(name: str) -> None:
    longest = {row[1][2:4].strip(): max(map(int, re.findall(r"\d+", row[3].split(" for")[0]))) for row in ROWS}
    assert sum(longest[number] for number in lessons_of(PATHS[name])) <= MINUTES[name]


def test_lesson_00_has_the_path_of_one_hour() -> None:
    (hour,) = re.findall(r"If you have one hour, read ([^.]*)", " ".join(map(text_of, read(written()[0])["cells"])))
    numbers = re.findall(r"\d+", re.sub(r"\(.*?\)", "", hour))
    assert ["00", *(f"{int(number):02}" for number in numbers)] == lessons_of(PATHS["One hour"])


@pytest.mark.parametrize(
    ("place", "text", "said"),
    [(2, "08", "assumes"), (3, "15 to 20", "15 to 20 minutes"), (3, "1", "1 minutes"), (5, "3: all", "3 exercises")],
)
def test_a_row_that_is_not_the_lessons_is_found(place: int, text: str, said: str) -> None:
    lesson = sound_lesson()
    lesson["cells"][0]["source"] = ["# 3 Why\n\n**You will need** lessons 1 (formats)\nand 2, no GPU. 15 minutes. 7."]
    row = ["", "[03 Why]", "01, 02", "15", "scales", "2: two", ""]
    assert list(row_faults(lesson, row)) == []
    row[place] = text
    assert [fault for fault in row_faults(lesson, row) if said in fault]


def test_the_course_is_whole() -> None:
    assert {path.stem for path in FOLDER.glob("[0-9][0-9]_*.ipynb")} == set(COURSE)
