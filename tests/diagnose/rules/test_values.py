"""Rules about values, each on a step that has it and on the nearest one that has not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.diagnose.observed_step.values import observe_step
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.values import value_findings


class Body(nn.Module):
    """A weight of ones around a function of half tensors."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = Inner(function)

    def forward(self, x):
        return self.inner(x * self.weight.half()).float().sum()


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def found(function, x, *, loss_scale=1.0):
    model = Body(function)
    step = observe_step(model, lambda: model(x.half()), loss_scale=loss_scale, detailed=True)
    return {(each.name, each.severity) for each in value_findings(step)}, value_findings(step)


RAMP = torch.linspace(0.5, 4, 16)
WITH_ZEROS = RAMP.clone().index_fill(0, torch.tensor([3, 5]), 0)


@pytest.mark.parametrize(
    ("x", "eps", "expected"),
    [
        (RAMP, 1e-8, "note"),  # gone, but nothing needed it
        (WITH_ZEROS, 1e-8, "warning"),
        (WITH_ZEROS, 1e-6, None),
        (WITH_ZEROS, 2.0**-25, "warning"),
        (WITH_ZEROS, 2.0**-24, None),
    ],
)
def test_an_eps_that_is_zero_in_half(x, eps, expected):
    seen, _ = found(lambda x: x / (x + eps).clamp_min(eps).log().exp(), x)
    assert ("constant-underflows-half", expected) in seen or (expected is None and "constant-under" not in str(seen))


def test_an_eps_that_torch_uses_in_float32_is_not_reported():
    seen, _ = found(lambda x: F.layer_norm(x, (16,), eps=1e-8), WITH_ZEROS)
    assert "constant-underflows-half" not in str(seen)


def test_an_eps_in_float32_is_not_reported():
    seen, _ = found(lambda x: 1 / (x.float() + 1e-8), WITH_ZEROS)
    assert "constant-underflows-half" not in str(seen)


def test_a_mask_that_is_inf_in_half_is_a_note():
    seen, _ = found(lambda x: torch.softmax(x + (x > 2).half() * -1e9, -1), RAMP)
    assert ("constant-overflows-half", "note") in seen
    assert "constant-overflows-half" not in str(found(lambda x: torch.softmax(x + (x > 2).half() * -6e4, -1), RAMP)[0])


def test_a_constant_that_divides_an_inf_did_not_make_it():
    seen, _ = found(lambda x: (x * 6e4 * 6e4) / 131072, RAMP)
    assert "constant-overflows-half" not in dict(seen)


def test_a_cast_that_overflows_is_a_note():
    def masks(x):
        return torch.softmax(x + torch.where(x > 2, -1e9, 0.0).float().half(), -1)

    assert ("cast-overflows-half", "note") in found(masks, RAMP)[0] or ("constant-overflows-half", "note") in found(
        masks, RAMP
    )[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("wide", [torch.half, torch.float32])
def test_casts_from_and_to_a_dtype_that_is_not_measured_are_left_out(dtype, wide):
    assert found(lambda x: x.to(wide).to(dtype).to(wide), RAMP)[0] == set()  # backward casts, too


@pytest.mark.parametrize(("size", "expected"), [(3e-5, True), (1e-2, False)])
@pytest.mark.parametrize("square", [torch.square, lambda x: x**2, lambda x: x * x])
def test_squares_that_underflow(size, expected, square):
    seen, findings = found(square, RAMP * size)
    assert (("square-underflows-half", "warning") in seen) == expected
    if expected:
        (finding,) = (each for each in findings if each.name == "square-underflows-half")
        lost = int(((RAMP * size).half().square() == 0).sum())
        assert (finding.evidence["lost"], finding.module) == (lost, "inner")


def test_a_softmax_that_reaches_zero_is_a_note():
    assert ("softmax-in-half", "note") in found(lambda x: torch.softmax(x * 8, -1), RAMP)[0]
    assert "softmax-in-half" not in str(found(lambda x: torch.softmax(x * 8, -1, dtype=torch.float32), RAMP)[0])
    assert "softmax-in-half" not in str(found(lambda x: torch.softmax(x, -1), RAMP)[0])


@pytest.mark.parametrize(("times", "expected"), [(1000, True), (10, False)])
def test_a_sum_near_the_end_of_half(times, expected):
    assert (("reduction-near-overflow", "note") in found(lambda x: x.sum(), RAMP * times)[0]) == expected


@pytest.mark.parametrize(("times", "expected"), [(10, "warning"), (0.5, "note")])
def test_bce_of_a_sigmoid(times, expected):
    target = torch.ones(16)
    seen, findings = found(lambda x: F.binary_cross_entropy(torch.sigmoid(x).float(), target), RAMP * times)
    assert ("bce-after-sigmoid", expected) in seen
    assert findings[0].module == "inner"
    assert "bce" not in str(found(lambda x: F.binary_cross_entropy_with_logits(x.float(), target), RAMP * 10)[0])


@pytest.mark.parametrize(("scale", "expected"), [(1.0, "warning"), (2.0**16, None)])
def test_gradients_that_underflow(scale, expected):
    def small(x):
        return (x.float() * torch.logspace(-9, -7, 16)).sum()

    seen, findings = found(small, RAMP, loss_scale=scale)
    assert ("gradients-underflow", expected) in seen or (expected is None and "underflow" not in str(seen))
    if expected:
        oracle = (torch.logspace(-9, -7, 16).half() == 0).double().mean().item()
        assert max(each.evidence["share"] for each in findings if each.name == "gradients-underflow") == oracle


def test_tiny_gradients_may_be_lost():
    """What is lost weighs nothing against the largest element."""
    slopes = torch.logspace(-9, -8, 16).index_fill(0, torch.tensor([0]), 1.0)
    assert ("gradients-underflow", "note") in found(lambda x: (x.float() * slopes).sum(), RAMP)[0]


@pytest.mark.parametrize(("slope", "share"), [(0.0, None), (1e-9, 1.0)])
def test_a_gradient_that_was_expanded_counts_each_of_its_elements(slope, share):
    """The gradient of a sum is one number for all that was summed, and its cast to half reads it as often."""
    _, findings = found(lambda x: x.float().sum(0, keepdim=True) * slope, RAMP)
    assert [each.evidence["share"] for each in findings if each.name == "gradients-underflow"] == (
        [] if share is None else [share]
    )


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("size", "expected"), [(3000.0, "warning"), (300.0, None)])
def test_a_sum_that_is_inf_where_the_loss_is_finite(size, expected, cast):
    """x / inf is 0."""

    def divided(x):
        total = (x * size).float().sum().half() if cast else (x * size).sum()
        return x / total

    _, findings = found(divided, RAMP)
    named = [each for each in findings if each.name == "reduction-overflows-half"]
    assert [each.severity for each in named] == ([expected] if expected else [])
    if expected:
        assert (named[0].op, named[0].module, named[0].evidence["infs"]) == ("sum", "inner", 1)


