"""How the dashboard behaves towards its user: names, keys, room, refusals, failures, themes."""

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from dashboard_page import ACCENT_LIGHT, HISTOGRAM, LOSS, SCALE, DashboardPage, exponent
from lab_page import NOTEBOOKS, sound_page
from lab_server import LabServer
from playwright.sync_api import Browser, expect

WIDEST, HIGHEST = 1000, 760  # px: one screen of a laptop
SEEN = 10  # pixel columns: a histogram of few exponents has few bars
ACCENT_DARK = [0x56, 0xB4, 0xE9]
STICKING_OUT = """root => [...root.querySelectorAll("*")].filter(element =>
  element.offsetParent && !element.closest(".amp-sr, .amp-scroll, .amp-tabs, svg") &&
  element.getBoundingClientRect().right > root.getBoundingClientRect().right + 1).map(element => element.className)"""
TRUNCATED = """root => [...root.querySelectorAll("[data-panel=dtypes] select")].filter(select => {
  const style = getComputedStyle(select), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  const room = select.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return pen.measureText(select.selectedOptions[0].text).width > room;
}).map(select => select.title)"""
CUT = """root => [...root.querySelectorAll("[data-panel=gradients] :is(.amp-chart-head, .amp-now, .amp-scroll)")]
  .filter(part => part.offsetParent)
  .filter(part => part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight + 1)
  .map(part => part.className)"""
RAISING = """
def mine(event):
    raise ValueError('a callback of my own')

end = lab.trainer.subscribe(mine)
"""


@pytest.fixture(scope="module")
def dashboard(server: LabServer, browser: Browser) -> Iterator[DashboardPage]:
    """One dashboard for all tests of this file; each test leaves it paused and without a message."""
    with sound_page(server, browser) as page:
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        shown = DashboardPage(page)
        yield shown
        expect(shown.root.locator(".amp-notice")).to_have_count(0)


def test_it_fits_one_screen(dashboard: DashboardPage) -> None:
    box = dashboard.root.bounding_box()
    assert box["width"] <= WIDEST
    assert box["height"] <= HIGHEST
    assert dashboard.root.evaluate(STICKING_OUT) == []
    assert dashboard.root.evaluate(TRUNCATED) == []
    lefts = [figure.bounding_box()["x"] for figure in dashboard.root.locator("[data-figure]").all()]
    gaps = [right - left for left, right in pairwise(lefts)]
    assert max(gaps) - min(gaps) < 1, "columns of one width"


@pytest.mark.parametrize("width", [700, 420])
def test_in_a_narrow_window_the_charts_are_below_start_and_then_come_the_settings(
    dashboard: DashboardPage, width: int
) -> None:
    """700 px is a window of 1400 at 200 % zoom."""
    page = dashboard.lab.page
    usual = page.viewport_size
    page.set_viewport_size({"width": width, "height": usual["height"]})
    start, loss, scale, level, tabs = (
        each.bounding_box()
        for each in (
            *(dashboard.button("Start"), dashboard.root.locator(LOSS), dashboard.root.locator(SCALE)),
            *(dashboard.button("O1"), dashboard.root.get_by_role("tablist")),
        )
    )
    sticking_out = dashboard.root.evaluate(STICKING_OUT)
    page.set_viewport_size(usual)
    assert start["y"] < loss["y"] < start["y"] + 300
    assert loss["y"] < scale["y"] < level["y"] < tabs["y"]
    assert sticking_out == []


@pytest.mark.parametrize("width", [1000, 640])
def test_the_legend_and_the_table_of_the_gradients_are_whole(dashboard: DashboardPage, width: int) -> None:
    page = dashboard.lab.page
    usual = page.viewport_size
    dashboard.open_tab("gradients")
    page.set_viewport_size({"width": width, "height": usual["height"]})
    expect(dashboard.root.locator("[data-reading=lost]")).to_contain_text("scaled by ")
    cut = dashboard.root.evaluate(CUT)
    page.set_viewport_size(usual)
    assert cut == []


