"""Clipping by the norm of everything that an optimizer steps with, in flat buffers and without."""

import math

import pytest
import torch

from amplab.amp import Session


def prepared(problem, level, *, combine=True, loss_scale=128.0):
    model, session = problem.model(), Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level=level, verbosity=0, combine_grad=combine, loss_scale=loss_scale)
    return session, model, optimizer


def backward(problem, session, model, optimizer, step=1):
    with session.casting(), session.scale_loss(problem.loss(model, step), optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_clipping_by_the_flat_norm(problem, level, norm_type, max_norm):
    clipped = []
    for combine in (True, False):
        session, model, optimizer = prepared(problem, level, combine=combine)
        for step in range(1, 3):
            optimizer.zero_grad()
            backward(problem, session, model, optimizer, step)
        grads = [param.grad.double() for param in session.master_params(optimizer)]
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), norm_type)
        returned = session.clip_grad_norm_(optimizer, max_norm, norm_type)
        tolerance = 2e-3 if level == "O3" else 1e-6
        assert torch.isclose(returned.double(), norm, rtol=tolerance)
        factor = min(1.0, max_norm / (norm.item() + 1e-6))
        after = [param.grad for param in session.master_params(optimizer)]
        for now, before in zip(after, grads, strict=True):
            assert torch.allclose(now.double(), before * factor, rtol=4 * tolerance, atol=1e-7)
        assert bool(session.combined_grads(optimizer)) is combine
        clipped.append(after)
    assert max_norm < 1 or all(map(torch.equal, *clipped))


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_clipping_what_overflowed_leaves_the_padding_zero(problem, poison):
    session, model, optimizer = prepared(problem, "O1", loss_scale="dynamic")
    backward(problem, session, model, optimizer)
    model[-1].bias.grad[0] = poison
    norm = session.clip_grad_norm_(optimizer, 1.0)
    assert norm.isnan() if math.isnan(poison) else norm.isinf()
    assert model[-1].weight.grad.isnan().all() == math.isnan(poison)
    optimizer.zero_grad()
    backward(problem, session, model, optimizer, 2)
    assert session.combined_grads(optimizer)[0].isfinite().all()
    assert session.clip_grad_norm_(optimizer, 1.0).isfinite()


def test_clipping_is_refused_where_it_makes_no_sense(problem):
    session, model, optimizer = prepared(problem, "O1")
    for numbers, message in (
        ((0.0,), "max_norm=0.0: expected a number > 0"),
        ((1.0, -1.0), "norm_type=-1.0: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            session.clip_grad_norm_(optimizer, *numbers)
    with session.scale_loss(problem.loss(model, 1), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match=r"^Gradients are still scaled by 128.0, after delay_unscale=True"):
        session.clip_grad_norm_(optimizer, 1.0)
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="was not part of"):
        session.combined_grads(stranger)
