"""Simulated formats: every pattern's rounding forward and backward, and engines in them against real half."""

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

from amplab.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, TF32
from amplab.policies import APEX, CastCache, CastingEngine, PrecisionPolicy, cpu_half, explaining
from amplab.policies.casting.simulated_rounding import round_operand, round_result
from amplab.policies.casting.steps import StepParts, make_step

FLOAT8 = (FLOAT8_E4M3, FLOAT8_E5M2)
HALVES = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
"""Every half value: a superset of both float8 formats, their midpoints and what lies beyond them."""
PAST_HALF = torch.cat([HALVES[HALVES.isfinite()] * 2**k for k in (-14, 4)])


def same(first, second):
    return first.dtype is second.dtype is torch.float32 and torch.equal(first.nan_to_num(7.5), second.nan_to_num(7.5))


def nearest(format, values):
    """The value of the format nearest to each of `values`, from its list of patterns: an oracle of its own."""
    patterns = [format.value(bits) for bits in range(2**format.total_bits)]
    numbers = torch.tensor(sorted({value for value in patterns if math.isfinite(value)}), dtype=torch.float64)
    distances = (values.double()[:, None] - numbers).abs()
    return numbers[distances.argmin(1)].float(), distances.topk(2, largest=False).values.diff().squeeze(1) == 0


@pytest.mark.parametrize("format", [*FLOAT8, TF32], ids=lambda format: format.name)
@pytest.mark.parametrize("values", [HALVES, PAST_HALF], ids=["halves", "beyond"])
def test_values_and_gradients_are_rounded_as_the_format_rounds(format, values):
    stored = format is not TF32
    for rounding, rounds_value, rounds_gradient in ((round_operand, True, stored), (round_result, stored, True)):
        x = values.clone().requires_grad_()
        y = rounding(x, format)
        y.backward(values.flip(0))
        assert same(y.detach(), format.round(values) if rounds_value else values)
        assert same(x.grad, format.round(values.flip(0)) if rounds_gradient else values.flip(0))


@pytest.mark.parametrize("format", FLOAT8, ids=lambda format: format.name)
def test_rounding_finds_the_nearest_value_of_the_list(format):
    inside = HALVES[HALVES.abs() <= format.max]
    expected, tie = nearest(format, inside)
    rounded = round_operand(inside, format)
    assert torch.equal(rounded[~tie], expected[~tie])
    assert tie.any()


@pytest.mark.parametrize("native_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_agrees_with_torchs_own_cast(native_dtype):
    format = PrecisionPolicy(compute_dtype=native_dtype).simulated
    finite = HALVES[HALVES.abs() <= format.max]
    assert same(round_operand(finite, format), finite.to(native_dtype).float())


def test_a_second_gradient_is_rounded_too():
    x = torch.tensor([1.3, 2.7], requires_grad=True)
    (gradient,) = torch.autograd.grad((round_operand(x, FLOAT8_E5M2) ** 3).sum(), x, create_graph=True)
    assert torch.equal(gradient, FLOAT8_E5M2.round(3 * FLOAT8_E5M2.round(x) ** 2))
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, FLOAT8_E5M2.round(6 * FLOAT8_E5M2.round(x)))


def test_transforms_of_functions_pass():
    x = torch.tensor([1.3, 2.7])
    per_sample = torch.func.vmap(torch.func.grad(lambda t: round_operand(t, FLOAT8_E5M2).square()))(x)
    assert torch.equal(per_sample, FLOAT8_E5M2.round(2 * FLOAT8_E5M2.round(x)))


def test_half_simulated_is_half_with_float32_accumulation():
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(8, 8, generator=generator) for _ in range(3))
    step = make_step(StepParts(APEX.rule(F.linear), FLOAT16, CastCache(), lambda _, func, args, kwargs: func(*args)))
    outcomes = []
    for linear in (F.linear, lambda *args: step(None, F.linear, args, {})):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with contextlib.ExitStack() as block:
            if linear is F.linear:
                block.enter_context(cpu_half("fp32_accumulate"))
                block.enter_context(CastingEngine().active())
            y = linear(*leaves)
        assert y.dtype is (torch.float16 if linear is F.linear else torch.float32)
        y.float().backward(gradient)
        outcomes.append((y.detach().float(), leaves[0].grad, leaves[1].grad))
    for real, simulated in zip(*outcomes, strict=True):
        assert torch.equal(real, simulated)


def engine_output(dtype, func, *args):
    with CastingEngine(PrecisionPolicy(compute_dtype=dtype)).active():
        return func(*args)


def test_engines_round_what_float8_ops_read_and_write():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    q = FLOAT8_E4M3.round
    product = engine_output("float8_e4m3", lambda: x.half() @ x)
    assert same(product, q(q(x.half()) @ q(x)))
    assert same(engine_output("float8_e4m3", torch.exp, x), torch.exp(x))
    assert same(engine_output("float8_e4m3", torch.relu, x), torch.relu(x))
    assert engine_output("float8_e4m3", lambda: x.double() @ x.double()).dtype is torch.float64


def test_tf32_rounds_operands_alone():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    product = engine_output("tf32", lambda: x @ x)
    assert same(product, TF32.round(x) @ TF32.round(x))
    assert not torch.equal(product, TF32.round(product))


def test_one_op_may_be_simulated_alone():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    policy = PrecisionPolicy(None, torch.float16, {"exp": "float8_e5m2"})
    with CastingEngine(policy).active():
        assert same(torch.exp(input=x), FLOAT8_E5M2.round(torch.exp(FLOAT8_E5M2.round(x))))
        assert torch.equal(x @ x, torch.matmul(x, x))


def test_decisions_say_simulated():
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(watched.decision.detail)
            return func(*args, **(kwargs or {}))

    with Watch(), CastingEngine(PrecisionPolicy(compute_dtype="float8_e5m2")).active(), explaining() as watched:
        F.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert "rounded to float8_e5m2 (simulated: float32 tensors)" in seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("format", [*FLOAT8, TF32], ids=lambda format: format.name)
def test_a_gpu_rounds_the_same_values(format):
    x = HALVES.cuda().requires_grad_()
    rounded = round_result(round_operand(x, format), format)
    rounded.backward(HALVES.flip(0).cuda())
    assert same(rounded.detach().cpu(), format.round(HALVES))
    assert same(x.grad.cpu(), format.round(HALVES.flip(0)))
