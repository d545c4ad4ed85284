"""Runs side by side as a person sees them: an old run stays after a reset, all levels in one click, undo."""

import re

import pytest
from dashboard_page import LOSS, DashboardPage
from lab_page import LabPage
from playwright.sync_api import expect

GRAY_LIGHT = [0x77, 0x77, 0x7A]
SLANTING = 150


@pytest.fixture
def dashboard(lab: LabPage) -> DashboardPage:
    """The dashboard of a run of 60 steps."""
    lab.execute("lab.trainer.run(60)")
    made = DashboardPage(lab)
    made.wait_for_step(60)
    return made


def test_a_person_compares_runs_and_takes_back_what_she_did(dashboard: DashboardPage) -> None:
    root, page = dashboard.root, dashboard.lab.page
    # A refusal names the labels, and moves nothing.
    places = [root.locator("[data-kind=nan]"), root.locator(LOSS), root.get_by_role("tablist")]
    before = [place.bounding_box() for place in places]
    ceiling = root.get_by_label("ceiling, exponent of two")
    ceiling.fill("10")
    ceiling.press("Enter")
    expect(root.get_by_role("alert")).to_have_text("init 2¹⁶ is above ceiling 2¹⁰; lower init or raise ceiling first.")
    assert [place.bounding_box() for place in places] == before
    expect(ceiling).to_have_value("24")

    # A rate far too high can be undone, or put back to its default.
    rate = root.get_by_label("Learning rate", exact=True)
    rate.fill("1e9")
    rate.press("Enter")
    back = root.get_by_role("button", name="Learning rate: back to the default, 0.1")
    expect(back).to_be_visible()
    dashboard.press("Undo")
    expect(root.get_by_role("status").filter(has_text="Undone: Learning rate 0.1 → 1e9")).to_be_visible()
    expect(rate).to_have_value("0.1")
    expect(back).to_be_hidden()
    assert [place.bounding_box() for place in places] == before

    # The old run stays as a gray line and a row after a reset; undo continues it.
    labels = dashboard.painted_columns(LOSS, GRAY_LIGHT, SLANTING)  # of the axes
    steps = dashboard.figure("step")
    dashboard.press("Reset")
    dashboard.open_tab("runs")
    old = root.locator("tr[data-run='Run 1']")
    expect(old).to_contain_text("same setting")
    expect(old.locator("td").nth(4)).to_have_text(steps)
    page.wait_for_timeout(300)
    assert dashboard.painted_columns(LOSS, GRAY_LIGHT, SLANTING) > labels + 200
    dashboard.press("Undo")
    expect(root.locator("[data-figure=step]")).to_have_text(steps)
    expect(old).to_contain_text("the present run")

    # All levels in one click, then which of them keeps masters.
    root.get_by_label("Steps of each run").fill("400")
    dashboard.press("Run all levels")
    expect(root.get_by_role("button", name="Stop")).to_be_visible()
    expect(root.locator("tr[data-run='autocast bf16']").locator("td").nth(4)).to_have_text("400")
    root.get_by_role("radio", name="Memory").click()
    for level, masters in (("O0", "0 B"), ("O2", "104 kB")):
        expect(root.locator(f".amp-runs:not([hidden]) tr[data-run='{level}'] td").nth(2)).to_have_text(masters)

    # The twin says in a sentence where the present level parts from float32.
    dashboard.press("Twin with O0")
    expect(root.locator(".amp-run-summary")).to_have_text(re.compile("^O1 and float32 (agree|part in)"))
    expect(dashboard.rows("runs").filter(has_text="hidden1")).to_be_visible()


def test_the_actions_are_whole_beside_long_names_and_notes(dashboard: DashboardPage) -> None:
    for level in ("O0", "O2", "O3", "autocast-fp16", "O1"):
        changes = f"model='cnn', opt_level='{level}', optimizer='adam', lr=0.005, growth_interval=1234"
        dashboard.lab.execute(f"lab.trainer.reset(lab.trainer.config.changed({changes})); _ = lab.trainer.run(2)")
    dashboard.lab.execute(
        "lab.trainer.reset(name='A softmax that overflows at a level without a list'); _ = lab.trainer.run(2)"
    )
    dashboard.open_tab("runs")
    expect(dashboard.rows("runs")).to_have_count(7)
    table = dashboard.root.locator("[data-panel=runs] .amp-runs:not([hidden])")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    assert table.evaluate("box => box.scrollHeight > box.clientHeight")
