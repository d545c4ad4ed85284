"""One training step walked through in the page, and the speed at which the others run, as a person uses them."""

import re

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import Locator, expect

STAGES = ["Cast weights", "Forward", "Loss × scale", "Backward", "Unscale, check", "Clip", "Step", "Update scale"]


def test_a_step_is_walked_through_and_the_run_goes_on_slowly(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    dashboard.open_tab("step_through")
    panel = dashboard.root.locator("[data-panel=step_through]")
    expect(panel).to_contain_text("One training step in slow motion")
    walk_by_keys(dashboard, panel)
    choose_what_is_shown(panel)
    follow_an_overflow(dashboard, panel)
    play(panel)
    run_slowly(dashboard)


def frame(panel: Locator, title: str) -> Locator:
    return panel.get_by_role("button", name=re.compile(rf"^Stage \d of 8: {re.escape(title)},"))


def bits(panel: Locator, side: str) -> str:
    return "".join(panel.locator(f"[data-side={side}] .amp-bits i").all_inner_texts())


def walk_by_keys(dashboard: DashboardPage, panel: Locator) -> None:
    before = dashboard.step
    dashboard.press("Take one step")
    expect(frame(panel, "Cast weights")).to_have_attribute("aria-current", "step")
    dashboard.wait_for_step(before + 1)
    told = panel.get_by_role("status")
    expect(told).to_contain_text(f"Step {before}, O1 · Cast weights:")
    expect(told).to_contain_text("is rounded to float16 for this step")
    assert (len(bits(panel, "before")), len(bits(panel, "after"))) == (32, 16)
    frame(panel, "Cast weights").focus()
    for title in STAGES[1:]:
        dashboard.lab.page.keyboard.press("ArrowRight")
        expect(frame(panel, title)).to_be_focused()
        expect(told).to_contain_text(f"· {title}")
        expect(panel.get_by_role("img", name=re.compile("in float(32|16)\\."))).to_have_count(2)
    dashboard.lab.page.keyboard.press("ArrowRight")  # around
    expect(told).to_contain_text("· Cast weights")
    frame(panel, "Loss × scale").click()
    assert bits(panel, "before")[9:] == bits(panel, "after")[9:], "a power of two leaves the fraction"
    assert bits(panel, "before")[1:9] != bits(panel, "after")[1:9]
    assert dashboard.step == before + 1, "walking trains nothing"


def choose_what_is_shown(panel: Locator) -> None:
    frame(panel, "Step").click()
    place = panel.locator("[data-side=after] .amp-tensor-head b")
    panel.get_by_label("Parameter", exact=True).select_option("output.weight")
    expect(panel.locator("[data-side=after] code")).to_have_text("output.weight")
    expect(frame(panel, "Step")).to_have_attribute("aria-current", "step")
    first = place.inner_text()
    panel.get_by_label("Element", exact=True).select_option("largest")
    expect(place).not_to_have_text(first)
    first = place.inner_text()
    neighbor = panel.locator("[data-side=after] .amp-values button").last
    chosen = neighbor.get_attribute("title")
    neighbor.click()
    expect(place).to_have_text(chosen)
    expect(panel.locator("[data-side=after] .amp-values button").last).to_be_focused()
    assert chosen != first
    expect(panel.get_by_label("Element", exact=True).locator("option:checked")).to_have_text(chosen)


def follow_an_overflow(dashboard: DashboardPage, panel: Locator) -> None:
    dashboard.inject("overflow")
    dashboard.press("Take one step")
    expect(frame(panel, "Skip")).to_be_visible()
    frame(panel, "Unscale, check").click()
    expect(panel.get_by_role("status")).to_contain_text("found_inf = 1, and the step will be skipped")
    frame(panel, "Skip").click()
    assert bits(panel, "before") == bits(panel, "after")
    frame(panel, "Update scale").click()
    expect(panel.get_by_role("status")).to_contain_text("the scale goes from")


def play(panel: Locator) -> None:
    """From the last stage, Play takes the next step and begins again."""
    panel.get_by_role("button", name="Play").click()
    stop = panel.get_by_role("button", name="Stop the walk")
    expect(stop).to_be_visible()
    expect(frame(panel, "Cast weights")).to_have_attribute("aria-current", "step")
    expect(frame(panel, "Step")).to_be_visible()
    stop.click()
    expect(panel.get_by_role("button", name="Play")).to_be_visible()


def run_slowly(dashboard: DashboardPage) -> None:
    slider, page = dashboard.root.get_by_label("Speed"), dashboard.lab.page
    slider.focus()
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", "1 step/s")
    before = dashboard.step
    dashboard.root.get_by_label("Number of steps to run").fill("3")
    dashboard.press("Run")
    dashboard.wait_for_state("running")
    page.wait_for_timeout(1200)
    assert before < dashboard.step <= before + 2
    page.keyboard.press("Tab")
    slider.focus()
    page.keyboard.press("End")
    dashboard.wait_for_state("paused")
    dashboard.wait_for_step(before + 3)
    assert dashboard.step == before + 3
