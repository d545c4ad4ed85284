"""GradScaler(combine_grad=True) beside the one without: clipping, shared parameters, copies, what is refused.

Training by it, step for step, is in ``test_combined_gradients.py``.
"""

import pickle

import pytest
import torch
from torch import nn

from amplab import GradScaler


def prepared(problem):
    model = problem.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_torch_face_clips_by_the_flat_norm(problem):
    model, optimizer = prepared(problem)
    scaler = GradScaler("cpu", init_scale=128.0, combine_grad=True)
    plain = GradScaler("cpu", init_scale=128.0)
    for step in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(problem.loss(model, step)).backward()
        norm = scaler.unscale_and_clip_(optimizer, 0.5)
        mine = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        optimizer.zero_grad()
        plain.scale(problem.loss(model, step)).backward()
        assert torch.isclose(norm, plain.unscale_and_clip_(optimizer, 0.5), rtol=1e-6)
        for grad, param in zip(mine, model.parameters(), strict=True):
            assert grad is param.grad or torch.allclose(grad, param.grad, rtol=1e-5, atol=1e-9)
        scaler.update()
        plain.update()


def test_a_scale_of_zero_does_not_stay_in_the_buffers(problem):
    model, optimizer = prepared(problem)
    scaler = GradScaler("cpu", init_scale=128.0, floor=None, combine_grad=True)
    weights = [param.detach().clone() for param in model.parameters()]
    for scale in (128.0, 0.0, 128.0):
        scaler.scale(torch.zeros(()))
        scaler._scale.fill_(scale)  # update(0.0) is refused
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(problem.loss(model, 1)).backward()
        scaler.step(optimizer)
        assert scaler.last_step.stepped is (scale > 0)
        scaler.update()
        assert all(map(torch.equal, model.parameters(), weights)) is (scale == 0)
        weights = [param.detach().clone() for param in model.parameters()]


def test_a_parameter_of_two_optimizers_is_unscaled_once():
    def train(combine):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizers = [torch.optim.SGD([model.weight, model.bias], lr=0.1), torch.optim.SGD([model.weight], lr=0.1)]
        scaler = GradScaler("cpu", init_scale=256.0, combine_grad=combine)
        for step in range(5):
            scaler.scale(model(torch.full((2, 4), step + 1.0)).square().sum() * 1e-3).backward()
            order = optimizers if step % 2 else optimizers[::-1]
            for optimizer in order:
                scaler.unscale_(optimizer)
            for optimizer in order:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step != 2)
        return list(model.parameters())

    assert all(map(torch.equal, train(True), train(False)))


def test_a_copied_scaler_goes_on_combining(problem):
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", combine_grad=True)))
    model, optimizer = prepared(problem)
    scaler.scale(problem.loss(model, 1)).backward()
    scaler.unscale_(optimizer)
    assert len({param.grad.untyped_storage().data_ptr() for param in model.parameters()}) == 1
    with pytest.raises(TypeError, match="combine_grad=3: expected True or False"):
        GradScaler("cpu", combine_grad=3)


def test_half_gradients_are_refused_as_without_buffers(problem):
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0, combine_grad=True)
    for _ in range(2):
        scaler.scale(param.sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)
