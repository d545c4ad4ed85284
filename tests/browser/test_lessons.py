"""The drawings that a reader can change, in the lessons as they are stored: before a cell runs, and moved by keyboard.

Only the cells up to a lesson's first `Explorable` run.
"""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab_page import NOTEBOOKS, LabPage
from playwright.sync_api import Locator, expect

MOST_SECONDS = 60.0


def has_explorable(cell: Any) -> bool:
    """Return whether the stored output of a cell is an explorable drawing."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    return any(each.get("text/plain", "").startswith("Explorable(") for each in data)


def explorable_lessons() -> list[Path]:
    """Return the lessons with an explorable drawing."""
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    return [path for path in paths if any(map(has_explorable, nbformat.read(path, as_version=4).cells))]


def cut_after_explorable(lesson: Path, folder: Path) -> Path:
    """Write the cells of a lesson up to its first explorable drawing; return the new file."""
    notebook = nbformat.read(lesson, as_version=4)
    last = next(place for place, cell in enumerate(notebook.cells) if has_explorable(cell))
    notebook.cells = notebook.cells[: last + 1]
    nbformat.write(notebook, folder / lesson.name)
    return folder / lesson.name


def move(page: LabPage, explorable: Locator) -> None:
    """Press keys on the first slider, or on the first choice of a drawing without sliders, until it is elsewhere."""
    slider = explorable.locator("input[type=range]")
    if slider.count():
        before = slider.first.input_value()
        slider.first.focus()
        page.page.keyboard.press("ArrowRight")
        if slider.first.input_value() == before:
            page.page.keyboard.press("ArrowLeft")
        assert slider.first.input_value() != before
        page.page.keyboard.press("End" if slider.first.input_value() != slider.first.get_attribute("max") else "Home")
        return
    control = explorable.locator("input[type=radio]:checked, select")
    control.first.focus()
    page.page.keyboard.press("ArrowDown")


def test_there_are_lessons_to_move() -> None:
    assert explorable_lessons()


@pytest.mark.parametrize("lesson", explorable_lessons(), ids=lambda path: path.stem)
def test_the_first_drawing_of_a_lesson_is_seen_and_moved(page: LabPage, tmp_path: Path, lesson: Path) -> None:
    page.open(cut_after_explorable(lesson, tmp_path))
    stored = page.page.locator(".jp-OutputArea-output:has-text('run this cell to change it')").last
    stored.scroll_into_view_if_needed()
    expect(stored).to_be_visible()
    assert "Error displaying widget" not in page.page.locator(".jp-Notebook").inner_text()

    page.run_all()
    explorable = page.page.locator(".amplab-explorable").last
    explorable.wait_for(timeout=MOST_SECONDS * 1000)
    picture = explorable.locator(".picture")
    before = picture.inner_html()
    move(page, explorable)
    expect(picture).not_to_have_js_property("innerHTML", before)
    expect(explorable.locator(".problem")).to_be_hidden()
    assert picture.bounding_box()["height"] > 20
    assert "undefined" not in explorable.inner_text()
