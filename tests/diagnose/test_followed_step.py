"""A step followed while it runs: the same op is named as by running it again, and the loop is what it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.diagnose import first_nonfinite, followed_step


class Attention(nn.Module):
    """Logits without 1/sqrt(d)."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return (self.q(x) @ self.k(x).T).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf).softmax(-1) @ x


def make():
    torch.manual_seed(0)
    return Attention(), torch.randn(8, 16)


@pytest.mark.parametrize("face", ["torch", "amplab", "apex", "none"])
@pytest.mark.parametrize("loud", [1.0, 3000.0])
def test_it_names_what_a_replay_names(face, loud):
    model, x = make()
    x = x * loud
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    region = {"torch": torch.autocast, "amplab": amplab.autocast}.get(face)
    if face == "apex":
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=16.0)

    def loss_of():
        if region is None:
            return model(x).float().square().mean()
        with region("cpu", dtype=torch.float16):
            return model(x).float().square().mean()

    try:
        with followed_step(model, x) as step:
            loss = step.loss(loss_of())
            if face == "apex":
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                (loss * 16).backward()
        again = first_nonfinite(model, step=loss_of, loss_scale=16.0, batch=x)
    finally:
        amp.reset()
    assert (step.first is None) == (again is None) == (loud == 1.0 or face == "none")
    if again is not None:
        record = step.observed.trace.records[step.first.op]
        assert (record.op, record.phase) == (again.record.op, again.record.phase) == ("matmul", "forward")
        assert "it began at matmul" in str(step)
        assert "test_followed_step.py" in str(step)


def test_the_gradients_are_those_of_the_loop_alone():
    grads = []
    for follows in (False, True):
        model, x = make()
        if follows:
            with followed_step(model) as step:
                step.loss(F.mse_loss(model(x), x)).backward()
            assert "all finite" in str(step)
        else:
            F.mse_loss(model(x), x).backward()
        grads.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_step_is_judged_without_step_loss():
    """The tensor that backward is called on counts as the loss; gradients are judged if it is finite."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(2, 4)
    with followed_step(model, {"x": x}) as step:
        (model(x).sum() * 1e30 * 1e30).backward()
    assert step.first.result == "loss"
    model.zero_grad()
    infinite = torch.tensor(torch.inf)
    with followed_step(model, {"x": x}) as step:
        model(x).sum().backward(infinite)
    assert step.first.result.startswith("gradient of 1.")
    model.zero_grad()
    x[0, 0] = torch.nan
    with followed_step(model, {"x": x}) as step:
        step.loss(model(x).sum()).backward()
    assert (step.first.kind, step.first.value.name) == ("given", "batch['x']")
    assert "batch['x'] was not finite before the step" in str(step)


def test_what_the_block_raises_goes_on_and_nothing_stays():
    model, x = make()

    def loop():
        with followed_step(model):
            model(x)
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(TypeError, match="expected a torch"):
        followed_step(3)


def test_calls_out_of_order_are_refused():
    model = nn.Linear(2, 1)
    step = followed_step(model)
    with pytest.raises(RuntimeError, match="block has not ended"):
        str(step)
    with step:
        with pytest.raises(TypeError, match=r"loss\(3\)"):
            step.loss(3)
        step.loss(model(torch.ones(4, 2)).sum()).backward()
        with pytest.raises(RuntimeError, match="block has not ended"):
            _ = step.first
    assert step.first is None
    with pytest.raises(RuntimeError, match="followed already"), step:
        pass
    with followed_step(model) as empty:
        pass
    with pytest.raises(RuntimeError, match="no op ran"):
        str(empty)


def test_what_the_op_at_fault_wrote_is_counted():
    model = nn.Linear(2, 2)
    with followed_step(model) as step:
        step.loss((torch.tensor([3.0, 1e6, -1e6]).half().float() + model(torch.ones(1, 2)).sum()).sum())
    assert "read float32, 3 elements, |x| up to 1e+06 and wrote float16, 3 elements, |x| up to 3, 2 infs" in str(step)


def test_a_gradient_that_was_not_zeroed_is_named():
    model = nn.Linear(4, 4)
    model.weight.grad = torch.full((4, 4), torch.nan)
    with followed_step(model) as step:
        step.loss(model(torch.ones(2, 4)).sum()).backward()
    assert str(step).startswith("gradient of weight is not finite: weight.grad contained NaN before the step")
    assert "zero_grad" in str(step)


def test_a_gradient_may_be_zeroed_in_the_block():
    model = nn.Linear(4, 4)
    model.weight.grad = torch.full((4, 4), torch.nan)
    with followed_step(model) as step:
        model.zero_grad(set_to_none=False)
        step.loss(model(torch.ones(2, 4)).sum()).backward()
    assert step.first is None


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_followed_rnn_in_half_is_within_a_rounding(kind):
    torch.manual_seed(0)
    model, x = kind(6, 10, 2), torch.randn(7, 4, 6)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        alone = model(x)[0]
        with followed_step(model):
            followed = model(x)[0]
    finally:
        amp.reset()
    assert (alone.float() - followed.float()).abs().max() <= 2.0**-10
