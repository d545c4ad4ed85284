"""New gradients move into the flat buffers when someone takes these as tensors; until then nothing is copied."""

import copy

import pytest
import torch
from torch import nn

from amplab import GradScaler, amp
from amplab.scalers import CombinedUnscaler, Unscaler


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (7,), (1,))]


def give(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 64.0


def combined(unscaler, params):
    memory = {buffer.untyped_storage().data_ptr() for buffer in unscaler.buffers}
    return [param.grad.untyped_storage().data_ptr() in memory for param in params]


def unscaled(unscaler, params, step):
    give(params, step)
    found_inf = unscaler.unscale_(params, 64.0)
    unscaler.settle(params)
    return found_inf.item()


def test_new_gradients_are_not_copied_before_the_buffers_are_taken():
    params = make_params()
    unscaler = CombinedUnscaler()
    theirs = make_params()
    for step in range(4):
        assert unscaled(unscaler, params, step) == unscaled(Unscaler(), theirs, step) == 0.0
        assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(params, theirs, strict=True))
        assert combined(unscaler, params) == [step == 0] * 3
    assert unscaler.buffers == ()  # they would hold no gradient
    tensors = unscaler.flat_grads(params).tensors
    assert [tensor.sum() for tensor in tensors] == [pytest.approx(sum(param.grad.sum() for param in theirs))]
    for step in range(4, 6):
        unscaled(unscaler, params, step), unscaled(Unscaler(), theirs, step)
        assert combined(unscaler, params) == [True] * 3
        assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(params, theirs, strict=True))


def test_gradients_that_are_kept_stay_in_the_buffer():
    params = make_params()
    unscaler = CombinedUnscaler()
    unscaled(unscaler, params, 0)
    for step in range(1, 4):
        values = make_params()
        give(values, step)
        for param, value in zip(params, values, strict=True):
            param.grad.copy_(value.grad)
        unscaler.unscale_(params, 64.0)
        unscaler.settle(params)
        assert combined(unscaler, params) == [True] * 3
        assert all(torch.equal(param.grad, value.grad / 64) for param, value in zip(params, values, strict=True))


def test_the_buffers_of_a_session_are_those_of_the_last_backward():
    torch.manual_seed(0)  # with other weights a gradient may overflow, and NaN equals nothing
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = amp.Session()
    session.initialize(model, optimizer, opt_level="O1", verbosity=0, combine_grad=True)
    for step in range(4):
        optimizer.zero_grad()
        with session.scale_loss(model(torch.full((2, 4), 1.0 + step)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if step >= 2:
            (buffer,) = session.combined_grads(optimizer)
            assert torch.equal(buffer.sum(), torch.cat([param.grad.flatten() for param in model.parameters()]).sum())
        optimizer.step()


def test_clipping_after_each_kind_of_backward():
    plain = make_params()
    params = copy.deepcopy(plain)
    scalers = [GradScaler("cpu", init_scale=64.0, combine_grad=combine) for combine in (False, True)]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (plain, params)]
    for step in range(8):
        norms = []
        for scaler, optimizer, each in zip(scalers, optimizers, (plain, params), strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = sum((param * (index + step + 1)).square().sum() for index, param in enumerate(each))
            scaler.scale(loss).backward()
            norms.append(scaler.unscale_and_clip_(optimizer, 1.0, 2.0 if step < 6 else torch.inf))
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(params, plain)
