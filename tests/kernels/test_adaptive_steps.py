"""Adagrad, Adadelta and RMSprop: the references against float64, the kernels against the references to the bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from amplab import kernels
from amplab.kernels.adaptive_steps import (
    multi_tensor_adadelta__reference,
    multi_tensor_adagrad__reference,
    multi_tensor_rmsprop__reference,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((1,), (0,), (75,), (3, 5, 7), (2, 8, 3, 3), ())

# The operator, how many states it has, and the numbers of its rule.
RMSPROP = (0.01, 0.9, 1e-8, 0.1, 0.8)  # lr, alpha, eps, weight_decay, momentum
CASES = {
    "adagrad": ("adagrad_", 1, (0.1, 1e-10, 0.2, 0.0, False)),  # lr, eps, weight_decay, lr_decay, decoupled
    "adagrad, decoupled": ("adagrad_", 1, (0.1, 1e-3, 0.2, 0.05, True)),
    "adadelta": ("adadelta_", 2, (0.7, 0.9, 1e-6, 0.1)),  # lr, rho, eps, weight_decay
    "adadelta, no decay": ("adadelta_", 2, (1.0, 0.95, 1e-3, 0.0)),
    "rmsprop": ("rmsprop_", 1, (*RMSPROP, False, False, False)),
    "rmsprop, centered": ("rmsprop_centered_", 2, (*RMSPROP, False, False, False)),
    "rmsprop, momentum": ("rmsprop_momentum_", 2, (*RMSPROP, False, False, False)),
    "rmsprop, both": ("rmsprop_centered_momentum_", 3, (*RMSPROP, False, False, False)),
    "tf": ("rmsprop_", 1, (*RMSPROP, True, True, True)),
    "tf, centered": ("rmsprop_centered_", 2, (*RMSPROP, True, True, True)),
    "tf, momentum": ("rmsprop_momentum_", 2, (*RMSPROP, True, True, True)),
    "tf, both": ("rmsprop_centered_momentum_", 3, (*RMSPROP, False, True, False)),
}


def operator(name):
    return getattr(torch.ops.amplab, f"multi_tensor_{name}").default


def reference(name):
    if name == "adagrad_":
        return multi_tensor_adagrad__reference
    if name == "adadelta_":
        return multi_tensor_adadelta__reference
    return lambda *arguments: multi_tensor_rmsprop__reference("centered" in name, "momentum" in name, *arguments)


def same_bits(a, b):
    """Equal to the bit, NaNs apart; float64 but nearly, since torch's own root of a double is no better."""
    if a.dtype == torch.float64:
        return torch.allclose(a, b, rtol=1e-14, atol=1e-14, equal_nan=True)
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    kept = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[kept].contiguous().view(integer), b[kept].contiguous().view(integer)
    )


