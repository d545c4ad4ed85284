"""apex's fused optimizers are torch's, bitwise, with apex's defaults and refusals."""

import pytest
import torch
from torch import nn

from amplab import optimizers
from amplab.optimizers import FusedAdam, FusedSGD


def stepped(make, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model.weight.detach()


def test_adam_is_adamw_without_decay():
    own = stepped(lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0))
    assert torch.equal(stepped(FusedAdam), own)
    decayed = stepped(lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3))
    assert torch.equal(stepped(lambda params: FusedAdam(params, 0.1, True, (0.8, 0.9), weight_decay=0.3)), decayed)


def test_sgd_is_sgd():
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    own = stepped(lambda params: torch.optim.SGD(params, **settings))
    assert torch.equal(stepped(lambda params: FusedSGD(params, materialize_master_grads=False, **settings)), own)


def test_what_zero_grad_leaves():
    for make, left in ((FusedAdam, None), (lambda params: FusedSGD(params, lr=0.1), 0.0)):
        weight = nn.Parameter(torch.ones(1))
        optimizer = make([weight])
        weight.grad = torch.ones(1)
        optimizer.zero_grad()
        assert (weight.grad if left is None else weight.grad.item()) == left
        optimizer.zero_grad(set_to_none=True)
        assert weight.grad is None


@pytest.mark.parametrize("name", ["amsgrad", "master_weights"])
def test_adam_refuses_what_it_lacks(name):
    with pytest.raises(RuntimeError, match="FusedAdam"):
        FusedAdam([nn.Parameter(torch.ones(1))], **{name: True})


@pytest.mark.parametrize("name", ["bias_correction", "adam_w_mode"])
def test_adam_refuses_to_do_without(name):
    with pytest.raises(RuntimeError, match=name):
        FusedAdam([nn.Parameter(torch.ones(1))], **{name: False})


def test_other_refusals():
    with pytest.raises(RuntimeError, match="wd_after_momentum"):
        FusedSGD([nn.Parameter(torch.ones(1))], lr=0.1, wd_after_momentum=True)
    with pytest.raises(RuntimeError, match=r"scale.*amp\.scale_loss"):
        FusedAdam([nn.Parameter(torch.ones(1))]).step(scale=128.0)


def test_the_rest_of_apex_is_refused_with_what_to_use():
    with pytest.raises(ImportError, match="no FusedLAMB; there are LARC, FusedAdam, FusedSGD"):
        from amplab.optimizers import FusedLAMB  # noqa: F401
    with pytest.raises(AttributeError, match="FusedNothing"):
        optimizers.FusedNothing  # noqa: B018
