"""What a newcomer asks, and finds without reading: which step was skipped first, and why; what ended this run."""

import re

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import Locator, expect


def status(dashboard: DashboardPage) -> Locator:
    return dashboard.root.locator(".amp-status")


def test_a_newcomer_learns_which_step_was_skipped_first_and_how_a_run_ended(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    expect(status(dashboard)).to_contain_text("in 50 steps.")  # of the cells before
    place = status(dashboard).bounding_box()
    lab.execute("lab.trainer.run(130)")
    find_the_first_skip(dashboard)
    lab.execute("lab.trainer.change(lr=1e9); lab.trainer.run(80)")
    read_the_divergence(dashboard)
    assert status(dashboard).bounding_box() == place, "the line keeps its place and its height"
    apply_the_remedy(dashboard)


def find_the_first_skip(dashboard: DashboardPage) -> None:
    """The default run skips step 165 at a loss scale of 2^19."""
    expect(status(dashboard)).to_contain_text(re.compile(r"Healthy: the loss fell from 2\.3 to .*1 skip in 180 steps"))
    dashboard.open_tab("skipped")
    first = dashboard.rows("skipped").first
    expect(first.locator("td").first).to_have_text(re.compile("^first165"))
    expect(first).to_contain_text("2¹⁹ → 2¹⁸")
    expect(first).to_contain_text(
        # which parameter comes first depends on how the CPU multiplies halves
        re.compile(r"loss scale.*\.(weight|bias): the gradient × 2¹⁹ reaches [6-9]\.\de4, above 65504; fits at 2¹⁸")
    )
    first.get_by_role("button", name="First skip. Step 165: show in the charts").click()
    expect(first).to_have_attribute("aria-current", "true")
    first.get_by_role("button", name="Step through step 165").click()
    walk = dashboard.root.locator("[data-panel=step_through]")
    expect(walk.locator(".amp-told")).to_contain_text("Step 165, O1")
    walk.locator("[data-stage=step]").click()
    expect(walk.locator(".amp-told")).to_contain_text("Skipped, because found_inf is 1")
    dashboard.open_tab("skipped")


def read_the_divergence(dashboard: DashboardPage) -> None:
    """A run at a learning rate of 1e9 reads as divergence, in one row."""
    expect(status(dashboard)).to_contain_text("Diverged at step 181, after learning rate 0.1 → 1e9")
    expect(dashboard.rows("skipped")).to_have_count(2)
    expect(dashboard.rows("skipped").first).to_contain_text("165")
    expect(dashboard.rows("skipped").nth(1)).to_contain_text(
        re.compile(r"181 – 259.*79 in a row.*divergence.*diverged")
    )


def apply_the_remedy(dashboard: DashboardPage) -> None:
    """The card says what to do, its button does it, and the run trains."""
    dashboard.open_tab("findings")
    card = dashboard.root.locator(".amp-finding").first
    expect(card).to_contain_text("The loss grows: the update steps are too large")
    expect(card).to_contain_text("error")
    card.locator("summary").click()
    expect(card.locator("pre")).to_contain_text("group['lr'] =")
    expect(card.get_by_role("button", name="Show step 181")).to_be_visible()
    card.get_by_role("button", name="Learning rate 1e9 → 0.1, and start again").click()
    dashboard.wait_for_state("running")
    dashboard.wait_for_step(120)
    expect(status(dashboard)).to_contain_text("Healthy: the loss fell from 2.3")
    expect(dashboard.root.locator(".amp-finding[data-severity=error]")).to_have_count(0)
    dashboard.press("Pause")
    dashboard.wait_for_state("paused")