def lists(states, shapes, *, param=torch.float32, grad=torch.float32, state=torch.float32, copy=None, seed=0):
    """Params, grads, states…, steps, copies. The second state is small, as a mean of gradients is."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype, scale=1.0):
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [(each if scale == 1.0 else each.abs() * scale).to(dtype) for each in drawn]

    steps = [torch.tensor(float(index)) for index in range(len(shapes))]
    kept = [tensors(state, scale) for scale in (2.0, 0.1, 0.5)[:states]]
    return [tensors(param), tensors(grad), *kept, steps, [] if copy is None else tensors(copy)]


def copied(all_lists):
    def like(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    return [[like(each) for each in tensors] for tensors in all_lists]


def flat(all_lists):
    return [each for tensors in all_lists for each in tensors]


def alike(all_lists, others):
    return all(same_bits(a, b) for a, b in zip(flat(all_lists), flat(others), strict=True))


def both(case, given_lists, *, factor=None, found_inf=None, maximize=False):
    """What reference and kernel leave of the same lists."""
    name, _, numbers = CASES[case]
    left = copied(given_lists), copied(given_lists)
    for function, mine in zip((reference(name), operator(name)), left, strict=True):
        function(*mine, factor, found_inf, maximize, *numbers)
    return left


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("param", DTYPES)
def test_every_dtype(built, case, param, grad):
    state = torch.float64 if param == torch.float64 else torch.float32
    drawn = lists(CASES[case][1], SHAPES, param=param, grad=grad, state=state)
    assert alike(*both(case, drawn, factor=torch.tensor([1 / 3])))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("state", DTYPES)
def test_states_of_every_dtype_and_copies(built, case, state):
    drawn = lists(CASES[case][1], SHAPES, grad=torch.float16, state=state, copy=torch.bfloat16)
    left, mine = both(case, drawn, maximize=True)
    assert alike(left, mine)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(mine[0], mine[-1], strict=True))


@settings(max_examples=60)
@given(
    case=st.sampled_from(list(CASES)),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    maximize=st.booleans(),
    bad=st.sampled_from([None, math.inf, -math.inf, math.nan, 6e4]),
    seed=st.integers(0, 99),
)
def test_any_lists(built, case, shapes, dtypes, maximize, bad, seed):
    param, grad, state = dtypes
    drawn = lists(CASES[case][1], shapes, param=param, grad=grad, state=state, seed=seed)
    for each in drawn[1]:
        if bad is not None and each.numel():
            each.view(-1)[seed % each.numel()] = bad
    assert alike(*both(case, drawn, factor=torch.tensor(0.7), maximize=maximize))


# -- the published rules, in float64 ---------------------------------------------------------------------------------


def published(name, numbers, g, p, states, step):
    """Weight and states after one step."""
    if name == "adagrad_":
        lr, eps, decay, lr_decay, decoupled = numbers
        lr = lr / (1 + (step - 1) * lr_decay)
        g = g if decoupled else g + decay * p
        h = states[0] + g**2
        return p - lr * (g / (h**0.5 + eps) + (decay * p if decoupled else 0.0)), [h]
    if name == "adadelta_":
        lr, rho, eps, decay = numbers
        g = g + decay * p
        v = rho * states[0] + (1 - rho) * g**2
        step = ((states[1] + eps) / (v + eps)) ** 0.5 * g
        return p - lr * step, [v, rho * states[1] + (1 - rho) * step**2]
    lr, alpha, eps, decay, momentum, decoupled, in_root, lr_inside = numbers
    p, g = ((1 - decay) * p, g) if decoupled else (p, g + decay * p)
    new = [alpha * states[0] + (1 - alpha) * g**2]
    if "centered" in name:
        new.append(alpha * states[1] + (1 - alpha) * g)
    variance = new[0] - (new[1] ** 2 if "centered" in name else 0.0)
    u = g / ((variance + eps) ** 0.5 if in_root else variance**0.5 + eps)
    if "momentum" not in name:
        return p - lr * u, new
    new.append(momentum * states[-1] + (lr * u if lr_inside else u))
    return p - (new[-1] if lr_inside else lr * new[-1]), new


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_published_rule(case):
    name, count, numbers = CASES[case]
    drawn = lists(count, [(1000,)])
    if "centered" in name:
        drawn[3][0].copy_(0.5 * drawn[2][0].sqrt())  # a mean of squares is no less than the square of the mean
    drawn[-2][0].fill_(3.0)
    p, g, *states = (each[0].double() for each in drawn[: 2 + count])
    exact, new_states = published(name, numbers, 0.7 * g, p, states, 4)
    reference(name)(*drawn, torch.tensor(0.7), None, False, *numbers)
    assert (drawn[0][0].double() - exact).abs().max() < 2e-6
    for mine, new in zip(drawn[2 : 2 + count], new_states, strict=True):
        assert torch.allclose(mine[0].double(), new, rtol=1e-6, atol=1e-6)
    assert drawn[-2][0].item() == 4.0
    assert (exact - p).abs().max() > 1e-3


def test_a_constant_gradient_has_no_negative_variance():
    """Where a variance is 0 rounding takes it below, and its root would be NaN."""
    params, squares, means = [torch.ones(64)], [torch.zeros(64)], [torch.zeros(64)]
    grads = [torch.linspace(0.1, 1.0, 64)]
    for _ in range(300):
        kernels.rmsprop_(params, grads, squares, means, [], [torch.zeros(())], lr=1e-3, alpha=0.9, eps=1e-3)
    assert bool((squares[0] < means[0] ** 2).any())
    assert bool(params[0].isfinite().all())


# -- found_inf, refusals, opcheck ------------------------------------------------------------------------------------


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    if request.param == "reference":
        return reference
    request.getfixturevalue("built")
    return operator


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("found", [1.0, 0.5, math.nan])
def test_an_overflow_leaves_every_bit(implementation, case, found):
    name, count, numbers = CASES[case]
    drawn = lists(count, SHAPES, grad=torch.float16, copy=torch.float16)
    drawn[1][2][3] = math.inf
    mine = copied(drawn)
    implementation(name)(*mine, None, torch.tensor([found]), False, *numbers)
    assert alike(drawn, mine)
    implementation(name)(*mine, None, torch.tensor([0.0]), False, *numbers)
    assert not alike(drawn[:1], mine[:1])
    assert [step.item() for step in mine[-2]] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("case", CASES)
def test_no_tensors_at_all(implementation, case):
    name, count, numbers = CASES[case]
    implementation(name)(*[[]] * (count + 4), torch.ones(1), torch.zeros(1), False, *numbers)


@pytest.mark.parametrize("case", CASES)
def test_a_state_that_is_missing_is_refused(implementation, case):
    name, count, numbers = CASES[case]
    drawn = lists(count, [(4, 5), (3,)])
    drawn[2].pop()
    with pytest.raises(RuntimeError, match="2 params, 1 states"):
        implementation(name)(*drawn, None, None, False, *numbers)


@pytest.mark.parametrize("case", CASES)
def test_the_schema_says_what_happens(case):
    name, count, numbers = CASES[case]
    drawn = lists(count, [(3,), (2, 2)], grad=torch.float16, copy=torch.float16)
    opcheck(operator(name), (*drawn, torch.ones(1), torch.zeros(1), False, *numbers))
