"""The strip of scenarios as a person uses it: choose by mouse and by keyboard, read what is seen, press the fix."""

import re

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import Locator, expect

RUNS = 60_000  # ms for one scenario on a busy machine
RIGHT = r"9\d\.\d ?% of the held-out digits are"
OTHERS = {
    "Healthy training at O1": (RIGHT, None),
    "A static scale that is too high": (r"The loss is NaN from step \d+ on", RIGHT),
    "Overflow that no scale can mend": (r"skip.*, all since step \d", r"R² is 0\.[789]"),
    "Updates too small for float16 weights": (r"only [1-3]?\d\.\d ?% of", r"[6-9]\d\.\d ?% of"),
    "A softmax that overflows": (r"From step \d+ on every step is skipped", r"the loss is \d.*perplexity"),
    "BatchNorm in float16": ("as if by chance", RIGHT),
    "A GAN with three loss scales": (r"Step \d+ was skipped by the first loss alone", None),
    "Gradient accumulation": (r"Step \d+ was skipped as a whole", None),
    "bfloat16 needs no loss scale": (r"R² is 0\.[6-9]", None),
}
"""The other scenarios: what is seen, and what after the fix."""


def strip(dashboard: DashboardPage) -> Locator:
    return dashboard.root.get_by_role("region", name="Scenarios")


def part(dashboard: DashboardPage, name: str) -> Locator:
    return strip(dashboard).get_by_role("group", name=name)


def stage(dashboard: DashboardPage) -> Locator:
    return strip(dashboard).locator(".amp-stage")


def test_scenarios_are_chosen_seen_and_mended(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    closed_it_is_one_line(dashboard)
    find_where_o3_fails_and_mend_it(dashboard)
    read_why_o1_refuses_a_loss(dashboard)
    see_the_first_overflow_by_keyboard(dashboard)
    for name, (seen, fixed) in OTHERS.items():
        see_and_mend(dashboard, name, seen, fixed)
    close_it(dashboard)


def closed_it_is_one_line(dashboard: DashboardPage) -> None:
    # The page closes it when the kernel has answered.
    shown = strip(dashboard)
    shown.page.wait_for_function("shown => shown.getBoundingClientRect().height <= 44", arg=shown.element_handle())
    expect(part(dashboard, "All scenarios")).to_be_hidden()


def find_where_o3_fails_and_mend_it(dashboard: DashboardPage) -> None:
    dashboard.press("Scenarios")
    expect(part(dashboard, "All scenarios").locator("button")).to_have_count(12)
    part(dashboard, "All scenarios").get_by_role("button", name="Underflow without a loss scale").click()
    expect(part(dashboard, "All scenarios")).to_be_hidden()
    expect(part(dashboard, "What to expect")).to_contain_text("the gradients become zero")
    expect(dashboard.button("O3")).to_have_attribute("aria-checked", "true")
    height = strip(dashboard).bounding_box()["height"]
    expect(part(dashboard, "What you saw")).to_contain_text("no better than the mean", timeout=RUNS)
    expect(stage(dashboard)).to_have_text("Seen")
    assert strip(dashboard).bounding_box()["height"] == height, "the texts that come move nothing"
    fix = part(dashboard, "The fix").get_by_role("button", name=re.compile("^Apply the fix: .*O2$"))
    fix.click()
    expect(stage(dashboard)).to_have_text("Fixed", timeout=RUNS)
    expect(part(dashboard, "The fix")).to_contain_text(re.compile(r"R² is 0\.[789]"))
    expect(dashboard.button("O2")).to_have_attribute("aria-checked", "true")
    expect(fix).to_be_disabled()


def read_why_o1_refuses_a_loss(dashboard: DashboardPage) -> None:
    dashboard.press("Scenarios")
    part(dashboard, "All scenarios").get_by_role("button", name="A loss that O1 refuses").click()
    expect(part(dashboard, "What you saw")).to_contain_text("BCEWithLogitsLoss", timeout=RUNS)
    part(dashboard, "The fix").get_by_role("button").click()
    expect(stage(dashboard)).to_have_text("Fixed", timeout=RUNS)
    expect(part(dashboard, "The fix")).to_contain_text(re.compile(r"9\d\.\d ?%"))


def see_the_first_overflow_by_keyboard(dashboard: DashboardPage) -> None:
    keyboard = dashboard.lab.page.keyboard
    dashboard.button("Scenarios").focus()
    keyboard.press("Enter")
    keyboard.press("Home")
    keyboard.press("ArrowRight")
    expect(dashboard.lab.page.locator(":focus")).to_have_text("The scale climbs until it overflows")
    keyboard.press("Enter")
    expect(dashboard.button("Scenarios")).to_be_focused()
    expect(part(dashboard, "What you saw")).to_contain_text(re.compile(r"Step \d+ was skipped"), timeout=RUNS)
    expect(part(dashboard, "The fix")).to_contain_text("nothing to fix")
    dashboard.wait_for_state("paused")
    assert int(dashboard.figure("skipped")) == 1


def see_and_mend(dashboard: DashboardPage, name: str, seen: str, fixed: str | None) -> None:
    dashboard.press("Scenarios")
    part(dashboard, "All scenarios").get_by_role("button", name=name).click()
    expect(part(dashboard, "What you saw")).to_contain_text(re.compile(seen), timeout=RUNS)
    expect(stage(dashboard)).to_have_text("Seen")
    if fixed is not None:
        part(dashboard, "The fix").get_by_role("button").click()
        expect(stage(dashboard)).to_have_text("Fixed", timeout=RUNS)
        expect(part(dashboard, "The fix")).to_contain_text(re.compile(fixed))


def close_it(dashboard: DashboardPage) -> None:
    steps = dashboard.step
    strip(dashboard).get_by_role("button", name="Close").click()
    closed_it_is_one_line(dashboard)
    assert dashboard.step == steps, "the run stays"