def test_a_step_in_float32_has_nothing():
    model = nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4, eps=1e-8), nn.Softmax(-1))
    step = observe_step(model, lambda: (model(RAMP[None]) + 1e-9).log().sum(), detailed=True)
    assert value_findings(step) == []


LEVELS = ["O2", "O3", "half"]


class Head(nn.Module):
    """A softmax in a module of its own, of logits that are far apart."""

    def __init__(self, size):
        super().__init__()
        self.body = nn.Linear(size, size)
        self.choice = nn.Softmax(-1)

    def forward(self, x):
        return self.choice(self.body(x) * 40)


def headed(level, size, seed):
    """The note about the softmax, its model, and what doctor was asked with."""
    torch.manual_seed(seed)
    model = Head(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level == "half":
        model.half()
    else:
        amplab.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(16, size).half()
    found = amplab.doctor(model, step=lambda: model(x).float().square().sum(), optimizer=optimizer)
    return found.named("softmax-in-half"), model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("size", "seed"), [(8, 0), (8, 1), (32, 2)])
def test_a_note_uses_the_names_of_the_api_in_use(level, size, seed):
    """With half weights nothing casts at calls: what helps is .float() by hand, or a module rule of this level."""
    try:
        (note,), *_ = headed(level, size, seed)
    finally:
        amplab.amp.reset()
    rest, _, by_hand = note.remedy.rpartition("\n")
    names = {"torch": torch, "x": torch.tensor([0.0, 30.0]).half()}
    exec(by_hand, names)
    assert (names["y"].dtype, bool((names["y"] > 0).all())) == (torch.float32, True)
    assert "op_rules" not in note.remedy
    assert "autocast" not in note.remedy
    assert (f'opt_level="{level}"' in rest) == (level != "half")


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_module_rule_of_a_note_runs_and_silences_it(level):
    try:
        (note,), model, optimizer = headed(level, 8, 0)
        names = {"amplab": amplab, "amp": amplab.amp, "model": model, "optimizer": optimizer}
        exec(note.remedy.partition("# or")[0], names)
        x = torch.randn(16, 8).half()
        assert amplab.amp.default_session().opt_level == level
        assert not amplab.doctor(model, step=lambda: model(x).float().square().sum()).named("softmax-in-half")
    finally:
        amplab.amp.reset()


@pytest.mark.parametrize("region", [torch.autocast, amplab.autocast])
def test_under_autocast_a_note_leaves_it(region):
    model = nn.Linear(16, 16)
    with torch.no_grad():
        model.weight.mul_(1e-4), model.bias.mul_(1e-4)

    def loss_fn():
        with region("cpu", dtype=torch.float16):
            out = model(RAMP[None])
            return (out * out).float().sum()

    (found_,) = amplab.doctor(model, step=loss_fn).named("square-underflows-half")
    module = "torch" if region is torch.autocast else "amplab"
    region = f"with {module}.autocast(out.device.type, enabled=False):"
    assert found_.remedy.startswith(f"{region}\n    return (out.float() * out.float()).float().sum()\n")
    assert "amp." not in found_.remedy


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (Api.of_opt_level("O2"), 'opt_level="O2", loss_scale="dynamic"'),
        (Api.of_opt_level("O1"), 'opt_level="O1"'),
        (Api(casting=ApiStyle.TORCH), "GradScaler"),
        (Api(casting=ApiStyle.HALF), "O2"),
    ],
)
def test_lost_gradients_get_the_scale_of_what_is_in_use(api, words):
    model = Body(lambda x: (x.float() * torch.logspace(-9, -7, 16)).sum())
    step = observe_step(model, lambda: model(RAMP.half()), detailed=True)
    (lost,) = (each for each in value_findings(step, api) if each.name == "gradients-underflow")
    assert words in lost.remedy
