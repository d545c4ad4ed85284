"""Training that the tests of the fused optimizers share: a small model, gradients from a seed, and how far two are."""

import pytest
import torch
from torch import nn


@pytest.fixture(params=["reference", "kernel"])
def serving(request, monkeypatch):
    """Let the pure-torch reference serve, or the kernels."""
    if request.param == "kernel":
        request.getfixturevalue("built")
        return
    from amplab.kernels import steps

    monkeypatch.setattr(steps, "_ADAM_OP", steps.multi_tensor_adam__reference)
    monkeypatch.setattr(steps, "_SGD_OP", steps.multi_tensor_sgd__reference)


@pytest.fixture
def model_of():
    """A function that makes a model with weights of several shapes, the same for a seed."""

    def make(dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(7, 19), nn.LayerNorm(19), nn.Linear(19, 3)).to(dtype)

    return make


@pytest.fixture
def train():
    """A function that steps on random gradients, those of the steps in ``spoil`` with an inf, scaled for a scaler."""

    def run(optimizer, params, steps, *, seed=1, spoil=(), scaler=None, factor=1.0, schedule=None):
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            scale = 1.0
            if scaler is not None:
                scaler.scale(torch.zeros(()))
                scale = scaler.get_scale()
            for param in params:
                param.grad = (torch.randn(param.shape, generator=generator) * factor * scale).to(param.dtype)
            if step in spoil:
                params[-1].grad.view(-1)[0] = float("inf")
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if schedule is not None:
                schedule.step()

    return run


@pytest.fixture
def gap():
    """A function of two lists of tensors: the largest difference, relative to the largest element of each."""

    def largest(mine, theirs):
        pairs = zip(mine, theirs, strict=True)
        return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in pairs)

    return largest


@pytest.fixture
def by_hand():
    """A function that steps float64 copies by ``rule(t, grads, params, states)``, on the gradients of `train`."""

    def run(params, rule, steps=50, seed=1):
        generator = torch.Generator().manual_seed(seed)
        exact = [param.detach().double() for param in params]
        states = [{} for _ in exact]
        for t in range(1, steps + 1):
            rule(t, [torch.randn(param.shape, generator=generator).double() for param in exact], exact, states)
        return exact

    return run


@pytest.fixture
def check(model_of, train, gap, by_hand):
    """A function that holds fifty steps of an optimizer against a rule written out in float64."""

    def hold(make, rule, limit=1e-5):
        model = model_of()
        exact = by_hand(model.parameters(), rule)
        train(make(model.parameters()), list(model.parameters()), 50)
        assert gap(model.parameters(), exact) < limit
        assert gap(model.parameters(), model_of().parameters()) > 1e-3

    return hold
