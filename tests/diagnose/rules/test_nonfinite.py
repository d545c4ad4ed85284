"""Each word for what was not finite, on the step that has it and on its healthy twin."""

import pytest
import torch
from torch import nn

import amplab
from amplab.diagnose import doctor, finding_of, first_nonfinite

SIZES_AND_SEEDS = [(8, 0), (8, 1), (8, 2), (40, 0), (40, 1), (40, 2)]


class Net(nn.Module):
    """A layer, and `function` of its half output in a module called `last`."""

    def __init__(self, size, function):
        super().__init__()
        self.body = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.last = Last(function)

    def forward(self, x):
        return self.last(self.norm(self.body(x)))


class Last(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def masked(fill):
    return lambda x: x.masked_fill(torch.arange(len(x))[:, None] == 0, fill).softmax(-1).square()


FORWARD = {  # word: (function, broken and healthy), op
    "division-by-zero": (lambda x: 1 / (x - x), lambda x: 1 / (x - x + 1), "reciprocal"),
    "log-of-zero": (lambda x: (x - x).log(), lambda x: (x - x + 1).log(), "log"),
    "outside-domain": (lambda x: (x - 10).sqrt(), lambda x: (x + 10).sqrt(), "sqrt"),
    "gradient-undefined": (lambda x: (x * 0).sqrt(), lambda x: (x * 0 + 1).sqrt(), "sqrt"),
    "masked-row": (masked(-torch.inf), masked(-1e4), "softmax"),
    "inf-given": (lambda x: (x * 0).relu() * torch.inf, lambda x: (x * 0).relu() * 2.0, "mul"),
    "overflow-in-half": (lambda x: x.half() * 3e4 * 3e4, lambda x: x.half() * 30.0, "mul"),
    "reduction-overflows-half": (lambda x: (x.half() * 0 + 6e4).sum(-1), lambda x: (x.half() * 0 + 6.0).sum(-1), "sum"),
    "logits-overflow-half": (
        lambda x: ((x * 3000).half() @ (x * 3000).half().mT).softmax(-1),
        lambda x: (x.half() @ x.half().mT * 0.1).softmax(-1),
        "matmul",
    ),
    "constant-overflows-half": (
        lambda x: x.half() + (x > -1e9).half() * 1e5,
        lambda x: x.half() + (x > -1e9).half() * 1e2,
        "mul",
    ),
}


def examined(size, seed, function, spoil=None, spoil_batch=None):
    torch.manual_seed(seed)
    model, x = Net(size, function), torch.randn(16, size)
    if spoil is not None:
        spoil(model)
    if spoil_batch is not None:
        spoil_batch(x)
    return doctor(model, step=lambda: model(x).float().sum(), batch=x)


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("name", FORWARD)
def test_each_word_and_its_healthy_twin(name, size, seed):
    broken, healthy, op = FORWARD[name]
    first = examined(size, seed, broken)[0]
    assert (first.name, first.severity, first.module, first.op) == (name, "error", "last", op)
    assert not examined(size, seed, healthy).harmful


@torch.no_grad()
def into_parameter(model):
    model.body.weight[0, 0] = torch.inf


@torch.no_grad()
def into_buffer(model):
    model.norm.running_mean[0] = torch.nan
    model.eval()


def into_batch(x):
    x[0, 0] = torch.nan


@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize(
    ("name", "tensor", "spoilt"),
    [
        ("nonfinite-parameter", "body.weight", {"spoil": into_parameter}),
        ("nonfinite-buffer", "norm.running_mean", {"spoil": into_buffer}),
        ("nonfinite-batch", "batch", {"spoil_batch": into_batch}),
    ],
)
def test_what_came_in_is_named(name, tensor, spoilt, size, seed):
    first = examined(size, seed, torch.tanh, **spoilt)[0]
    assert (first.name, first.severity, first.tensor) == (name, "error", tensor)
    assert not examined(size, seed, torch.tanh).harmful


def lost_weights(*, half=False, **given):
    """A finding about a weight that is NaN, in a step with half in it or without."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan

    def loss_fn():
        with torch.autocast("cpu", torch.float16, enabled=half):
            return model(torch.ones(2, 4)).float().sum()

    finding = finding_of(first_nonfinite(model, step=loss_fn, **given))
    assert (finding.name, finding.tensor) == ("nonfinite-parameter", "weight")
    return finding


def test_lost_weights_are_fixed_by_a_scale_if_only_the_step_is_half():
    assert "GradScaler" in lost_weights(half=True).remedy
    single = lost_weights()
    assert "No float16" in single.cause
    assert not any(word in single.remedy for word in ("GradScaler", "amp."))
    model = nn.Linear(2, 1)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        exec(single.remedy.partition("# and with")[0], {"torch": torch, "model": model})


@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
def test_under_a_scaler_that_skips_it_was_not_the_gradients(make):
    finding = lost_weights(half=True, scaler=make("cpu"))
    assert "checks gradients only" in finding.cause
    assert "GradScaler" not in finding.remedy
    assert "scaler.unscale_" in finding.remedy


def test_a_buffer_that_the_cast_to_half_made_inf_is_named_and_not_the_line_of_code():
    class Masked(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("neg", torch.tensor(number))

        def forward(self, x, mask):
            return (self.lin(x) + (1 - mask) * self.neg).softmax(-1)

    def first(number):
        torch.manual_seed(0)
        model = Masked(number).half()
        x, mask = torch.randn(16, 8).half(), torch.ones(16, 8).half()
        mask[:, 5:] = 0
        found = doctor(model, (x, mask), step=lambda batch: -(model(*batch).float() + 1e-6).log().mean())
        return [each for each in found if each.severity == "error"]

    assert [each.name for each in first(-1e9)] == ["held-inf-in-half"]
    assert "neg" in str(first(-1e9)[0])
    assert first(-1e4) == [], "the remedy"
