"""No rule of axe-core is broken in any output of amplab, in JupyterLab's three themes; a keyboard is enough."""

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from accessibility import THEMES, axe_script, violations
from dashboard_page import DashboardPage
from lab_page import NOTEBOOKS, LabPage, sound_page
from lab_server import LabServer
from playwright.sync_api import Browser, expect
from test_plain_outputs import CELLS, UNFOLD

STORY = (
    "lab.trainer.run(60); lab.trainer.inject('overflow'); lab.trainer.run(10); lab.trainer.change(opt_level='O2'); "
    "lab.trainer.run(30)"
)
FOCUSED = """() => {
  const { activeElement } = document;
  const ring = [activeElement, activeElement.parentElement].map((each) => getComputedStyle(each))
    .some(({ outlineStyle, outlineWidth }) => outlineStyle !== "none" && parseFloat(outlineWidth) > 1);
  const dashboard = activeElement.closest(".amp-dashboard");
  return [Boolean(dashboard), ring, activeElement.outerHTML.slice(0, 120)];
}"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of axe-core; without npm the tests are skipped here and fail in CI."""
    script = axe_script(tmp_path_factory.mktemp("axe"))
    if script is None:
        missing = "found no npm; install it, or name axe.min.js in AMPLAB_AXE."
        pytest.fail(missing) if os.environ.get("CI", "").lower() == "true" else pytest.skip(missing)
    return script


@pytest.fixture(scope="module")
def dashboard(server: LabServer, browser: Browser) -> Iterator[DashboardPage]:
    """A dashboard with a run that has a fault, a skipped step and a changed level."""
    with sound_page(server, browser) as page:
        page.open(NOTEBOOKS / "00_the_lab.ipynb")
        page.run_all()
        page.execute(STORY)
        shown = DashboardPage(page)
        shown.wait_for_step(150)
        yield shown


def test_every_tab_keeps_every_rule_in_every_theme(dashboard: DashboardPage, axe: Path) -> None:
    tabs = dashboard.root.get_by_role("tab")
    found = []
    for theme in THEMES:
        dashboard.lab.theme(theme)
        for tab in tabs.all():
            tab.click()
            dashboard.lab.page.wait_for_timeout(300)
            broken = violations(dashboard.lab, axe)
            found += [f"{theme}, {tab.inner_text()}: {rule}: {nodes}" for rule, nodes in broken.items()]
    assert tabs.count() >= 4
    assert "\n".join(found) == ""


def test_every_field_that_the_keyboard_reaches_shows_the_focus(dashboard: DashboardPage) -> None:
    page = dashboard.lab.page
    dashboard.lab.theme(THEMES[0])
    dashboard.root.get_by_role("button").first.focus()
    reached, hidden = 0, []
    for _ in range(150):
        page.keyboard.press("Tab")
        is_ours, has_ring, element = page.evaluate(FOCUSED)
        if not is_ours:
            break
        reached += 1
        hidden += [] if has_ring else [element]
    assert reached > 15
    assert hidden == []


def test_plain_outputs_and_the_bit_explorer_keep_every_rule(
    server: LabServer, browser: Browser, axe: Path, tmp_path: Path
) -> None:
    explorer = "from amplab.views import BitExplorer\nBitExplorer()"
    cells = [nbformat.v4.new_code_cell(each) for each in (*CELLS, CELLS[1], explorer)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "outputs.ipynb")
    with sound_page(server, browser) as page:
        page.open(tmp_path / "outputs.ipynb")
        page.run_all()
        expect(page.page.locator(".amplab-bits")).to_be_visible()
        page.page.evaluate(UNFOLD)
        assert {theme: in_theme(page, theme, axe) for theme in THEMES} == {theme: {} for theme in THEMES}


def in_theme(page: LabPage, theme: str, axe: Path) -> dict[str, list[str]]:
    """Return the broken rules of a page in one theme."""
    page.theme(theme)
    return violations(page, axe)
