"""A watched loop on the lab's charts: live while it runs in a cell, and read back from its log."""

from pathlib import Path

import nbformat
from lab_page import LabPage
from playwright.sync_api import Locator, expect

LOOP = """
import threading, torch, amplab
from torch import nn
from amplab import lab

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = amplab.GradScaler("cpu", init_scale=2.0**22, growth_interval=20)
x = torch.randn(256, 16)
y = (x @ torch.randn(16, 4)).argmax(1)

def loss_of(batch):
    with amplab.autocast("cpu", dtype=torch.float16):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

watched = amplab.watch(model, optimizer, scaler=scaler, step=loss_of, log="runs", every=10)

def train(steps):
    with watched:
        for batch in watched.batches([(x, y)] * steps):
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

view = lab.attach(watched)
"""


def open_tab(page: LabPage, name: str) -> Locator:
    """Open a tab of the last view and return its panel."""
    panels = page.page.locator(".amp-panels").last
    panels.locator(f"[data-tab={name}]").click()
    panel = panels.locator(f"[data-panel={name}]")
    expect(panel).to_be_visible()
    return panel


def test_a_watched_loop_is_drawn_live_and_read_back(page: LabPage, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(LOOP), nbformat.v4.new_code_cell("view")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    path = tmp_path / "watched.ipynb"
    nbformat.write(notebook, path)
    page.open(path)
    page.run_all()
    live = page.page.locator(".amp-live").last
    live.wait_for()
    page.execute("threading.Thread(target=train, args=(400,)).start()")
    expect(live.locator("[data-figure=step]")).to_have_text("400")
    skipped = int(live.locator("[data-figure=skipped]").inner_text())
    assert skipped == int(page.execute("print(watched.history.skip_count)")) > 3
    panel = open_tab(page, "findings")
    expect(panel).to_contain_text("The scaled gradients overflow float16")
    panel = open_tab(page, "skipped")
    expect(panel).to_contain_text(f"{skipped} steps skipped")
    expect(panel.locator("tbody tr").first).to_contain_text("fits at")
    panel = open_tab(page, "gradients")
    expect(panel).to_contain_text("Measured in step 390, scale")
    expect(panel).to_contain_text("2.weight")
    panel = open_tab(page, "scale")
    expect(panel).to_contain_text("of 20 steps without an overflow")
    panel.get_by_text("What if").click()
    expect(panel.locator("tr[data-run=recorded]")).to_contain_text(str(skipped))
    page.page.get_by_role("button", name="Export").last.click()
    with page.page.expect_download() as charts:
        page.page.locator("[data-take=svg]").last.click()
    assert "Loss scale" in Path(charts.value.path()).read_text(encoding="utf-8")
    panel = open_tab(page, "dtypes")
    expect(panel.locator(".amp-cell", has_text="linear").first).to_have_attribute("data-dtype", "float16")
    panel.locator(".amp-cell", has_text="linear").first.click()
    expect(panel.locator(".amp-detail")).to_contain_text("Why")
    expect(panel.locator("[data-override]")).to_have_count(0)  # a loop of one's own is not changed
    assert page.errors == []
    assert page.execute("print(lab.load_run(watched.log_path))").count("400 steps") == 1
    page.execute("from IPython.display import display; later = lab.attach(lab.load_run(watched.log_path))")
    assert page.execute("print(later)").strip().startswith("<amplab run of 400 steps: watched/1 model=Sequential")
