"""`amplab lab` as a person meets it: the lab opens by itself, survives a reload, and is in view after Run All."""

from collections.abc import Iterator

import pytest
from dashboard_page import DashboardPage
from lab_page import NOTEBOOKS, LabPage, sound_page
from lab_server import LabServer, running_amplab_lab
from playwright.sync_api import Browser, expect

LESSON = "/doc/tree/00_the_lab.ipynb"
IN_VIEW = """dashboard => {
  const { top, bottom } = dashboard.getBoundingClientRect();
  return Math.min(bottom, innerHeight) - Math.max(top, 0) > innerHeight / 2;
}"""
STEP_OF_THE_KERNEL = "print(len(amplab.lab.active().history))"


@pytest.fixture(scope="module")
def lessons(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """What `amplab lab` starts."""
    with running_amplab_lab(tmp_path_factory.mktemp("amplab_lab")) as server:
        yield server


@pytest.fixture
def lesson(lessons: LabServer, browser: Browser) -> Iterator[LabPage]:
    """A page on which nothing has been pressed."""
    with sound_page(lessons, browser) as page:
        yield page


def test_the_lab_opens_by_itself_and_is_there_after_run_all_and_after_a_reload(lesson: LabPage) -> None:
    lesson.page.goto(lesson.server.url(LESSON))
    dashboard = DashboardPage(lesson)
    lesson.wait_until_idle()
    lesson.run_all()
    lesson.page.wait_for_function(IN_VIEW, arg=dashboard.root.element_handle())
    dashboard = DashboardPage(lesson)
    dashboard.press("Start")
    dashboard.wait_for_step(60)
    lesson.save()
    lesson.reload()
    again = DashboardPage(lesson)
    again.wait_for_step(61)  # the same run, which went on
    again.wait_for_state("running")
    again.press("Pause")
    again.wait_for_state("paused")
    expect(again.root.locator(".amp-notice")).to_have_count(0)
    lesson.wait_until_idle()
    assert again.step == int(lesson.execute(STEP_OF_THE_KERNEL))
    assert (NOTEBOOKS / "00_the_lab.ipynb").read_bytes() != (lesson.server.root / "00_the_lab.ipynb").read_bytes()
