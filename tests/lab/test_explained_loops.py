"""A loop whose skipped steps run again for their reason computes what it computes without a watch."""

import copy
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amplab
from amplab.lab import watch

CALLS = 0
SEEN = deque(maxlen=5)


class Normed(nn.Module):
    """Divides by an average of its outputs, in a tensor that is no buffer, and counts its calls in a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.average, self.calls = nn.Linear(8, 1), torch.ones(1), {"number": 0}

    def forward(self, x):
        y = self.linear(x).float()
        self.calls["number"] += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.abs().mean() * 0.1)
        return y / self.average


class Annealed:
    """A loss whose weight grows with its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs):
        self.calls += 1
        return outputs.square().mean() * min(1, self.calls / 60)


def plain(model):
    return lambda x: model(x).float().square().mean()


def annealed(model):
    loss = Annealed()
    return lambda x: loss(model(x))


def counted(model):
    calls = [0]

    def step(x):
        calls[0] += 1
        return model(x).float().square().mean() / calls[0]

    return step


def counted_in_a_global(model):
    global CALLS  # noqa: PLW0603 - as in a notebook
    CALLS = 0
    SEEN.clear()

    def step(x):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        SEEN.append(float(x.sum()))
        return model(x).float().square().mean() / CALLS + sum(SEEN)

    return step


def followed_by_a_teacher(model):
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(x):
        teacher.update_parameters(model)
        return (model(x) - teacher(x).detach() + 1).float().square().mean()

    return step


def noisy(model):
    generator = np.random.default_rng(0)
    return lambda x: (model(x) + generator.normal()).float().square().mean()


class Trainer:
    def __init__(self, model):
        self.model, self.average = model, torch.zeros(())

    def loss_of(self, x):
        loss = self.model(x).float().square().mean()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / (1 + self.average)


class Unwatched:
    batches, loss, failures = staticmethod(iter), staticmethod(lambda loss: loss), ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def trained(make_model, make_step, scaler_type, watched):
    torch.manual_seed(0)
    model = make_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_type("cpu", init_scale=2.0**24)
    loss_of = make_step(model)

    def step(x):
        with torch.autocast("cpu", torch.float16):
            return loss_of(x)

    batches = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(1))
    with watch(model, optimizer, scaler=scaler, step=step) if watched else Unwatched() as w:
        for x in w.batches(batches):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.failures == ()
    if watched:
        assert w.history.explanations
    return copy.deepcopy(list(model.parameters()))


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize(
    ("make_model", "make_step"),
    [
        (Normed, plain),
        (lambda: nn.Linear(8, 1), annealed),
        (lambda: nn.Linear(8, 1), counted),
        (lambda: nn.Linear(8, 1), counted_in_a_global),
        (lambda: nn.Linear(8, 1), followed_by_a_teacher),
        (lambda: nn.Linear(8, 1), noisy),
        (lambda: nn.Linear(8, 1), lambda model: Trainer(model).loss_of),
    ],
)
def test_weights_are_those_of_the_loop_without_a_watch(make_model, make_step, scaler_type):
    unwatched, watched = (trained(make_model, make_step, scaler_type, each) for each in (False, True))
    assert all(map(torch.equal, unwatched, watched))


def test_what_is_too_large_to_restore_is_told():
    model = nn.Linear(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0**24)
    seen = torch.zeros(2**24 + 1)

    def step(x):
        seen[0] += 1
        return model(x).square().mean() * (float("inf") if seen[0] == 1 else 1)

    warns = pytest.warns(RuntimeWarning, match="keeps more than is restored")
    with warns, watch(model, optimizer, scaler=scaler, step=step) as w:
        for x in w.batches(torch.randn(2, 4, 8)):
            optimizer.zero_grad()
            scaler.scale(w.loss(step(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(w.failures) == 1
