"""Gradients that the kernel finds by itself: unscaled and clipped as by the general operator, or left alone."""

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amplab
from amplab import kernels
from amplab.kernels import ParameterList, unscale_

pytestmark = pytest.mark.usefixtures("built")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def parameters_with(*grads):
    params = [nn.Parameter(torch.zeros_like(grad) if grad is not None else torch.zeros(2)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def random_grads(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (1,), (0, 4), (700, 2), (5, 4), ()]
    return [torch.randn(shape, generator=generator) * 8 for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan, 65504.0])
@pytest.mark.parametrize("inverse", [0.5, 1 / 3, 2.0, 1.0])
def test_unscales_and_checks_as_the_general_operator_does(dtype, bad, inverse):
    mine, theirs = [[grad.to(dtype) for grad in random_grads()] for _ in range(2)]
    for grads in (mine, theirs):
        if bad is not None:
            grads[3][-1, -1] = bad
    found, expected, inverse = torch.zeros(()), torch.zeros(()), torch.tensor(inverse)
    assert ParameterList(parameters_with(*mine)).unscale_grads_(found, inverse) == len(mine)
    unscale_(theirs, expected, inverse)
    assert torch.equal(found, expected)
    for ours, other in zip(mine, theirs, strict=True):
        assert torch.equal(ours.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0))


def test_a_dispatch_mode_sees_which_gradients_are_unscaled():
    """Tools that watch a step learn from the schema of an op which tensors it writes; a table hides them."""
    gradients = random_grads()
    optimizer = torch.optim.SGD(parameters_with(*gradients), lr=0.1)
    scaler = amplab.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    written = []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for each, value in zip(func._schema.arguments, args, strict=False):
                if each.is_write:
                    written.extend(value if isinstance(value, list | tuple) else [value])
            return func(*args, **(kwargs or {}))

    with Writes():
        scaler.unscale_(optimizer)
    assert {each.data_ptr() for each in gradients if each.numel()} <= {each.data_ptr() for each in written}


def test_it_finds_the_gradients_that_are_there_now():
    params = parameters_with(torch.full((2,), 4.0), None, torch.full((2,), 4.0))
    known, half = ParameterList(params), torch.tensor(0.5)
    assert known.unscale_grads_(torch.zeros(()), half) == 2
    params[0].grad, params[1].grad = torch.full((2,), 6.0), torch.full((2,), 8.0).t()
    assert known.unscale_grads_(torch.zeros(()), half) == 3
    assert [param.grad.tolist() for param in params] == [[3.0, 3.0], [4.0, 4.0], [1.0, 1.0]]
    for param in params:
        param.grad = None
    assert known.unscale_grads_(torch.zeros(()), half) == 0
    (params[0] * 2.0).sum().backward()
    assert known.unscale_grads_(torch.zeros(()), half) == 1
    assert params[0].grad.tolist() == [1.0, 1.0]


def test_gradients_in_an_order_of_their_own_are_taken():
    grads = [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)]
    expected = [grad * 0.5 for grad in grads]
    assert ParameterList(parameters_with(*grads)).unscale_grads_(torch.zeros(()), torch.tensor(0.5)) == 2
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize(
    "grad",
    [
        torch.ones(1).expand(2),
        torch.ones(2, 4)[:, ::2],
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["expanded", "with gaps", "sparse", "complex", "negative by a bit"],
)
def test_what_is_not_plain_is_left_to_others_and_nothing_is_written(grad):
    plain = torch.full((2,), 4.0)
    params = parameters_with(plain, grad)
    found = torch.zeros(())
    assert ParameterList(params).unscale_grads_(found, torch.tensor(math.inf)) is None
    assert ParameterList(params).clip_grads_(found, 1.0) is None
    assert plain.tolist() == [4.0, 4.0]
    assert found.item() == 0.0


def test_half_gradients_only_where_they_are_allowed():
    params = parameters_with(torch.full((2,), 4.0), torch.full((2,), 4.0).half())
    known = ParameterList(params)
    assert known.unscale_grads_(torch.zeros(()), torch.tensor(0.5), allow_half=False) is None
    assert params[0].grad.tolist() == [4.0, 4.0]
    assert known.unscale_grads_(torch.zeros(()), torch.tensor(0.5)) == 2
    assert params[1].grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6])
def test_clips_as_torch_does(max_norm):
    params = parameters_with(*random_grads(), None)
    twins = copy.deepcopy(params)
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    norm = torch.zeros(())
    assert ParameterList(params).clip_grads_(norm, max_norm) == len(params) - 1
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twins, max_norm))
    for param, twin in zip(params[:-1], twins, strict=False):
        torch.testing.assert_close(param.grad, twin.grad)


@pytest.mark.parametrize(("bad", "after"), [(math.nan, [math.nan] * 2), (math.inf, [0.0, math.nan])])
def test_clips_what_is_not_finite_as_torch_does(bad, after):
    params = parameters_with(torch.tensor([1.0, bad]))
    norm = torch.zeros(())
    ParameterList(params).clip_grads_(norm, 1.0)
    assert torch.equal(norm.nan_to_num(7.0), torch.tensor(bad).nan_to_num(7.0))
    assert torch.equal(params[0].grad.nan_to_num(7.0), torch.tensor(after).nan_to_num(7.0))


def test_only_float32_is_clipped_here():
    params = parameters_with(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert ParameterList(params).clip_grads_(torch.zeros(()), 0.1) is None
    assert params[0].grad.tolist() == [1.0, 1.0]


def test_parameters_that_torch_has_swapped_are_met_again():
    params = parameters_with(*(torch.full((2,), 4.0) for _ in range(3)))
    known = ParameterList(params)
    known.unscale_grads_(torch.zeros(()), torch.tensor(0.5))
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.full((2,), 8.0)
    torch.utils.swap_tensors(params[1], other)
    del other
    assert params[1].grad.tolist() == [8.0, 8.0]
    assert known.unscale_grads_(torch.zeros(()), torch.tensor(0.5)) == 3
    assert [param.grad[0].item() for param in params] == [1.0, 4.0, 1.0]


def test_parameters_are_not_held_by_the_kernel():
    param = nn.Parameter(torch.zeros(2))
    held = param._use_count()
    known = ParameterList([param])
    known.unscale_grads_(torch.zeros(()), torch.tensor(0.5))
    assert param._use_count() == held
    del known
    gc.collect()
    assert param._use_count() == held


def test_an_empty_list_and_other_devices_are_not_for_the_kernel():
    assert ParameterList([]).unscale_grads_(torch.zeros(()), torch.tensor(0.5)) is None
    assert ParameterList([nn.Parameter(torch.zeros(2, device="meta"))]).clip_grads_(torch.zeros(()), 1.0) is None
    assert kernels.report().status == "built"


@pytest.mark.parametrize("scalar", [torch.tensor(0.5, dtype=torch.float64), torch.ones(2)])
def test_scalars_of_another_kind_are_not_for_the_kernel(scalar):
    known = ParameterList(parameters_with(torch.ones(2)))
    assert known.unscale_grads_(torch.zeros(()), scalar) is None
    assert known.unscale_grads_(scalar, torch.tensor(0.5)) is None
    assert known.clip_grads_(scalar, 1.0) is None


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, float("nan")])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused(max_norm):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="expected a number > 0"):
        ParameterList([weight]).clip_grads_(torch.zeros(()), max_norm)
    assert torch.equal(weight.grad, torch.ones(2))
