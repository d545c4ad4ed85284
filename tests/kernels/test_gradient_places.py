"""Gradients brought into a flat tensor by the kernels: the bits of `unscale_copy`; a refusal changes nothing."""

import gc
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from amplab.kernels import Whereabouts, unscale_copy
from amplab.scalers.flat_buffer import FlatBuffer

pytestmark = pytest.mark.usefixtures("built")

KEPT, NEW, MISSING = Whereabouts.KEPT, Whereabouts.NEW, Whereabouts.MISSING
SHAPES = [(3, 5), (1,), (2, 3, 4, 4), (100,), (17, 1)]


def flat_buffer(dtype=torch.float32):
    """Return a buffer whose gradients are all new, and copies of these gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    params[2].grad = params[2].grad.contiguous(memory_format=torch.channels_last)
    return FlatBuffer(params), [param.grad.clone() for param in params]


def bring_in(buffer, factor=0.375, *, moves=True):
    found_inf = torch.zeros(())
    seen = buffer.bring_in_(found_inf, torch.tensor(factor), moves=moves)
    return seen, found_inf.item()


def expected(values, factor):
    outputs = [torch.empty_like(value) for value in values]
    unscale_copy(values, outputs, torch.zeros(()), torch.tensor(factor))
    return outputs


def are(buffer, values):
    return all(torch.equal(param.grad, value) for param, value in zip(buffer.params, values, strict=True))


def in_places(buffer):
    return [param.grad.data_ptr() for param in buffer.params] == [view.data_ptr() for view in buffer.views]


def padding(buffer):
    flat = buffer.tensor.clone()
    start = buffer.tensor.storage_offset()
    for view in buffer.views:
        flat[view.storage_offset() - start : view.storage_offset() - start + view.numel()] = 0
    return flat


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_new_gradients_are_unscaled_into_their_places_and_then_stay(dtype):
    buffer, values = flat_buffer(dtype)
    assert bring_in(buffer) == (NEW, 0.0)
    assert in_places(buffer)
    once = expected(values, 0.375)
    assert are(buffer, once)
    assert buffer.params[2].grad.is_contiguous(memory_format=torch.channels_last)
    assert bring_in(buffer) == (KEPT, 0.0)
    assert are(buffer, expected(once, 0.375))
    assert padding(buffer).count_nonzero() == 0


def test_some_kept_some_new_some_missing():
    buffer, values = flat_buffer()
    bring_in(buffer, 1.0)
    buffer.params[0].grad = values[0].clone()
    buffer.params[3].grad = None
    assert buffer.find() == KEPT | NEW | MISSING
    assert bring_in(buffer, 0.5) == (KEPT | NEW | MISSING, 0.0)
    assert buffer.params[3].grad is None
    buffer.params[3].grad = values[3] * 0.5
    assert are(buffer, expected(values, 0.5))


def test_new_gradients_that_are_not_to_move_stay_as_they_are():
    buffer, values = flat_buffer()
    assert bring_in(buffer, moves=False) == (NEW, 0.0)
    assert are(buffer, values)
    assert not in_places(buffer)
    bring_in(buffer, 1.0)
    assert bring_in(buffer, 0.5, moves=False) == (KEPT, 0.0)
    assert are(buffer, expected(values, 0.5))


@pytest.mark.parametrize("index", [0, len(SHAPES) - 1])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_finite_is_found(index, bad, kept):
    buffer, _ = flat_buffer()
    if kept:
        bring_in(buffer, 1.0)
    buffer.params[index].grad.view(-1)[-1] = bad
    assert bring_in(buffer)[1] == 1.0
    assert not buffer.params[index].grad.isfinite().all()
    assert padding(buffer).count_nonzero() == 0


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_factor_that_is_not_finite_leaves_the_padding_zero(factor):
    buffer, _ = flat_buffer()
    bring_in(buffer, 1.0)
    assert bring_in(buffer, factor) == (KEPT, 1.0)
    assert padding(buffer).count_nonzero() == 0


def convert(buffer):
    buffer.params[1].data = buffer.params[1].data.double()
    buffer.params[1].grad = torch.ones(1, dtype=torch.float64)


def make_sparse(buffer):
    buffer.params[0].grad = torch.ones(3, 5).to_sparse()


def transpose(buffer):
    buffer.params[0].grad = torch.ones(5, 3).t()


def keep_graph(buffer):
    buffer.params[0].grad = torch.ones(3, 5).requires_grad_() * 2


def exchange(buffer):
    buffer.params[0].grad = buffer.views[3][:15].view(3, 5)


def replace_data(buffer):
    """The tensor that would become the gradient has other memory."""
    bring_in(buffer, 1.0)
    buffer.params[0].grad.data = torch.ones(3, 5)
    buffer.params[0].grad = torch.ones(3, 5)


@pytest.mark.parametrize("spoil", [convert, make_sparse, transpose, keep_graph, exchange, replace_data])
def test_what_does_not_fit_is_refused_before_anything_is_written(spoil):
    buffer, _ = flat_buffer()
    spoil(buffer)
    before = [param.grad.to_dense().detach().clone() for param in buffer.params]
    assert buffer.find() is None
    assert bring_in(buffer) == (None, 0.0)
    assert are_dense(buffer, before)


def are_dense(buffer, values):
    return all(torch.equal(param.grad.to_dense(), value) for param, value in zip(buffer.params, values, strict=True))


def test_a_part_is_the_same_object_at_each_step():
    buffer, values = flat_buffer()
    for _ in range(3):
        for param, value in zip(buffer.params, values, strict=True):
            param.grad = value.clone()
        bring_in(buffer)
        assert all(param.grad is buffer.lent(index) for index, param in enumerate(buffer.params))


def test_swapped_parameters_are_found_again():
    buffer, values = flat_buffer()
    bring_in(buffer, 1.0)
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.full((1,), 8.0)
    torch.utils.swap_tensors(buffer.params[1], other)
    assert bring_in(buffer, 0.5) == (KEPT | NEW, 0.0)
    assert buffer.params[1].grad.item() == 4.0
    assert torch.equal(buffer.params[0].grad, values[0] * 0.5)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_as_one_tensor(max_norm):
    buffer, values = flat_buffer()
    norm = torch.zeros(())
    assert not buffer.clip_(norm, max_norm)  # not in their places yet
    bring_in(buffer, 1.0)
    assert buffer.clip_(norm, max_norm)
    params = [nn.Parameter(value) for value in values]
    for param, value in zip(params, values, strict=True):
        param.grad = value.clone()
    theirs = nn.utils.clip_grad_norm_(params, max_norm)
    torch.testing.assert_close(norm, theirs)
    for mine, param in zip(buffer.params, params, strict=True):
        torch.testing.assert_close(mine.grad, param.grad)
    assert padding(buffer).count_nonzero() == 0


def test_a_norm_of_nan_is_left_to_the_caller():
    buffer, _ = flat_buffer()
    bring_in(buffer, 1.0)
    buffer.params[0].grad[0, 0] = math.nan
    before = [param.grad.clone() for param in buffer.params[1:]]
    assert not buffer.clip_(torch.zeros(()), 1.0)
    assert all(torch.equal(param.grad, value) for param, value in zip(buffer.params[1:], before, strict=True))
    assert not flat_buffer(torch.float16)[0].clip_(torch.zeros(()), 1.0)


def test_places_that_are_collected_while_a_compiler_has_its_mode_on_are_deleted():
    """An error in a finalizer is written to stderr, and pytest makes it one of the test."""
    buffer, _ = flat_buffer()
    bring_in(buffer, 1.0)
    with in_kernel_invocation_manager(FakeTensorMode()):
        del buffer
        gc.collect()
