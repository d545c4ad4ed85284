"""Presses, keys and names in lists that are drawn again while a run trains: none is lost."""

from collections.abc import Iterator

import pytest
from dashboard_page import DashboardPage
from lab_page import NOTEBOOKS, LabPage, sound_page
from lab_server import LabServer
from playwright.sync_api import Browser, Locator, expect

REDRAWN = 30  # steps at the speed below, in which every table is drawn again
TRAIN = "lab.trainer.set_speed(30); lab.trainer.start()"
REST = "lab.trainer.pause(); lab.trainer.wait(); print(lab.trainer.state)"
SKIP = "lab.trainer.inject('overflow')"


@pytest.fixture(scope="module")
def lab_page(server: LabServer, browser: Browser) -> Iterator[LabPage]:
    """One page for all tests of this file."""
    with sound_page(server, browser) as page:
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        yield page


@pytest.fixture
def dashboard(lab_page: LabPage) -> Iterator[DashboardPage]:
    """A new run beside two that are kept; it trains slowly, and its tab of runs is open."""
    shown = DashboardPage(lab_page)
    lab_page.execute("lab.trainer.reset(name='first'); lab.trainer.wait()")
    lab_page.execute("for run in lab.trainer.kept.runs: lab.trainer.kept.remove(run.number)")
    for name in ("second", "present"):
        lab_page.execute(f"lab.trainer.run(5); lab.trainer.reset(name='{name}'); lab.trainer.wait()")
    shown.open_tab("runs")
    lab_page.execute(TRAIN)
    expect(row(shown, "second")).to_be_visible()
    yield shown
    assert lab_page.execute(REST) == "paused\n"


def row(dashboard: DashboardPage, name: str) -> Locator:
    """The row of a run."""
    return dashboard.root.locator(f"[data-panel=runs] .amp-runs:not([hidden]) tr[data-run='{name}']")


def press(dashboard: DashboardPage, target: Locator) -> None:
    """Press the mouse on something for so long that its list would be drawn again meanwhile."""
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    mouse = dashboard.lab.page.mouse
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    dashboard.wait_for_step(dashboard.step + REDRAWN)
    mouse.up()


def shown_lines(dashboard: DashboardPage) -> str:
    """The kept runs whose lines are drawn, as the kernel has them."""
    return dashboard.lab.execute("print(*[run.name for run in lab.trainer.kept.runs if run.is_shown])").strip()


def test_a_long_press_ticks_a_run_and_removes_one(dashboard: DashboardPage) -> None:
    tick = row(dashboard, "first").get_by_role("checkbox")
    press(dashboard, tick)
    expect(tick).not_to_be_checked()
    assert shown_lines(dashboard) == "second"
    press(dashboard, row(dashboard, "first").get_by_role("button", name="Remove"))
    expect(row(dashboard, "first")).to_have_count(0)


def test_a_key_that_is_held_ticks_a_run(dashboard: DashboardPage) -> None:
    tick = row(dashboard, "first").get_by_role("checkbox")
    tick.focus()
    dashboard.lab.page.keyboard.down("Space")
    dashboard.wait_for_step(dashboard.step + REDRAWN)
    expect(tick).to_be_focused()
    dashboard.lab.page.keyboard.up("Space")
    expect(tick).not_to_be_checked()
    assert shown_lines(dashboard) == "second"


def test_the_first_press_after_a_name_was_typed_acts(dashboard: DashboardPage) -> None:
    name = row(dashboard, "second").get_by_role("textbox")
    name.click()
    name.press("End")
    dashboard.lab.page.keyboard.type(" x")
    press(dashboard, row(dashboard, "first").get_by_role("button", name="Remove"))
    expect(row(dashboard, "first")).to_have_count(0)
    expect(row(dashboard, "second x")).to_be_visible()


def test_the_other_rows_and_cells_go_on_while_the_cursor_is_in_a_name(dashboard: DashboardPage) -> None:
    name = row(dashboard, "second").get_by_role("textbox")
    name.click()
    name.press("End")
    dashboard.lab.page.keyboard.type(" y")
    before = steps_told(dashboard)
    dashboard.wait_for_step(dashboard.step + REDRAWN)
    assert steps_told(dashboard) > before
    expect(name).to_be_focused()
    expect(name).to_have_value("second y")
    # A name that is refused is put back when the field is left.
    name.fill("  ")
    name.blur()
    expect(dashboard.root.locator(".amp-run-summary")).to_contain_text("enter another name")
    expect(name).to_have_value("second")


def steps_told(dashboard: DashboardPage) -> int:
    """The steps in the row of the present run."""
    return int(row(dashboard, "present").locator("td").nth(4).inner_text().replace(",", ""))


def test_a_long_press_selects_a_skipped_step_while_more_are_listed_above_it(dashboard: DashboardPage) -> None:
    for _ in range(2):
        dashboard.lab.execute(SKIP)
        dashboard.wait_for_step(dashboard.step + 3)
    dashboard.open_tab("skipped")
    rows = dashboard.rows("skipped")
    expect(rows).to_have_count(2)
    link = rows.last.get_by_role("button", name="show in the charts")
    skipped = link.inner_text()
    link.scroll_into_view_if_needed()
    box = link.bounding_box()
    mouse = dashboard.lab.page.mouse
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    dashboard.lab.execute(SKIP)
    dashboard.wait_for_step(dashboard.step + REDRAWN)
    mouse.up()
    expect(rows).to_have_count(3)
    expect(dashboard.root.locator("[data-panel=skipped] tr[aria-current]")).to_contain_text(skipped)


def test_enter_takes_a_name_and_escape_leaves_it(dashboard: DashboardPage) -> None:
    field = row(dashboard, "first").get_by_role("textbox")
    field.fill("other")
    field.press("Enter")
    expect(row(dashboard, "other")).to_be_visible()
    field = row(dashboard, "other").get_by_role("textbox")
    field.fill("none")
    field.press("Escape")
    dashboard.wait_for_step(dashboard.step + REDRAWN)
    expect(row(dashboard, "other").get_by_role("textbox")).to_have_value("other")
    assert shown_lines(dashboard) == "other second"
