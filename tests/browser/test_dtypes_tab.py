"""The tab of op dtypes as a newcomer uses it: in which dtype does softmax run, and why; what would change it."""

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import expect

CLIPPED = """cells => cells.flatMap(cell => [cell, ...cell.querySelectorAll("*")])
  .filter(part => part.scrollHeight > part.clientHeight + 1 && part.clientHeight > 0).length"""


def test_op_dtypes_answer_in_which_dtype_and_why(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    panel = dashboard.root.locator("[data-panel=dtypes]")
    softmax = panel.locator("[data-module=''] [data-phase=forward] .amp-cell", has_text="cross_entropy").first
    chosen = panel.get_by_role("complementary", name="The chosen op")

    expect(softmax).to_have_attribute("data-dtype", "float32")
    softmax.focus()
    lab.page.keyboard.press("Enter")
    expect(chosen).to_contain_text(
        "fp32 list, cross_entropy: computes a log_softmax, the log of a sum of exp; from 8 up float16 has"
    )
    chosen.get_by_role("button", name="Measure in the next step").click()
    expect(chosen.locator("table")).to_contain_text("float32[64, 10]")

    panel.get_by_label("Compare with another opt_level").select_option("O3")
    expect(panel.locator(".amp-summary")).to_contain_text("At O3: ")
    expect(dashboard.button("O1")).to_have_attribute("aria-checked", "true")
    panel.get_by_label("Compare with another opt_level").select_option("")

    dashboard.press("O2")
    expect(panel.locator(".amp-summary")).to_contain_text("O2: ")
    expect(chosen).to_contain_text("a hook on MLP cast its output to float32")
    put_a_module_into_float32_and_take_it_back(lab, dashboard)
    read_every_reason_in_full(lab, dashboard)


def put_a_module_into_float32_and_take_it_back(lab: LabPage, dashboard: DashboardPage) -> None:
    panel = dashboard.root.locator("[data-panel=dtypes]")
    linear = panel.locator("[data-module=hidden1] [data-phase=forward] .amp-cell", has_text="linear")
    expect(linear).to_have_attribute("data-dtype", "float16")
    before = dashboard.step
    linear.click()
    panel.get_by_role("button", name="Run hidden1 in float32").click()
    expect(linear).to_have_attribute("data-dtype", "float32")
    expect(panel.locator(".amp-overridden")).to_contain_text("hidden1")
    expect(dashboard.root.locator(".amp-config")).to_contain_text("float32_modules=hidden1")
    assert dashboard.step == before, "the run goes on where it was"
    panel.get_by_role("button", name="hidden1, in float32: take away").click()
    expect(linear).to_have_attribute("data-dtype", "float16")
    expect(panel.locator(".amp-overridden")).to_be_hidden()


def read_every_reason_in_full(lab: LabPage, dashboard: DashboardPage) -> None:
    dashboard.press("O1")
    panel = dashboard.root.locator("[data-panel=dtypes]")
    expect(panel.locator(".amp-summary")).to_contain_text("O1: ")
    panel.get_by_role("button", name="Close").click()
    panel.get_by_role("radio", name="Table").click()
    reasons = panel.locator("tbody .amp-reason")
    expect(reasons.filter(has_text="only the sum is rounded").first).to_be_visible()
    assert reasons.evaluate_all(CLIPPED) == 0
    panel.get_by_label("Dtype", exact=True).select_option("float32")
    panel.get_by_label("What decided").select_option("fp32")
    expect(dashboard.rows("dtypes")).to_have_count(3)  # the cast, log_softmax and nll_loss
