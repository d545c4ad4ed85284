"""A step that calls its closure several times, as LBFGS does, uses the gradients of each call: none is lost."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.lab import watch

X, Y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0)).split((1, 1))
X, Y = X[0], Y[0, :, :1]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)


def closure_of(model, optimizer, x=X, y=Y, *, parts=1, clear=None):
    """A closure of as many backwards as parts; `clear` is called before each one, and zero_grad before the first."""

    def closure():
        optimizer.zero_grad()
        losses = []
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            if clear is not None:
                clear()
            losses.append(F.mse_loss(model(inputs), targets) / parts)
            losses[-1].backward()
        return sum(losses)

    return closure


def found_in(train, model, optimizers):
    """The names of what the doctor finds in a loop, whose loss falls if it is right."""
    found = [each.name for each in amplab.doctor(model, train_step=train, optimizer=optimizers)]
    before = F.mse_loss(model(X), Y).item()
    train()
    assert found or F.mse_loss(model(X), Y).item() < before
    return found


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 4])
def test_several_steps_of_lbfgs_are_right(steps, parts):
    model = network()
    optimizer = lbfgs(model)

    def train():
        for _ in range(steps):
            optimizer.step(closure_of(model, optimizer, parts=parts))

    assert found_in(train, model, optimizer) == []


@pytest.mark.parametrize("steps", [1, 3])
def test_a_closure_that_clears_the_gradients_before_each_part_is_found(steps):
    model = network()
    optimizer = lbfgs(model)

    def train():
        for _ in range(steps):
            optimizer.step(closure_of(model, optimizer, parts=4, clear=optimizer.zero_grad))

    assert found_in(train, model, optimizer) == ["zero-grad-in-accumulation"]


def test_another_optimizer_may_drop_what_the_closures_have_left_in_its_parameters():
    model = network()
    first, second = lbfgs(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.01)

    def train():
        for _ in range(2):
            first.step(closure_of(model, first, clear=model.zero_grad))
            second.zero_grad()
            F.mse_loss(model(X), Y).backward()
            second.step()

    assert found_in(train, model, [first, second]) == []


def test_a_loop_without_closures_that_clears_in_between_is_found_after_a_step_of_lbfgs():
    model = network()
    first, second = lbfgs(model), torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        first.step(closure_of(model, first))
        for inputs, targets in zip(X.chunk(4), Y.chunk(4), strict=True):
            second.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
        second.step()

    assert "zero-grad-in-accumulation" in found_in(train, model, [first, second])


def test_a_watched_loop_with_three_steps_of_a_batch_has_no_finding():
    model = network()
    optimizer = lbfgs(model)
    with watch(model, optimizer) as w:
        for x, y in w.batches([(X, Y)] * 2):
            for _ in range(3):
                closure = closure_of(model, optimizer, x, y)
                optimizer.step(lambda: w.loss(closure()))  # noqa: B023  called in this iteration
    assert len(w.history) == 6
    assert [each.name for each in w.findings()] == []
