"""LARC against its formula written out, and under every opt_level."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amplab import amp
from amplab.optimizers import LARC


@pytest.fixture(autouse=True)
def no_session_stays():
    yield
    amp.reset()


def by_hand(weight, grad, *, lr, trust, clip, decay, eps=1e-8):
    rate = trust * weight.norm() / (grad.norm() + decay * weight.norm() + eps)
    rate = min(rate / lr, 1.0) if clip else rate
    return weight - lr * rate * (grad + decay * weight)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1e-4, 10.0])
def test_one_step_is_the_formula(clip, decay, scale):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6).double())
    grad = torch.randn(6).double() * scale
    optimizer = LARC(torch.optim.SGD([weight], lr=0.1, weight_decay=decay), trust_coefficient=0.02, clip=clip)
    wanted = by_hand(weight.detach(), grad, lr=0.1, trust=0.02, clip=clip, decay=decay)
    weight.grad = grad.clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-6, atol=1e-9)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_a_weight_of_zeros_steps_as_without_it():
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    LARC(torch.optim.SGD([weight], lr=0.5, weight_decay=0.1)).step()
    assert weight.tolist() == [-0.5] * 3


def test_groups_state_and_schedulers_are_the_inner_optimizers():
    weight = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    optimizer = LARC(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.state is inner.state
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.zero_grad()
    assert weight.grad is None
    other = LARC(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == pytest.approx(0.05)
    assert pickle.loads(pickle.dumps(other)).param_groups[0]["lr"] == pytest.approx(0.05)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


class Counting(torch.optim.SGD):
    """Counts its steps in a group, as timm's Lamb does for its bias correction."""

    def step(self, closure=None):
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_skipped_step_is_none_of_the_inner_optimizer(level):
    model = nn.Linear(4, 2)
    optimizer = LARC(Counting(model.parameters(), lr=0.1, weight_decay=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for factor in (float("inf"), 0.1, float("inf"), 0.1):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 4)).float().sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_trains_under_amp_and_skips_an_overflow(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), trust_coefficient=0.1, clip=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    inputs, labels = torch.randn(64, 8), torch.randint(2, (64,))
    losses = []
    for step in range(20):
        loss = F.cross_entropy(model(inputs), labels)
        before = [param.clone() for param in amp.master_params(optimizer)]
        with amp.scale_loss(loss * (float("inf") if step == 10 else 1.0), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        unchanged = all(map(torch.equal, before, amp.master_params(optimizer)))
        assert unchanged == (step == 10)
        assert amp.last_step(optimizer).stepped == (step != 10)
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
