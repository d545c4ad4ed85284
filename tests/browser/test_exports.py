"""What a person takes along from the page, and what fits on her GPU, as she sees it."""

import json
import re
from pathlib import Path

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import Locator, expect

CUT = """() => [...document.querySelectorAll("main :not(.unseen)")]
  .filter(each => each.scrollHeight > each.clientHeight + 1 && getComputedStyle(each).overflowY !== "visible")
  .map(each => each.className)"""
PNG = b"\x89PNG\r\n\x1a\n"


def test_a_run_is_taken_along_and_a_setting_restored(lab: LabPage, tmp_path: Path) -> None:
    dashboard = DashboardPage(lab)
    lab.execute("lab.trainer.run(20)")
    dashboard.wait_for_step(70)
    texts = {kind: taken(lab, dashboard, kind, tmp_path) for kind in ("svg", "csv", "json", "report")}
    assert texts["svg"].startswith("<svg ")
    assert "Training loss" in texts["svg"]
    assert "task=digits" in texts["svg"]
    assert len(texts["csv"].splitlines()) == 1 + len(json.loads(texts["json"])["steps"]) == 71
    assert "Op dtypes of one step" in texts["report"]
    read_the_report(lab, texts["report"])
    for kind in ("png", "histogram", "heat"):
        taken(lab, dashboard, kind, tmp_path)
        assert (tmp_path / kind).read_bytes().startswith(PNG)
        assert len((tmp_path / kind).read_bytes()) > 10_000

    setting = dashboard.root.get_by_label("A copied configuration")
    opened(dashboard)
    setting.fill("amplab/1 task=digits model=zzz opt_level=O1")
    lab.page.keyboard.press("Enter")
    expect(dashboard.root.locator(".amp-take-answer")).to_contain_text("zzz")
    setting.fill("amplab/1 task=digits model=cnn opt_level=O3 hidden=32")
    lab.page.keyboard.press("Enter")
    expect(dashboard.root.locator(".amp-config")).to_contain_text("model=cnn opt_level=O3 hidden=32")
    expect(dashboard.root.locator(".amp-take-menu")).to_be_hidden()
    ask_what_fits(dashboard)


def read_the_report(lab: LabPage, text: str) -> None:
    """On the screen and on paper, nothing is cut."""
    page = lab.page.context.new_page()
    page.set_content(text)
    for medium in ("screen", "print"):
        page.emulate_media(media=medium)
        expect(page.get_by_role("rowheader", name="backward")).to_be_visible()
        assert page.evaluate(CUT) == []
    page.close()


def ask_what_fits(dashboard: DashboardPage) -> None:
    dashboard.open_tab("memory")
    panel = dashboard.root.locator("[data-panel=memory]")
    half = panel.locator("tr[data-level=O3]")
    expect(half).to_contain_text("✓ fits")
    said = re.compile("parameters .* gradients .* optimizer state .* buffers .* activations ")
    expect(half.get_by_role("img")).to_have_attribute("aria-label", said)
    panel.get_by_label("Batch size", exact=True).fill("90000000")
    panel.get_by_label("GPU", exact=True).select_option("8")
    expect(half).to_contain_text("too much")
    expect(panel).to_contain_text("Not counted: the CUDA context")


def opened(dashboard: DashboardPage) -> Locator:
    menu = dashboard.root.locator(".amp-take-menu")
    if not menu.is_visible():
        dashboard.root.get_by_role("button", name="Export").click()
    return menu


def taken(lab: LabPage, dashboard: DashboardPage, kind: str, folder: Path) -> str:
    with lab.page.expect_download() as download:
        opened(dashboard).locator(f"[data-take={kind}]").click()
    download.value.save_as(folder / kind)
    return "" if kind in ("png", "histogram", "heat") else (folder / kind).read_text(encoding="utf-8")
