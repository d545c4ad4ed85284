"""An optimizer of one's own whose `step` calls `super().step()`: torch runs the hooks in both, and it is one step."""

from functools import partial

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import watch

SCALINGS = ["none", "torch", "amplab", "apex"]
BAD = 3


class Counting(torch.optim.SGD):
    """Does what SGD does."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Twice(Counting):
    """A subclass of a subclass, which gives the closure by name."""

    def step(self, closure=None):
        return super().step(closure=closure)


@pytest.fixture(autouse=True)
def _hooked():
    """Let torch put its hooks around the step of every class, as it does when the first object of it is made."""
    for kind in (torch.optim.SGD, Counting, Twice):
        kind([torch.zeros(1)], lr=0.1)
    yield
    amp.reset()


def network(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, kind(model.parameters(), lr=0.05)


def batches():
    """Of other sizes, so that each step has another loss and other gradients; one overflows."""
    factors = torch.full((6, 1, 1), 0.5).cumprod(0)
    factors[BAD] = 1e30
    return list(factors * torch.ones(6, 2, 4))


def trained(kind, scaling, log=None):
    """Watch a loop; return its records, the weights and the steps whose gradients were looked at."""
    model, optimizer = network(kind)
    scaler = {"torch": torch.amp.GradScaler, "amplab": amplab.GradScaler}.get(scaling)
    scaler = scaler and scaler("cpu", init_scale=1024.0)
    if scaling == "apex":
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    with watch(model, optimizer, scaler=amp if scaling == "apex" else scaler, every=1) as w:
        for x in w.batches(batches()):
            optimizer.zero_grad()
            loss = w.loss(model(x).square().mean() * (x.mean() if x.mean() > 1e3 else 1.0))
            stepped(loss, optimizer, scaling, scaler)
    assert w.failures == ()
    records = [
        (each.step, each.loss, each.loss_scale, each.skipped, each.grad_exponent) for each in w.history.records()
    ]
    return records, [each.detach().clone() for each in model.parameters()], w.history.gradient_samples


def stepped(loss, optimizer, scaling, scaler):
    if scaling == "apex":
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    elif scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", [Counting, Twice])
def test_a_step_is_recorded_and_looked_at_once(kind, scaling):
    expected, weights, samples = trained(torch.optim.SGD, scaling)
    amp.reset()
    records, own_weights, own_samples = trained(kind, scaling)
    assert len(expected) == 6
    assert list(map(repr, records)) == list(map(repr, expected))
    torch.testing.assert_close(own_weights, weights, rtol=0, atol=0, equal_nan=True)
    assert repr(own_samples) == repr(samples)
    assert any(skipped for *_, skipped, _ in expected) == (scaling != "none")


def test_a_closure_is_run_and_measured_once():
    def watched(kind):
        model, optimizer = network(kind)
        losses = []

        def closure(x):
            optimizer.zero_grad()
            losses.append(w.loss(model(x).square().mean()))
            losses[-1].backward()
            return losses[-1]

        with watch(model, optimizer, every=1) as w:
            for x in w.batches(batches()[:3]):
                optimizer.step(partial(closure, x))
        return [(each.loss, each.grad_exponent) for each in w.history.records()], torch.stack(losses).tolist()

    records, losses = watched(Twice)
    assert (records, losses) == watched(torch.optim.SGD)
    assert [loss for loss, _ in records] == losses


class Around(torch.optim.Optimizer):
    """Steps another optimizer, of the same parameters or of others, within its own step."""

    def __init__(self, inner, params=()):
        self.inner = inner
        super().__init__([*params] or inner.param_groups[0]["params"], {"lr": 0.05})

    def step(self, closure=None):
        loss = self.inner.step(closure)
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_an_optimizer_that_is_stepped_by_another_one_has_its_own_steps(first):
    model, inner = network(Counting)
    outer = Around(inner)
    optimizers = [inner, outer] if first == "inner" else [outer, inner]
    with watch(model, optimizers) as w:
        for x in w.batches(batches()[:3]):
            outer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            outer.step()
        for x in w.batches(batches()[4:] * 4):
            inner.zero_grad()
            w.loss(model(x).square().mean()).backward()
            inner.step()
    assert len(w.history) == (11 if first == "inner" else 3)
    assert inner.count == 11


@pytest.mark.parametrize("kind", [torch.optim.SGD, Counting, Twice])
def test_the_doctor_judges_a_right_loop_as_that_of_sgd(kind):
    model, optimizer = network(kind)

    def train(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    found = amplab.doctor(model, batches()[0], train_step=train, optimizer=optimizer)
    assert [each.name for each in found] == []
    assert all(each.grad is None for each in model.parameters())


def test_a_step_that_has_raised_hides_no_later_one():
    class Raising(Counting):
        def step(self, closure=None):
            if self.count == 1:
                self.count += 1
                raise MemoryError
            return super().step(closure)

    model, optimizer = network(Raising)
    with watch(model, optimizer) as w:
        for x in batches():
            optimizer.zero_grad()
            w.loss(model(x).square().mean()).backward()
            if optimizer.count == 1:
                with pytest.raises(MemoryError):
                    optimizer.step()
            else:
                optimizer.step()
    assert len(w.history) == 5
