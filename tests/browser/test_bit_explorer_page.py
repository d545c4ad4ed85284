"""The bit explorer in a page: clicks, keys and typed numbers reach the kernel, and its answers are drawn."""

from pathlib import Path

import nbformat
from lab_page import LabPage
from playwright.sync_api import Locator, expect

CELL = 'from amplab.views import BitExplorer\nexplorer = BitExplorer("1/3")\nexplorer'


def open_explorer(page: LabPage, folder: Path) -> Locator:
    """Return the explorer of a notebook with one cell."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=kernel)
    nbformat.write(notebook, folder / "explorer.ipynb")
    page.open(folder / "explorer.ipynb")
    page.run_all()
    explorer = page.page.locator(".amplab-bits")
    explorer.wait_for()
    return explorer


def test_bits_formats_keys_and_numbers(page: LabPage, tmp_path: Path) -> None:
    explorer = open_explorer(page, tmp_path)
    value = explorer.locator(".value")
    bits = explorer.get_by_role("switch")
    expect(value).to_have_text("0.333251953125")
    expect(bits).to_have_count(16)
    bits.first.click()  # the sign
    expect(value).to_have_text("-0.333251953125")
    expect(bits.first).to_have_attribute("aria-checked", "true")

    explorer.get_by_role("radio", name="bfloat16").click()
    expect(explorer.get_by_role("radio", name="bfloat16")).to_have_attribute("aria-checked", "true")
    page.page.keyboard.press("ArrowRight")
    chosen = explorer.locator(".formats [aria-checked=true]")
    expect(chosen).to_have_text("half · float16")
    expect(chosen).to_be_focused()

    explorer.get_by_role("textbox").fill("65520")
    explorer.get_by_role("textbox").press("Enter")
    expect(value).to_have_text("∞")
    expect(explorer.locator(".story.overflow")).to_contain_text("65520")
    expect(explorer.locator(".ruler .row.chosen .result")).to_have_text("∞")

    explorer.get_by_role("button", name="2049").click()
    expect(value).to_have_text("2048")
    expect(explorer.locator(".line .here")).to_have_text("2048")
    explorer.locator("button.tick.above").click()
    expect(value).to_have_text("2050")
    bits.last.focus()
    page.page.keyboard.press("ArrowUp")
    expect(value).to_have_text("2052")
    assert page.execute("print(explorer.value)").strip() == "2052.0"
    assert "undefined" not in explorer.inner_text()


def test_the_ruler_of_a_narrow_page_has_a_line_for_each_format(page: LabPage, tmp_path: Path) -> None:
    explorer = open_explorer(page, tmp_path)
    page.page.set_viewport_size({"width": 640, "height": 900})
    heights = explorer.locator(".row .name").evaluate_all("names => names.map((name) => name.offsetHeight)")
    assert len(heights) == 6
    assert max(heights) < 1.5 * min(heights)
