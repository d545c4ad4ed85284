"""Finite results that half gets wrong, each on a step that has them and on the nearest one that has not."""

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose import doctor
from amplab.diagnose.observed_step.values import observe_step
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.rules.arithmetic import arithmetic_findings

SIZES_AND_SEEDS = [(16, 0), (16, 1), (16, 2), (64, 0), (64, 1), (64, 2)]


class Around(nn.Module):
    """A weight of ones around a function of half tensors."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight.half()).float().sum()


def found(function, x):
    model = Around(function)
    return arithmetic_findings(observe_step(model, lambda: model(x.half()), detailed=True), Api.of_opt_level("O2"))


def numbers(size, seed):
    return torch.randn(8, size, generator=torch.Generator().manual_seed(seed))


def by_moments(x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean).clamp_min(0).add(1e-3).rsqrt()


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize(("around", "expected"), [(100.0, True), (60.0, True), (3.0, False), (0.0, False)])
def test_a_variance_that_cancels(size, seed, around, expected):
    """Clamped, so that nothing is NaN. Oracle: its error against float64 is more than a tenth, or below that."""
    x = (numbers(size, seed) + around).half()
    seen = found(by_moments, x)
    assert [(each.name, each.severity, each.op) for each in seen] == (
        [("variance-in-half", "warning", "sub")] if expected else []
    )
    true = x.double().var(-1, unbiased=False)
    mean = x.mean(-1)
    error = ((x * x).mean(-1) - mean * mean - true).abs().div(true).max().item()
    assert (error > 0.3) == expected


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
def test_other_differences_are_let_be(size, seed):
    x = numbers(size, seed)
    assert found(lambda x: x - x * 0.999, x + 50) == []
    assert found(lambda x: x.var(-1), x + 100) == []
    wide = nn.LayerNorm(size)
    assert arithmetic_findings(observe_step(wide, lambda: by_moments(wide(x) + 100).sum(), detailed=True)) == []


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("square", [lambda x: x * x, torch.square, lambda x: x**2])
@pytest.mark.parametrize(("times", "expected"), [(200.0, True), (20.0, False)])
def test_squares_that_overflow_and_a_loss_that_is_finite(size, seed, square, times, expected):
    x = numbers(size, seed) * times
    seen = found(lambda x: x * torch.rsqrt(square(x).mean(-1, keepdim=True) + 1e-5), x)
    assert [(each.name, each.severity) for each in seen] == ([("overflow-in-half", "warning")] if expected else [])
    if expected:
        assert seen[0].evidence["infs"] == int((x.half().double() ** 2 >= 65520).sum())


@pytest.mark.parametrize(
    ("function", "severity"),
    [
        (lambda x: torch.sigmoid(x * 6e4 * 6e4), "note"),
        (lambda x: (x.abs() + 13).exp().reciprocal(), "note"),
        (lambda x: torch.softmax(x + (x > 2).half() * -1e9, -1), None),
        (lambda x: torch.softmax(x.masked_fill(x > 2, -torch.inf), -1), None),
        (lambda x: torch.tanh(1 / (x - x)), None),
        (lambda x: x * 6e4 * 6e4, None),  # a loss of inf shows it
        (lambda x: (x.float() ** 20).half() * 0.0 + x, None),
    ],
)
def test_other_overflows_that_do_not_show_are_notes_or_meant(function, severity):
    seen = [each for each in found(function, numbers(16, 0) * 2) if each.name == "overflow-in-half"]
    assert [each.severity for each in seen] == ([] if severity is None else [severity])


class Moments(nn.Module):
    def forward(self, x):
        return by_moments(x)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_variance_by_hand_is_in_half_at_every_level_but_o0(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Moments())
    nn.init.constant_(model[0].bias, 100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = numbers(16, 0)
    try:
        seen = doctor(model, step=lambda: model(x).float().sum(), optimizer=optimizer).named("variance-in-half")
        assert [each.module for each in seen] == ([] if level == "O0" else ["1"])
        assert all(f'opt_level="{level}"' in each.remedy for each in seen)
    finally:
        amplab.amp.reset()


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize(
    ("function", "times", "plus", "expected"),
    [
        (torch.exp, 0.1, 10.0, True),
        (torch.exp, 0.1, -20.0, True),
        (torch.exp, 1.0, 0.0, False),
        (lambda x: x**3, 0.1, 35.0, True),
        (lambda x: x**3, 0.1, 5.0, False),
        (torch.cosh, 0.1, 10.5, True),
        (lambda x: torch.exp(x.float()), 0.1, 10.0, False),
        (lambda x: torch.exp(x.masked_fill(x > 0, -torch.inf)), 1.0, 0.0, False),
    ],
)
def test_exponentials_at_halfs_ends(function, times, plus, expected, size, seed):
    seen = found(function, numbers(size, seed) * times + plus)
    assert [(each.name, each.severity) for each in seen] == ([("exponential-in-half", "note")] if expected else [])


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize(("smallest", "expected"), [(1e-6, True), (1e-3, False)])
def test_logarithms_of_subnormal_halves(smallest, expected, size, seed):
    x = numbers(size, seed).abs() + 0.1
    x[0, seed] = smallest
    seen = found(torch.log, x)
    assert [(each.name, each.severity) for each in seen] == ([("logarithm-in-half", "note")] if expected else [])
    assert found(lambda x: torch.log(x.float()), x) == []
