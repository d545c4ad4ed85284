"""What float32 does not hold either is put down to the weights, the batch or the op; and the pasted line mends it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.diagnose import doctor

SIZES_AND_SEEDS = [(8, 0), (8, 1), (8, 2), (40, 0), (40, 1), (40, 2)]


class Ends(nn.Module):
    """A linear layer, and `function` of what it gives, about `around`."""

    def __init__(self, size, function, around):
        super().__init__()
        self.body = nn.Linear(size, size)
        nn.init.constant_(self.body.bias, around)
        self.last = Last(function)

    def forward(self, x):
        return self.last(self.body(x))


class Last(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def by_log_of_sum(x):
    return torch.log(torch.exp(x).sum(-1))


def by_ratio(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def by_log1p(x):
    return torch.log1p(torch.exp(x))


def examined(size, seed, function, around=155.0, level=None):
    torch.manual_seed(seed)
    model = Ends(size, function, around)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level:
        amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(16, size)
    try:
        return doctor(model, step=lambda: model(x).float().mean(), optimizer=optimizer, batch=x)
    finally:
        amplab.amp.reset()


@pytest.mark.parametrize("level", [None, "O1"])
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize(
    ("function", "mended"),
    [
        (torch.exp, None),
        (by_log_of_sum, lambda x: torch.logsumexp(x, -1)),
        (by_ratio, lambda x: torch.softmax(x, -1)),
        (by_log1p, F.softplus),
        (torch.cosh, None),
        (torch.expm1, None),
    ],
)
def test_an_exponential_by_hand_is_named_with_what_replaces_it(function, mended, size, seed, level):
    (first, *_) = examined(size, seed, function, level=level)
    assert (first.name, first.module, first.severity) == ("nonfinite-in-float32", "last", "error")
    assert first.op in ("exp", "cosh", "expm1")
    assert "3.4e+38" in first.cause
    assert "lr" not in first.remedy
    x = torch.tensor([[150.0, 155.0], [1.0, 2.0]])
    names = {"torch": torch, "F": F, "exp": torch.exp, "cosh": torch.cosh, "expm1": torch.expm1, "x": x}
    exec(first.remedy, names)
    assert torch.isfinite(names["y"]).all()
    assert mended is None or torch.equal(names["y"], mended(x))


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("function", [torch.exp, by_log_of_sum, by_ratio, by_log1p])
def test_within_the_range_there_is_nothing(function, size, seed):
    assert not examined(size, seed, function, around=20.0).harmful


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("function", [torch.exp, torch.square])
def test_weights_that_have_grown_are_the_rates_fault(function, size, seed):
    torch.manual_seed(seed)
    model, x = Ends(size, function, 0.0), torch.randn(16, size)
    with torch.no_grad():
        model.body.weight.mul_(1e25)
    first = doctor(model, step=lambda: model(x).mean(), batch=x)[0]
    assert (first.name, "made weights as large as" in first.cause) == ("nonfinite-in-float32", True)
    assert "group['lr'] /= 10" in first.remedy


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
def test_a_batch_that_was_not_normalized(size, seed):
    torch.manual_seed(seed)
    model, x = Ends(size, torch.square, 0.0), torch.randn(16, size) * 1e25
    first = doctor(model, step=lambda: model(x).mean(), batch=x)[0]
    assert "the batch contains numbers up to" in first.cause
    names = {"x": x}
    exec(first.remedy, names)
    assert math.isfinite(model(names["x"]).mean().item())


def test_a_power_is_named():
    (first, *_) = examined(8, 0, lambda x: x**20)
    assert (first.op, "clamp" in first.remedy) == ("pow", True)


def scaled_too_far(x):
    scaled = x * 1e25
    return scaled.square()


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS[::3])
def test_a_large_number_in_the_code_is_named_and_the_learning_rate_is_not(size, seed):
    found = examined(size, seed, scaled_too_far, around=1.0)[0]
    assert (found.name, found.module) == ("nonfinite-in-float32", "last")
    assert "The number 1e+25 of mul" in found.cause
    assert "lr" not in found.remedy
    names = {"x": torch.full((2,), 3.0)}
    exec(found.remedy, names)
    assert names["scaled"].square().isfinite().all()
    assert not examined(size, seed, lambda x: (x * 1e4).square(), around=1.0).harmful
