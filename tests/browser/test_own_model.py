"""A model of one's own that the lab has never seen: a recurrent net with two inputs, in every tab of the dashboard."""

from pathlib import Path

import nbformat
from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import expect

OWN = """
import torch
from torch import nn
from amplab import lab

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.gru = nn.Embedding(30, 16), nn.GRU(20, 24, batch_first=True)
        self.hints, self.out = nn.Linear(6, 4), nn.Linear(24, 5)

    def forward(self, ids, hints):
        seen = torch.cat([self.words(ids), self.hints(hints)], 2)
        return self.out(self.gru(seen)[0])

def loss_of(model, batch):
    logits = model(batch["ids"], batch["hints"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())

torch.manual_seed(0)
ids = [torch.randint(0, 30, (8, 7)) for _ in range(6)]
data = [{"ids": each, "hints": torch.randn(8, 7, 6), "tags": each % 5} for each in ids]
mine = lab.open(model=Tagger, data=data, step=loss_of, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
mine
"""
TABS = {
    "dtypes": "gru",
    "gradients": "gru.weight_hh_l0",
    "skipped": "injected overflow",
    "findings": "examined: 32 steps",
    "runs": "Run all levels",
    "scale": "Grows to",
    "memory": "activations",
}


def test_a_model_of_ones_own_gets_the_same_tabs(page: LabPage, tmp_path: Path) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = tmp_path / "own.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(OWN)], metadata=kernel), path)
    page.open(path)
    page.run_all()
    dashboard = DashboardPage(page)
    page.execute("mine.trainer.run(30); mine.trainer.inject('overflow'); mine.trainer.run(2)")
    for tab, text in TABS.items():
        dashboard.open_tab(tab)
        expect(dashboard.root.locator(f"[data-panel={tab}]")).to_contain_text(text)
    dashboard.open_tab("skipped")
    dashboard.rows("skipped").first.get_by_role("button", name="Step through step 30").click()
    walk = dashboard.root.locator("[data-panel=step_through]")
    expect(walk.locator(".amp-told")).to_contain_text("Step 30, O1")
    expect(walk.get_by_label("Parameter", exact=True)).to_contain_text("hints.weight")
    assert page.errors == []
