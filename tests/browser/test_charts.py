"""The charts and their tabs, as a person reads a long run: zoom, follow, hover, select, other rules, gradients."""

import re
from collections.abc import Iterator

import pytest
from dashboard_page import ACCENT_LIGHT, LOSS, SCALE, DashboardPage
from lab_page import NOTEBOOKS, sound_page
from lab_server import LabServer
from playwright.sync_api import Browser, Locator, expect
from redraws import LONG_RUN, redraw_milliseconds

LONG = 100_000


@pytest.fixture(scope="module")
def dashboard(server: LabServer, browser: Browser) -> Iterator[DashboardPage]:
    """One dashboard whose run begins with real steps and a skip, and then is made 100,000 steps long."""
    with sound_page(server, browser) as page:
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        page.execute("lab.trainer.run(60); lab.trainer.inject('overflow'); lab.trainer.run(45)")
        yield DashboardPage(page)


def canvas(dashboard: DashboardPage, chart: str) -> Locator:
    return dashboard.root.locator(chart)


def spoken(dashboard: DashboardPage) -> Locator:
    """What a screen reader hears after a key on a chart."""
    return dashboard.root.locator(".amp-live > [role=status]")


def spoken_range(dashboard: DashboardPage) -> tuple[int, int]:
    text = spoken(dashboard).inner_text().replace(",", "")
    low, high = re.fullmatch(r"steps (\d+) to (\d+)", text).groups()
    return int(low), int(high)


def key(dashboard: DashboardPage, name: str) -> None:
    canvas(dashboard, SCALE).press(name)


def test_the_real_run_shows_other_rules_and_the_gradients_over_the_run(dashboard: DashboardPage) -> None:
    panel = dashboard.root.locator("[data-panel=scale]")
    dashboard.open_tab("scale")
    expect(panel).to_contain_text("without an overflow")
    expect(panel.get_by_role("img", name="Memory by kind over the run")).to_be_visible()
    panel.get_by_role("radio", name="What if").click()
    expect(panel.locator("tbody tr")).to_have_count(9)
    own = panel.locator('tr[data-run="your rule"]')
    before = own.inner_text()
    panel.get_by_label("log2 of the first scale").fill("24")
    expect(own).not_to_have_text(before)
    panel.get_by_label("What an overflow multiplies the scale with").fill("7")
    expect(panel.get_by_role("alert")).to_contain_text("between 0 and 1")
    dashboard.open_tab("gradients")
    panel = dashboard.root.locator("[data-panel=gradients]")
    expect(panel).to_contain_text("Largest static scale that fits every step so far: 2")
    panel.get_by_label("Try a loss scale").fill("40")
    expect(panel.locator("[data-reading=lost]")).to_contain_text("scaled by 2⁴⁰: 0 % become zero")
    panel.get_by_role("radio", name="Over the run").click()
    heat = panel.locator(".amp-heat")
    heat.press("ArrowLeft")
    heat.press("ArrowDown")
    expect(panel.locator(".amp-chart:has(.amp-heat) [role=status]")).to_contain_text("hidden1.bias: ")
    heat.press("Enter")
    expect(panel.locator(".amp-summary")).to_contain_text("Selected step ")
    key(dashboard, "Escape")
    expect(panel.locator(".amp-summary")).not_to_contain_text("Selected")


def test_a_skipped_step_is_selected_in_the_chart_and_in_its_row(dashboard: DashboardPage) -> None:
    dashboard.open_tab("skipped")
    key(dashboard, "End")
    key(dashboard, "p")
    expect(spoken(dashboard)).to_contain_text("skipped, injected")
    step = re.search(r"step (\d+)", spoken(dashboard).inner_text())[1]
    key(dashboard, "Enter")
    row = dashboard.root.locator("[data-panel=skipped] tr[aria-current=true]")
    expect(row.first).to_contain_text(step)
    key(dashboard, "Escape")
    expect(row).to_have_count(0)