def test_the_configuration_is_shown_whole(dashboard: DashboardPage) -> None:
    code = dashboard.root.locator(".amp-config")
    dashboard.press("dynamic")
    dashboard.root.get_by_label("floor, exponent of two").fill("2")
    dashboard.root.get_by_label("floor, exponent of two").press("Enter")
    dashboard.root.get_by_label("Optimizer", exact=True).select_option("adam")
    expect(code).to_contain_text("optimizer=adam")
    expect(code).to_contain_text("min_loss_scale")
    assert code.evaluate("code => code.scrollHeight <= code.clientHeight")
    dashboard.press("Defaults")
    expect(code).not_to_contain_text("optimizer=adam")


def test_everything_that_can_be_used_has_a_name(dashboard: DashboardPage) -> None:
    roles = {"button", "radio", "tab", "combobox", "spinbutton", "textbox", "image", "region", "tablist", "radiogroup"}
    nodes = [node for node in accessibility_nodes(dashboard) if node["role"] in roles]
    assert len(nodes) > 25
    assert [node for node in nodes if not node["name"]] == []
    for name in ("Start", "Step", "Reset", "O0", "O1", "O2", "O3", "Learning rate", "master_weights"):
        assert any(node["name"] == name for node in nodes), name


def accessibility_nodes(dashboard: DashboardPage) -> list[dict[str, str]]:
    """Return role and name of what the browser tells a screen reader about the dashboard."""
    session = dashboard.lab.page.context.new_cdp_session(dashboard.lab.page)
    session.send("DOM.getDocument", {"depth": 0})
    found = session.send("Runtime.evaluate", {"expression": "document.querySelector('.amp-dashboard')"})
    ids = {"objectId": found["result"]["objectId"]}
    tree = session.send("Accessibility.queryAXTree", ids)["nodes"]
    return [
        {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
        for node in tree
        if not node["ignored"]
    ]


def test_keys_drive_it_and_stay_in_it(dashboard: DashboardPage) -> None:
    page = dashboard.lab.page
    cells = page.locator(".jp-Cell").count()
    dashboard.button("O1").focus()
    page.keyboard.press("ArrowRight")
    expect(dashboard.button("O2")).to_be_focused()
    expect(dashboard.button("O2")).to_have_attribute("aria-checked", "true")
    page.keyboard.press("ArrowLeft")
    expect(dashboard.button("O1")).to_have_attribute("aria-checked", "true")
    for key in ("d", "d", "a", "b", "x"):  # JupyterLab's own keys for cells
        page.keyboard.press(key)
    assert page.locator(".jp-Cell").count() == cells
    dashboard.button("Start").focus()
    page.keyboard.press("Tab")
    expect(dashboard.button("Step")).to_be_focused()
    before = dashboard.step
    page.keyboard.press("Enter")
    dashboard.wait_for_step(before + 1)
    assert dashboard.step == before + 1


def test_overrides_without_meaning_are_disabled_with_the_reason(dashboard: DashboardPage) -> None:
    masters = dashboard.root.get_by_label("master_weights", exact=True)
    expect(masters).to_be_disabled()
    expect(dashboard.root.locator(".amp-overrides")).to_contain_text("need no masters")
    dashboard.press("O2")
    expect(masters).to_be_enabled()
    masters.select_option("false")
    expect(dashboard.root.locator(".amp-config")).to_contain_text("master_weights=false")
    expect(dashboard.root.locator(".amp-level .amp-note")).to_contain_text("steps the float16 weights, without masters")
    masters.select_option("null")
    dashboard.press("O1")
    expect(masters).to_be_disabled()


def test_a_refused_value_says_why_and_goes_back(dashboard: DashboardPage) -> None:
    rate = dashboard.root.get_by_label("Learning rate", exact=True)
    rate.fill("-1")
    rate.press("Enter")
    alert = dashboard.root.locator(".amp-controls [role=alert]")
    expect(alert).to_contain_text("Learning rate: -1 is not allowed")
    expect(alert).to_contain_text("a number above 0")
    expect(rate).to_have_value("0.1")
    rate.fill("0.05")
    rate.press("Enter")
    expect(alert).to_be_hidden()
    expect(dashboard.root.locator(".amp-config")).to_contain_text("lr=0.05")


def test_escape_takes_back_what_was_typed(dashboard: DashboardPage) -> None:
    rate = dashboard.root.get_by_label("Learning rate", exact=True)
    before = rate.input_value()
    rate.fill("7")
    rate.press("Escape")
    expect(rate).to_have_value(before)
    dashboard.press("Step")  # the field loses the focus
    expect(dashboard.root.locator(".amp-config")).not_to_contain_text("lr=7")


def test_what_is_no_number_in_a_browser_is_refused_in_words(dashboard: DashboardPage) -> None:
    rate = dashboard.root.get_by_label("Learning rate", exact=True)
    rate.click()
    dashboard.lab.page.keyboard.type("1e400")  # fill() refuses it
    rate.press("Enter")
    alert = dashboard.root.locator(".amp-controls [role=alert]")
    expect(alert).to_contain_text("Learning rate: not a number is not allowed; enter a number above 0")
    rate.fill("0.06")
    rate.press("Enter")
    expect(alert).to_be_hidden()


def test_what_is_no_number_is_refused_in_each_field(dashboard: DashboardPage) -> None:
    alert = dashboard.root.locator(".amp-controls [role=alert]")
    for name, kept in (("floor, exponent of two", ""), ("window: ", "50"), ("Number of steps to run", None)):
        field = dashboard.root.get_by_label(name)
        field.click()
        dashboard.lab.page.keyboard.press("Control+a")
        dashboard.lab.page.keyboard.type("1e400")
        field.press("Enter")
        label = "Run N steps" if kept is None else name[:-2] if name.endswith(": ") else name.split(",")[0]
        expect(alert).to_contain_text(f"{label}: not a number is not allowed; ")
        if kept is not None:
            expect(field).to_have_value(kept)
            assert not field.evaluate("field => field.validity.badInput")
    field.fill("100")
    dashboard.press("static")
    expect(alert).to_be_hidden()


def test_an_emptied_static_scale_is_no_number_and_is_refused(dashboard: DashboardPage) -> None:
    dashboard.press("static")
    scale = dashboard.root.get_by_label("scale, exponent of two", exact=True)
    expect(scale).to_have_value("7")
    alert = dashboard.root.locator(".amp-controls [role=alert]")
    for typed, said in (("", "no value was entered"), ("1e400", "not a number is not allowed")):
        scale.click()
        dashboard.lab.page.keyboard.press("Control+a")
        dashboard.lab.page.keyboard.press("Delete")
        dashboard.lab.page.keyboard.type(typed)
        scale.press("Enter")
        expect(alert).to_contain_text(f"Loss scale: {said}; enter an exponent of two")
        expect(scale).to_have_value("7")
        expect(dashboard.button("static")).to_have_attribute("aria-checked", "true")
    dashboard.press("by level")
    expect(alert).to_be_hidden()
    expect(dashboard.root.locator(".amp-config")).not_to_contain_text("loss_scale")


def test_an_exponent_that_no_number_holds_is_refused_as_it_was_typed(dashboard: DashboardPage) -> None:
    start = dashboard.root.get_by_label("init, exponent of two")
    alert = dashboard.root.locator(".amp-controls [role=alert]")
    for typed, shown in (("2000", "2²⁰⁰⁰"), ("-2000", "2⁻²⁰⁰⁰")):
        start.fill(typed)
        start.press("Enter")
        expect(alert).to_contain_text(f"init: {shown} is not allowed")
        expect(start).to_have_value("16")


def test_a_callback_that_raises_is_shown_and_the_lab_goes_on(dashboard: DashboardPage) -> None:
    dashboard.lab.execute(RAISING)
    before = dashboard.step
    dashboard.press("Step")
    dashboard.wait_for_step(before + 1)
    alert = dashboard.root.get_by_role("alert").filter(has_text="a callback of my own")
    expect(alert).to_contain_text("raise ValueError")
    dashboard.lab.execute("end()")
    dashboard.press("Step")
    dashboard.wait_for_step(before + 2)
    alert.get_by_role("button", name="Dismiss").click()
    expect(alert).to_have_count(0)


def test_an_underflow_is_seen_in_the_gradients(dashboard: DashboardPage) -> None:
    dashboard.open_tab("gradients")
    expect(dashboard.root.locator("[data-panel=gradients] tbody tr")).to_have_count(6)
    summary = dashboard.root.locator("[data-panel=gradients] .amp-summary")
    before, step = summary.inner_text(), dashboard.step
    dashboard.inject("underflow")
    dashboard.press("Step")
    expect(dashboard.root.locator("[data-kind=underflow]")).to_have_attribute("aria-pressed", "true")
    expect(summary).to_contain_text(f"Step {step + 1:,}")
    assert flushed_unscaled(summary.inner_text()) > flushed_unscaled(before) + 20
    dashboard.inject("underflow")
    expect(dashboard.root.locator("[data-kind=underflow]")).to_have_attribute("aria-pressed", "false")


def flushed_unscaled(sentence: str) -> float:
    """Read the share in percent out of "… flushed to zero 12.3 % unscaled, …"."""
    return float(sentence.split("flushed to zero ")[1].split(" %")[0].replace("<", ""))


def test_the_histogram_is_drawn_within_a_second(dashboard: DashboardPage) -> None:
    dashboard.open_tab("dtypes")
    dashboard.press("Step")
    dashboard.wait_for_step(dashboard.step)
    opened = time.monotonic()
    dashboard.open_tab("gradients")
    dashboard.wait_for_paint(HISTOGRAM, ACCENT_LIGHT, SEEN)
    assert time.monotonic() - opened < 1


def test_the_histogram_shows_its_values_under_the_pointer_and_to_a_screen_reader(dashboard: DashboardPage) -> None:
    dashboard.open_tab("gradients")
    canvas = dashboard.root.locator(".amp-histogram")
    dashboard.wait_for_paint(HISTOGRAM, ACCENT_LIGHT, SEEN)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    reading = dashboard.root.locator("[data-reading=lost]")
    seen = []
    for share in (0.25, 0.62, 0.72, 0.96):
        dashboard.lab.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        expect(reading).not_to_have_text(seen[-1] if seen else "")
        expect(reading).to_contain_text("; unscaled ")
        seen.append(reading.inner_text())
    exponents = [exponent(text.split(":")[0]) for text in seen]
    assert exponents == sorted(exponents)
    ranges = [text.split("unscaled ")[1].split(",")[0] for text in seen]
    assert ranges == ["→ 0", "subnormal", "normal", "→ inf"], "one in each range of float16"
    dashboard.lab.page.mouse.move(0, 0)
    expect(reading).to_contain_text("scaled by ")
    canvas.focus()
    dashboard.lab.page.keyboard.press("ArrowRight")
    expect(dashboard.root.locator("[data-panel=gradients] .amp-gradients [role=status]")).to_contain_text("unscaled ")
    assert "peak at 2^" in canvas.get_attribute("aria-label")
    dashboard.lab.page.keyboard.press("Escape")


def test_it_follows_the_theme(dashboard: DashboardPage) -> None:
    dashboard.open_tab("gradients")
    dashboard.lab.theme("JupyterLab Dark")
    dashboard.lab.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.amp-live')).color.includes('255, 255, 255')"
    )
    for chart in (SCALE, HISTOGRAM):
        dashboard.wait_for_paint(chart, ACCENT_DARK, SEEN)
    dashboard.lab.theme("JupyterLab Light")
    dashboard.wait_for_paint(HISTOGRAM, ACCENT_LIGHT, SEEN)
