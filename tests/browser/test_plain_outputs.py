"""What cells show without a widget, as JupyterLab lays it out: its own rules for tables and code have no effect."""

from pathlib import Path

import nbformat
from lab_page import LabPage

SEEN = """
import torch, amplab
from torch import nn
from torch.nn import functional as F

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.ModuleDict({"residual_attention_block_with_a_long_name": nn.Linear(16, 16)})
        self.layers, self.head = nn.ModuleList([block]), nn.Linear(16, 4)

    def forward(self, x):
        x = self.layers[0]["residual_attention_block_with_a_long_name"](x)
        return self.head(x / (torch.relu(x) * 0 + 1e-8))

model, batch = Encoder(), (torch.randn(8, 16), torch.arange(8) % 4)
with torch.no_grad():
    model.head.weight.mul_(1e-8)

def loss_fn():
    with amplab.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
CELLS = (
    SEEN,
    'amplab.xray(model, batch, loss=F.cross_entropy, opt_level="O1", stats=True)',
    "amplab.gradient_range(model, batch, loss=F.cross_entropy)",
    "amplab.doctor(model, step=loss_fn)",
)
UNFOLD = "() => document.querySelectorAll('.amplab-plain details').forEach(part => { part.open = true; })"
LAID_OUT = """() => [...document.querySelectorAll('.amplab-plain')].map(page => {
  const of = (selector, name) => [...page.querySelectorAll(selector)].map(each => getComputedStyle(each)[name]);
  const style = (selector, name) => [...new Set(of(selector, name))];
  return {
    over: page.scrollWidth - page.clientWidth,
    text: style('td:not(.right), th[scope=col]:not(.right)', 'textAlign'),
    numbers: style('td.right', 'textAlign'),
    rows: style('tbody tr', 'backgroundColor'),
    code: style('td code', 'backgroundColor'),
    ink: getComputedStyle(page).color,
    chip: style('.chip[data-dtype=float32]', 'boxShadow'),
    drawn: [...page.querySelectorAll('.ribbon i')].every(each => each.offsetHeight > 8 || !each.offsetParent),
    band: style('.ribbon i[data-dtype=float16]:not(.cast)', 'backgroundColor'),
  };
})"""


def test_tables_keep_their_shape_and_follow_the_theme(page: LabPage, tmp_path: Path) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS)], metadata=kernel)
    nbformat.write(notebook, tmp_path / "plain.ipynb")
    page.open(tmp_path / "plain.ipynb")
    page.run_all()
    page.page.evaluate(UNFOLD)
    light = page.page.evaluate(LAID_OUT)
    assert len(light) == len(CELLS) - 1
    for each in light:
        assert each["over"] <= 0  # wide tables scroll by themselves
        assert each["drawn"]
        assert each["text"] in (["left"], ["start"], [])
        assert each["numbers"] in (["right"], [])
        assert set(each["rows"]) | set(each["code"]) <= {"rgba(0, 0, 0, 0)"}
    assert light[0]["band"] == ["rgb(230, 159, 0)"]
    page.theme("JupyterLab Dark")
    dark = page.page.evaluate(LAID_OUT)
    assert dark[0]["band"] == light[0]["band"]
    assert dark[0]["chip"] != light[0]["chip"]  # float32's blue is lighter on a dark ground, as in the dashboard
    assert all(each["ink"] != before["ink"] for each, before in zip(dark, light, strict=True))