def test_a_long_run_zooms_to_single_steps(dashboard: DashboardPage) -> None:
    dashboard.lab.execute(LONG_RUN.format(steps=LONG))
    dashboard.wait_for_step(LONG)
    box = canvas(dashboard, LOSS).bounding_box()
    mouse = dashboard.lab.page.mouse

    def drag(start: float, end: float) -> None:
        mouse.move(box["x"] + start * box["width"], box["y"] + 60)
        mouse.down()
        mouse.move(box["x"] + end * box["width"], box["y"] + 60, steps=3)
        mouse.up()

    drag(0.6, 0.4)
    drag(0.5, 0.52)
    drag(0.3, 0.4)
    expect(dashboard.root.get_by_role("button", name="Show the whole run")).to_have_attribute("aria-pressed", "false")
    tip = dashboard.root.locator(".amp-tip")
    expect(tip).to_be_hidden()  # another step lies under the pointer
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    expect(tip).to_contain_text("loss ")
    dashboard.lab.page.wait_for_timeout(800)  # until the rows of the range have come
    steps = set()
    for at in range(250, 280):  # px: of this range every step can be read
        mouse.move(box["x"] + at, box["y"] + 60)
        dashboard.lab.page.wait_for_timeout(60)
        steps.add(int(re.search(r"step ([\d,]+)", tip.inner_text())[1].replace(",", "")))
    assert sorted(steps) == list(range(min(steps), max(steps) + 1))
    mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 60)
    expect(dashboard.root.get_by_role("button", name="Show the whole run")).to_have_attribute("aria-pressed", "true")
    mouse.move(0, 0)


def test_the_keys_zoom_move_and_reset(dashboard: DashboardPage) -> None:
    key(dashboard, "0")
    assert spoken_range(dashboard) == (0, LONG - 1)
    for _ in range(6):
        key(dashboard, "+")
    low, high = spoken_range(dashboard)
    assert high - low < LONG / 50
    key(dashboard, "PageUp")
    assert spoken_range(dashboard)[0] < low
    key(dashboard, "0")
    assert spoken_range(dashboard) == (0, LONG - 1)


def test_the_last_500_steps_follow_the_run(dashboard: DashboardPage) -> None:
    dashboard.root.get_by_role("button", name="Show the last 500 steps and follow the run").click()
    words = dashboard.root.locator(".amp-chart p.amp-sr").first
    expect(words).to_contain_text("steps 99,500 to 99,999")
    dashboard.lab.execute(LONG_RUN.format(steps=LONG + 50))
    expect(words).to_contain_text("steps 99,550 to 100,049")
    follow = dashboard.root.get_by_role("button", name="Keep the newest step in view")
    expect(follow).to_have_attribute("aria-pressed", "true")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "false")
    dashboard.root.get_by_role("button", name="Show the whole run").click()


def test_a_row_moves_the_charts_to_its_step(dashboard: DashboardPage) -> None:
    dashboard.open_tab("skipped")
    row = dashboard.root.locator("[data-panel=skipped] tbody tr").nth(3)
    step = int(row.get_attribute("data-step"))
    row.get_by_role("button").first.click()
    words = dashboard.root.locator(".amp-chart p.amp-sr").first
    expect(words).to_contain_text(f"steps {step - 50:,} to {step + 50:,}")
    key(dashboard, "Escape")
    key(dashboard, "0")


def test_both_charts_of_a_long_run_are_redrawn_within_16_ms(dashboard: DashboardPage) -> None:
    """Each of them within 8."""
    median, _ = redraw_milliseconds(dashboard)
    assert median <= 16


def test_the_axis_follows_the_present_run_and_not_a_far_longer_one_behind_it(dashboard: DashboardPage) -> None:
    dashboard.press("Reset")
    expect(dashboard.root.locator("[data-figure=step]")).to_have_text("0")
    key(dashboard, "0")
    dashboard.lab.execute("lab.trainer.run(100)")
    dashboard.wait_for_step(100)
    dashboard.wait_for_paint(LOSS, ACCENT_LIGHT, 150)
    words = dashboard.root.locator(".amp-chart p.amp-sr").first
    expect(words).to_contain_text("steps 0 to 99")
    dashboard.root.get_by_role("button", name="Zoom out").click()  # to the longest run
    dashboard.lab.page.wait_for_timeout(300)
    assert dashboard.painted_columns(LOSS, ACCENT_LIGHT) < 20
    dashboard.root.get_by_role("button", name="Show the whole run").click()
    dashboard.open_tab("step_through")
    dashboard.press("Take one step")
    dashboard.wait_for_step(101)
    expect(dashboard.root.get_by_role("button", name="Show the whole run")).to_have_attribute("aria-pressed", "true")
