"""A doctor leaves schedulers, scalers and optimizers of a training step as they were, wherever its code has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amplab


class Loop:
    """A model, its optimizer and a scheduler, which steps in different places."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y = nn.Linear(4, 2), torch.randn(6, 4), torch.randn(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def backward(self):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(self.x), self.y).backward()


LOOP: list[Loop] = []


def by_name(loop):
    def step():
        loop.backward()
        loop.optimizer.step()
        loop.scheduler.step()

    return step


def in_an_inner_function(loop):
    def step():
        def finish():
            loop.optimizer.step()
            loop.scheduler.step()

        loop.backward()
        finish()

    return step


class Called:
    def __call__(self):
        OfClass.one()


class OfClass:
    @classmethod
    def train(cls):
        cls.one()

    @staticmethod
    def one():
        by_name(LOOP[0])()


def in_a_hook(loop):
    loop.optimizer.register_step_post_hook(lambda *_: loop.scheduler.step())

    def step():
        loop.backward()
        loop.optimizer.step()

    return step


KINDS = {
    "by name": by_name,
    "inner": in_an_inner_function,
    "object": lambda _: Called(),
    "class": lambda _: OfClass.train,
    "hook": in_a_hook,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_doctor_leaves_schedulers_as_they_were(kind):
    found = []
    for examined in (False, True):
        loop, rates = Loop(), []
        LOOP[:] = [loop]
        step = KINDS[kind](loop)
        for number in range(4):
            if examined and number == 2:
                amplab.doctor(loop.model, train_step=step, optimizer=loop.optimizer)
            rates.append(loop.optimizer.param_groups[0]["lr"])
            step()
        found.append((rates, loop.scheduler.last_epoch, loop.model.weight.tolist()))
    assert found[0] == found[1]
    assert found[0][0] == [0.1, 0.05, 0.025, 0.0125]


def test_a_scaler_that_an_inner_function_names_is_as_it_was():
    loop, scaler = Loop(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step():
        def finish():
            scaler.scale(F.mse_loss(loop.model(loop.x), loop.y)).backward()
            scaler.step(loop.optimizer)
            scaler.update()

        loop.optimizer.zero_grad()
        finish()

    amplab.doctor(loop.model, train_step=step, optimizer=loop.optimizer)
    assert scaler.get_scale() == 8.0


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, which has its own state, and keeps slow weights in a list."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.calls, self.param_groups = base, 0, base.param_groups
        self.slow = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.calls += 1
        for group, weights in zip(self.param_groups, self.slow, strict=True):
            for weight, slow in zip(group["params"], weights, strict=True):
                slow.add_(0.5 * (weight - slow))
                weight.copy_(slow)


def test_an_optimizer_around_another_one_is_as_it_was():
    found = []
    for examined in (False, True):
        loop = Loop()
        optimizer = Lookahead(torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9))

        def step(loop=loop, optimizer=optimizer):
            loop.backward()
            optimizer.step()

        for number in range(4):
            if examined and number == 2:
                amplab.doctor(loop.model, train_step=step, optimizer=optimizer)
            step()
        found.append((loop.model.weight.tolist(), optimizer.slow[0][0].tolist(), optimizer.calls))
    assert found[0] == found[1]
