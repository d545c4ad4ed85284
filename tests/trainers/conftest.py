"""A small task that every trainer is given: its data, its model, its scalers, and the code of the page."""

import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amplab


class Classifier(nn.Module):
    """Two layers with a norm and a softmax between; notes the dtypes that its ops return."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 2)
        self.dtypes = ()

    def forward(self, x):
        hidden = self.first(x)
        weights = torch.softmax(hidden, 1)
        self.dtypes = hidden.dtype, weights.dtype
        return self.last(self.norm(hidden * weights))


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def batches():
    """Eight batches: the label is the sign of the first column."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)


@pytest.fixture
def overflowing():
    """Arguments of a scaler whose first steps overflow, whose scale then comes to rest, and grows."""
    return {"device": "cpu", "init_scale": 2.0**120, "backoff_factor": 2.0**-40, "growth_interval": 3}


@pytest.fixture
def page():
    """Run the code under a heading of TRAINERS.md, and return its names."""

    def run(heading):
        text = (Path(amplab.__file__).parent / "amp" / "TRAINERS.md").read_text(encoding="utf-8")
        [code] = re.findall(rf"^## {heading}\n.*?```python\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)
        scope = {}
        exec(compile(code, f"TRAINERS.md, {heading}", "exec"), scope)
        return types.SimpleNamespace(**scope)

    return run
