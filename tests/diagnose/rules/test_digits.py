"""Digits that float16 does not have: found where an op needs them, and not where large numbers do no harm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.diagnose import doctor

NAME = "digits-lost-in-half"


class Of(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(1, 4)
        self.table = nn.Embedding(12000, 1)

    def forward(self, x):
        return self.head(self.function(self, x).to(self.head.weight.dtype))


LOST = {
    "phase": lambda _, x: torch.sin(x),
    "phase of a product": lambda _, x: torch.cos(x * 0.5),
    "gap": lambda _, x: x - x.mean(),
    "index": lambda self, x: self.table(x.long())[:, 0],
}
KEPT = {
    "linear": lambda _, x: x / 10080,
    "tanh": lambda _, x: torch.tanh(x / 1000),
    "norm": lambda _, x: x / x.abs().max(),
}


def to_one(out):
    return F.mse_loss(out.float(), torch.ones(out.shape))


def found(function, x):
    model = Of(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amplab.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    try:
        return [each for each in doctor(model, x, loss=to_one, optimizer=optimizer) if each.name == NAME]
    finally:
        amplab.amp.reset()


LARGE = torch.arange(10000.0, 10040.0)[:, None]


@pytest.mark.parametrize("name", LOST)
def test_the_op_and_the_tensor_of_the_batch_whose_digits_are_lost(name):
    (lost,) = found(LOST[name], LARGE)
    assert (lost.severity, lost.tensor, lost.evidence["spacing"]) == ("warning", "batch", 4 if "of" in name else 8)
    rounded = LARGE.half().float()
    assert (rounded - LARGE).abs().max() == 4


@pytest.mark.parametrize("name", LOST)
def test_small_numbers_keep_their_digits(name):
    assert not found(LOST[name], LARGE - 10000)


@pytest.mark.parametrize("name", KEPT)
def test_ops_that_only_scale_large_numbers_are_not_named(name):
    assert not found(KEPT[name], LARGE)


def pressures(head_in_half, spread):
    """Regress targets near 1013; return the findings of the first step, and the loss after 200."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    nn.init.constant_(model.bias, 1013.25)
    optimizer, scaler, x = torch.optim.Adam(model.parameters(), 2e-2), amplab.GradScaler("cpu"), torch.randn(128, 8)
    y = 1013.25 + spread * torch.sin(x[:, :1])

    def step(batch):
        with amplab.autocast("cpu", dtype=torch.float16, enabled=head_in_half):
            return F.mse_loss(model(batch[0]), batch[1])

    seen = doctor(model, (x, y), step=step, optimizer=optimizer, scaler=scaler).named(NAME)
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale(step((x, y))).backward()
        scaler.step(optimizer)
        scaler.update()
    return [str(each) for each in seen], step((x, y)).item()


def test_targets_that_differ_by_less_than_the_predictions_can():
    broken, lost = pressures(head_in_half=True, spread=0.2)
    assert len(broken) == 1
    assert "0.5 apart" in broken[0]
    healthy, loss = pressures(head_in_half=False, spread=0.2)
    assert healthy == []
    assert lost > 10 * loss, "the finding is worth its place: in float32 the same run learns"


@pytest.mark.parametrize("spread", [0.0, 20.0])
def test_targets_that_are_all_the_same_or_far_apart_are_no_finding(spread):
    assert pressures(head_in_half=True, spread=spread)[0] == []
