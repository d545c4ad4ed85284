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


class Preconditioner:
    def __init__(self, weight):
        self.factor, self.steps = torch.ones_like(weight), [0]

    def of(self, gradient):
        self.factor.mul_(0.9).add_(gradient.square())
        self.steps[0] += 1
        return gradient / (self.factor.sqrt() * self.steps[0])


class Preconditioned(torch.optim.SGD):
    """Keeps an object for each weight in its state, as Shampoo does."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            own = self.state[weight].setdefault("preconditioner", Preconditioner(weight))
            weight.sub_(0.01 * own.of(weight.grad))


def test_an_object_in_the_state_of_an_optimizer_is_as_it_was():
    found = []
    for examined in (False, True):
        loop = Loop()
        optimizer = Preconditioned(loop.model.parameters(), lr=0.1)

        def step(loop=loop, optimizer=optimizer):
            loop.backward()
            optimizer.step()

        for number in range(4):
            if examined and number == 2:
                amplab.doctor(loop.model, train_step=step, optimizer=optimizer)
            step()
        found.append(loop.model.weight.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("base", [torch.amp.GradScaler, amplab.GradScaler])
def test_what_a_class_of_scalers_adds_is_as_it_was(base):
    class Noted(base):
        """Notes the scales, and averages them in a tensor."""

        def __init__(self):
            super().__init__("cpu", init_scale=8.0)
            self.scales, self.average, self.calls = [], torch.zeros(()), 0

        def update(self, new_scale=None):
            super().update(new_scale)
            self.scales.append(self.get_scale())
            self.average.mul_(0.9).add_(self.scales[-1])
            self.calls += 1

    loop, scaler = Loop(), Noted()

    def step():
        loop.optimizer.zero_grad()
        scaler.scale(F.mse_loss(loop.model(loop.x), loop.y)).backward()
        scaler.step(loop.optimizer)
        scaler.update()

    step()
    amplab.doctor(loop.model, train_step=step, optimizer=loop.optimizer, scaler=scaler)
    assert (scaler.scales, float(scaler.average), scaler.calls) == ([8.0], 8.0, 1)
