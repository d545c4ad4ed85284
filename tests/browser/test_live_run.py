"""A run from its first step to its last, as a person drives it: start, switch, inject, pause, save, reload."""

from dashboard_page import ACCENT_LIGHT, LOSS, SCALE, SKIP_LIGHT, DashboardPage, exponent
from lab_page import LabPage
from playwright.sync_api import expect


def test_a_run_is_live_and_survives_a_reload(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    first = start_and_see_it_rise(dashboard)
    switch_while_it_runs(dashboard)
    inject_an_overflow(dashboard)
    step = pause(dashboard)
    assert step > first
    lab.save()
    lab.reload()
    find_it_again(DashboardPage(lab), step)


def start_and_see_it_rise(dashboard: DashboardPage) -> int:
    before = dashboard.step
    dashboard.press("Start")
    dashboard.wait_for_state("running")
    dashboard.wait_for_step(before + 100)
    step = dashboard.step
    dashboard.wait_for_paint(SCALE, ACCENT_LIGHT, 300)  # the line spans the chart
    dashboard.wait_for_paint(LOSS, ACCENT_LIGHT, 300)
    return step


def switch_while_it_runs(dashboard: DashboardPage) -> None:
    panel = dashboard.root.locator("[data-panel=dtypes]")
    panel.get_by_role("radio", name="Table").click()
    expect(panel.locator(".amp-summary")).to_contain_text("O1: ")
    linear = dashboard.rows("dtypes").filter(has_text="linear").first
    at_o1 = dashboard.rows("dtypes").count()
    expect(panel.locator(".amp-row-changed")).to_have_count(0)
    dashboard.press("O2")
    expect(dashboard.button("O2")).to_have_attribute("aria-checked", "true")
    expect(panel.locator(".amp-summary")).to_contain_text("O2: ")
    expect(panel.locator(".amp-summary")).to_contain_text("since O1: ")
    assert panel.locator(".amp-row-changed").count() >= 1
    assert dashboard.rows("dtypes").count() < at_o1, "O2 casts the weights once, O1 at every op"
    expect(linear.locator(".amp-chip").first).to_have_text("float16")
    dashboard.wait_for_state("running")
    dashboard.wait_for_step(dashboard.step + 20)


def inject_an_overflow(dashboard: DashboardPage) -> None:
    dashboard.open_tab("skipped")
    dashboard.inject("overflow")
    row = dashboard.rows("skipped").filter(has_text="injected overflow").first
    row.wait_for()
    before, after = (exponent(part.strip()) for part in row.locator("td").nth(1).inner_text().split("→"))
    assert after == before - 1, "a dynamic scale halves"
    expect(row.locator("td").nth(2)).to_contain_text("injected overflow: ")
    assert int(dashboard.figure("skipped")) >= 1
    dashboard.wait_for_paint(SCALE, SKIP_LIGHT, 5)  # the skipped step is marked on the line


def pause(dashboard: DashboardPage) -> int:
    dashboard.press("Pause")
    dashboard.wait_for_state("paused")
    dashboard.lab.page.wait_for_timeout(400)
    step = dashboard.step
    dashboard.lab.page.wait_for_timeout(400)
    assert dashboard.step == step
    return step


def find_it_again(dashboard: DashboardPage, step: int) -> None:
    dashboard.wait_for_step(step)
    assert dashboard.step == step
    expect(dashboard.button("O2")).to_have_attribute("aria-checked", "true")
    expect(dashboard.root.locator("[data-tab=skipped]")).to_have_attribute("aria-selected", "true")
    dashboard.rows("skipped").filter(has_text="injected overflow").first.wait_for()
    dashboard.wait_for_paint(SCALE, ACCENT_LIGHT, 300)  # the whole history is drawn again
    dashboard.press("Start")
    dashboard.wait_for_step(step + 20)


def test_running_the_cell_again_offers_the_running_experiment(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    dashboard.press("Start")
    dashboard.wait_for_step(80)
    step = dashboard.step
    lab.reload()  # without a save: the file still holds the still picture
    lab.wait_until_idle()
    expect(lab.page.locator(".amp-dashboard")).to_have_count(0)
    lab.run_all()
    again = DashboardPage(lab)
    notice = again.root.locator(".amp-notice")
    expect(notice).to_contain_text("has not been changed")
    again.wait_for_step(step + 1)
    again.press("Continue with it")
    expect(notice).to_have_count(0)
    again.wait_for_step(again.step + 20)
    start_anew(lab)


def start_anew(lab: LabPage) -> None:
    lab.run_all()
    dashboard = DashboardPage(lab)
    dashboard.wait_for_step(81)
    dashboard.press("Start new")
    lab.page.wait_for_function("() => document.querySelector('[data-figure=step]').innerText === '0'")
    expect(dashboard.root.locator(".amp-notice")).to_have_count(0)
    dashboard.wait_for_state("ready")
