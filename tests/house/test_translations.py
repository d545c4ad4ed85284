"""The translated lessons, notebooks/zh: the prose is Chinese, everything else is that of the English lesson.

Since code and stored outputs are equal, nbval runs the English lessons alone (pyproject.toml ignores notebooks/zh).
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from course import FOLDER, read, text_of
from source_tree import relative

CHINESE = re.compile(r"[\u4e00-\u9fff]")
# `**预测：**两次` is not bold: by CommonMark, ** closes after punctuation only if no letter follows.
BOLD = re.compile(r"\*\*[^*\n]+\*\*.?")
STAYS_OPEN = re.compile(r"[：，。；、？！）”]\*\*[\u4e00-\u9fffA-Za-z0-9`]$")
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|\b(?:src|href)=\"([^\"]+)\"")
TRANSLATED = sorted((FOLDER / "zh").glob("*.ipynb"))
Notebook = dict[str, Any]


def without_prose(notebook: Notebook) -> list[Notebook]:
    """Return the cells without the sources of the markdown cells."""
    cells = copy.deepcopy(notebook["cells"])
    for cell in cells:
        if cell["cell_type"] == "markdown":
            del cell["source"]
    return cells


def code_faults(translated: Notebook, english: Notebook) -> Iterator[str]:
    """Yield what differs from the English lesson beside the prose: code, outputs, ids, tags, the order."""
    here, there = without_prose(translated), without_prose(english)
    if [cell["id"] for cell in here] != [cell["id"] for cell in there]:
        yield "the cells are not those of the English lesson, in its order"
        return
    for mine, original in zip(here, there, strict=True):
        different = [key for key in sorted(mine.keys() | original.keys()) if mine.get(key) != original.get(key)]
        if different:
            yield f"cell {mine['id']}: {', '.join(different)} differ from the English lesson"
    if {**translated, "cells": []} != {**english, "cells": []}:
        yield "the metadata of the notebook differ from the English lesson"


def prose_faults(translated: Notebook) -> Iterator[str]:
    """Yield the markdown cells that are not translated, and bold text that Markdown does not close."""
    for cell in translated["cells"]:
        if cell["cell_type"] == "markdown":
            if not CHINESE.search(text_of(cell)):
                yield f"cell {cell['id']}: no Chinese"
            yield from (
                f"cell {cell['id']}: {found!r}: punctuation goes behind the **, else it does not close"
                for found in BOLD.findall(text_of(cell))
                if STAYS_OPEN.search(found)
            )


def code_blocks(text: str) -> list[str]:
    """Return the fenced blocks of a markdown text, and the answers in its lines."""
    return re.findall(r"^```.*?^```|`answer = [^`]*`", text, re.MULTILINE | re.DOTALL)


def solution_faults(translated: Notebook, english: Notebook) -> Iterator[str]:
    """Yield the markdown cells whose fenced code or folded parts are not those of the English lesson."""
    originals = {cell["id"]: text_of(cell) for cell in english["cells"]}
    for cell in translated["cells"]:
        text, original = text_of(cell), originals.get(cell["id"], "")
        if cell["cell_type"] == "markdown" and code_blocks(text) != code_blocks(original):
            yield f"cell {cell['id']}: its code differs from the English lesson"
        if any(text.count(tag) != original.count(tag) for tag in ("<details>", "</details>", "</summary>")):
            yield f"cell {cell['id']}: what is folded differs from the English lesson"


def link_faults(translated: Notebook, folder: Path) -> Iterator[str]:
    """Yield the links of a notebook in `folder` that lead nowhere, or to English although there is a translation."""
    text = "\n".join(text_of(cell) for cell in translated["cells"] if cell["cell_type"] == "markdown")
    for target in ("".join(found) for found in LINK.findall(text)):
        name = target.partition("#")[0]
        if not name or re.match(r"[a-z]+:", name):
            continue
        if not (folder / name).is_file():
            yield f"{target}: no such file"
        elif name.startswith("../") and (folder / Path(name).name).is_file():
            yield f"{target}: there is a translation, {Path(name).name}"


def marks_of(text: str) -> set[str]:
    """Return what a translation keeps: the numbers of a prose, without thousands separators, and its inline code."""
    prose = LINK.sub("", " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split()))
    code = re.compile(r"`[^`]+`")
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", code.sub("", prose))
    return {*code.findall(prose), *(re.sub(r"^0(?=\d)", "", number) for number in re.findall(r"\d+(?:\.\d+)?", plain))}


def omissions(translated: Notebook, english: Notebook) -> Iterator[str]:
    """Yield the markdown cells that lack a number or a name of the English cell, and so probably its sentence."""
    for mine, original in zip(translated["cells"], english["cells"], strict=True):
        missing = marks_of(text_of(original)) - marks_of(text_of(mine))
        if mine["cell_type"] == "markdown" and missing:
            yield f"cell {mine['id']}: the English lesson also says {', '.join(sorted(missing))}"


every_translation = pytest.mark.parametrize("path", TRANSLATED, ids=relative)


def test_there_are_translations() -> None:
    assert TRANSLATED


@every_translation
def test_code_and_outputs_are_those_of_the_english_lesson(path: Path) -> None:
    english = read(FOLDER / path.name)
    assert [*code_faults(read(path), english), *solution_faults(read(path), english)] == []


@every_translation
def test_prose_is_translated(path: Path) -> None:
    assert list(prose_faults(read(path))) == []


@every_translation
def test_no_number_or_name_is_left_out(path: Path) -> None:
    assert list(omissions(read(path), read(FOLDER / path.name))) == []


@every_translation
def test_links_lead_to_files(path: Path) -> None:
    assert list(link_faults(read(path), path.parent)) == []


# ---- that the rules fire -------------------------------------------------------------------------


def lesson(*prose: str) -> Notebook:
    code = {"cell_type": "code", "id": "code", "execution_count": 1, "metadata": {"tags": ["a"]}, "source": ["1"]}
    texts = [
        {"cell_type": "markdown", "id": f"text-{number}", "metadata": {}, "source": [text]}
        for number, text in enumerate(prose)
    ]
    return {"cells": [*texts, {**code, "outputs": []}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


ENGLISH = lesson("Half is small. [Next](01_next.ipynb)", "A task\n```python\nx = 1\n```\n<details></details>")
CHINESE_LESSON = lesson("half 很小。[下一课](01_next.ipynb)", "任务\n```python\nx = 1\n```\n<details></details>")


def test_the_rules_accept_a_translation(tmp_path: Path) -> None:
    folder = tmp_path / "zh"
    folder.mkdir()
    (folder / "01_next.ipynb").touch()
    assert list(code_faults(CHINESE_LESSON, ENGLISH)) == []
    assert list(solution_faults(CHINESE_LESSON, ENGLISH)) == []
    assert list(prose_faults(CHINESE_LESSON)) == []
    assert list(link_faults(CHINESE_LESSON, folder)) == []
    assert list(prose_faults(lesson("**预测**：两次。**迟滞**（hysteresis）\n\n**1.** 一个梯度"))) == []


def change_cell(index: int, **change: object) -> Callable[[Notebook], None]:
    return lambda notebook: notebook["cells"][index].update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_cell(-1, source=["2"]), "cell code: source differ"),
        (change_cell(-1, outputs=[{"output_type": "stream"}]), "cell code: outputs differ"),
        (change_cell(-1, execution_count=2), "cell code: execution_count differ"),
        (change_cell(-1, metadata={"tags": []}), "cell code: metadata differ"),
        (change_cell(0, id="other"), "the cells are not those"),
        (lambda notebook: notebook["cells"].pop(0), "the cells are not those"),
        (lambda notebook: notebook["cells"].reverse(), "the cells are not those"),
        (lambda notebook: notebook.update(metadata={"widgets": {}}), "the metadata"),
    ],
)
def test_a_difference_beside_the_prose_is_found(change: Callable[[Notebook], None], said: str) -> None:
    translated = copy.deepcopy(CHINESE_LESSON)
    change(translated)
    (fault,) = code_faults(translated, ENGLISH)
    assert said in fault


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("任务\n```python\nx = 2\n```\n<details></details>", "its code"),
        ("任务\n```python\nx = 1\n```\n<details></details>`answer = 2`", "its code"),
        ("任务\n```python\nx = 1\n```\n<details>", "folded"),
    ],
)
def test_a_different_solution_is_found(source: str, said: str) -> None:
    translated = copy.deepcopy(CHINESE_LESSON)
    translated["cells"][1]["source"] = [source]
    (fault,) = solution_faults(translated, ENGLISH)
    assert fault.startswith("cell text-1: ")
    assert said in fault


@pytest.mark.parametrize(("text", "said"), [("Half is small.", "no Chinese"), ("**预测：**两次", "does not close")])
def test_prose_that_is_not_translated_well_is_found(text: str, said: str) -> None:
    (fault,) = prose_faults(lesson(text))
    assert said in fault


def test_a_number_or_a_name_that_is_left_out_is_found() -> None:
    english = lesson("After 1,200 steps `amp` skips 07 of\nthem, see [06](06_loss.ipynb).")
    assert list(omissions(lesson("`amp` 在 1200 步之后跳过 7 步，见[第 6 课](06_loss.ipynb)。"), english)) == []
    assert list(omissions(lesson("跳过 7 步，见第 6 课。"), english)) == [
        "cell text-0: the English lesson also says 1200, `amp`"
    ]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[外部](https://pytorch.org) [同页](#a) [课](01_next.ipynb#b)", []),
        ("[课](02_none.ipynb)", ["02_none.ipynb: no such file"]),
        ("![图](../images/none.png)", ["../images/none.png: no such file"]),
        ('<img src="images/none.png">', ["images/none.png: no such file"]),
        ("[课](../01_next.ipynb)", ["../01_next.ipynb: there is a translation, 01_next.ipynb"]),
        ("[课](../02_next.ipynb)", []),
    ],
)
def test_a_link_that_leads_nowhere_or_to_english_is_found(text: str, faults: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "zh"
    folder.mkdir()
    for name in ("zh/01_next.ipynb", "01_next.ipynb", "02_next.ipynb"):
        (tmp_path / name).touch()
    assert list(link_faults(lesson(text), folder)) == faults
