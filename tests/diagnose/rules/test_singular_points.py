"""What moved a value onto a singular point: the op is named that rounds to it, never one that is right in float32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab

LEVELS = ["O1", "O2"]


class Net(nn.Module):
    """A layer that is the identity, and `function` of what it returns."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.function(self.layer(x))


def found(function, level, batch=None):
    """The first finding."""
    torch.manual_seed(0)
    batch = torch.randn(8, 8) if batch is None else batch
    return amplab.doctor(Net(function), batch, loss=lambda y: y.float().pow(2).mean(), opt_level=level)[0]


def half_of_a_sigmoid(y):
    return torch.atanh(torch.sigmoid(y * 100) * 0.5 + 0.4999)


def half_of_a_hardtanh(y):
    return torch.atanh(F.hardtanh(y * 100) * 0.5 + 0.49995)


def log_of_a_constant(y):
    return torch.log1p(-(torch.relu(y) * 0 + 0.9999))


def atanh_of_a_constant(y):
    return torch.atanh(y * 0 + 0.9999)


def atanh_of_a_difference(y):
    return torch.atanh(y - y + 0.9999)


def arc_of_a_difference(y):
    return torch.acos(y - y + 0.9999)


def arc_of_a_tanh(y):
    return torch.acos(torch.tanh(y.clamp(-5, 5) * 0 + 5))


SUMS = [
    half_of_a_sigmoid,
    half_of_a_hardtanh,
    log_of_a_constant,
    atanh_of_a_constant,
    atanh_of_a_difference,
    arc_of_a_difference,
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("function", SUMS)
def test_a_sum_that_rounds_to_one_is_named_and_not_the_ops_before_it(function, level):
    finding = found(function, level)
    assert finding.cause.startswith("The result of add, "), finding
    assert "rounds to 1 in float16; in float32 it does not" in finding.cause
    assert finding.certainty == "certain"


@pytest.mark.parametrize("level", LEVELS)
def test_a_tanh_that_rounds_to_one_is_named(level):
    assert found(arc_of_a_tanh, level).cause.startswith("The result of tanh, ")


@pytest.mark.parametrize("level", LEVELS)
def test_ops_of_several_elements_prove_nothing(level):
    """The cast of the batch rounds, and the product with the identity is exact."""
    finding = found(torch.atanh, level, torch.full((8, 8), 0.9999))
    assert "Which op rounds is not known" in finding.cause, finding
    assert "linear" not in finding.cause
    assert "module_rules" not in finding.remedy


def test_a_step_that_float32_leaves_the_domain_with_has_no_singular_point_in_float32():
    """In float32 the sum is beyond 1: NaN, not inf."""
    finding = found(lambda y: torch.atanh(torch.add(torch.ones_like(y), y.abs(), alpha=1e-4)), "O2")
    assert "contains that value in float32" not in finding.cause, finding
    assert "not finite in float32 either" in finding.cause


def test_the_dtype_that_rounds_is_named():
    finding = amplab.doctor(
        Net(lambda y: torch.atanh(y.tanh().clamp(-0.5, 0.5) * 0 + 0.999)),
        torch.randn(8, 8),
        loss=lambda y: y.float().pow(2).mean(),
        autocast=torch.autocast("cpu", dtype=torch.bfloat16),
    )[0]
    assert "rounds to 1 in bfloat16" in finding.cause, finding


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("function", SUMS)
def test_the_remedy_runs_as_it_is_and_mends_the_step(function, level):
    code = found(function, level).remedy.removeprefix("return ")
    assert "..." not in code
    assert "\n" not in code
    mended = eval(f"lambda y: {code}", {"torch": torch, "F": F})
    back = (lambda y: mended(y).half()) if level == "O1" else mended
    report = amplab.doctor(Net(back), torch.randn(8, 8), loss=lambda y: y.float().pow(2).mean(), opt_level=level)
    assert not report.named("infinite-value"), str(report)
    assert not report.named("gradient-undefined"), str(report)


def two_products(y):
    return torch.atanh(torch.sigmoid(y) * 0 + 0 * y + 0.9999 * torch.ones_like(y))


def test_a_line_with_several_such_calls_gets_a_remedy_of_its_own_names():
    remedy = found(two_products, "O2").remedy
    assert "mul(" not in remedy
    assert "x is the input" not in remedy
    assert "0.9999 * torch.ones_like(y)" in remedy


@pytest.mark.parametrize("level", LEVELS)
def test_the_numbers_are_those_of_the_op_whose_slope_is_infinite(level):
    finding = found(lambda y: torch.acos(y * 0 + 1), level)
    assert finding.name == "gradient-undefined"
    assert "its input contains 1" in finding.symptom
    assert finding.evidence["input_absmax"] == 1
    assert "input_zeros" not in finding.evidence
