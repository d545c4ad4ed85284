"""A watched loop on the lab's charts: live while it runs in a cell, and read back from its log."""

from pathlib import Path

import nbformat
from lab_page import LabPage
from playwright.sync_api import expect

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
    words = page.page.locator(".jp-OutputArea-output").last
    expect(words).to_contain_text(f"{skipped} steps skipped")
    expect(words).to_contain_text("scale-too-large")
    assert page.execute("print(lab.load_run(watched.log_path))").count("400 steps") == 1
    page.execute("from IPython.display import display; later = lab.attach(lab.load_run(watched.log_path))")
    assert page.execute("print(later)").strip().startswith("<amplab run of 400 steps: watched/1 model=Sequential")
