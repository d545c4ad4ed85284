"""Blocks of scale_loss inside one another: refused for the same parameters, right for others, whatever came before."""

import contextlib

import pytest
import torch
from interrupts import interrupted_everywhere
from torch import nn

import amplab
from amplab import amp

X = torch.ones(5, 8)
FACES = ["O0", "O1", "O2", "O3", "GradScaler"]


class Pair:
    """Two linear layers, each with an optimizer, and the block of scale_loss of one of the two APIs."""

    def __init__(self, face):
        torch.manual_seed(0)
        self.models = [nn.Linear(8, 4), nn.Linear(8, 4)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        if face == "GradScaler":
            self.scale_loss = amplab.GradScaler("cpu", init_scale=128.0, num_losses=2).scale_loss
        else:
            amp.initialize(self.models, self.optimizers, opt_level=face, loss_scale=128.0, num_losses=2, verbosity=0)
            self.scale_loss = amp.scale_loss

    def block(self, number=0, loss_id=0):
        return self.scale_loss(self.models[number](X).float().mean(), self.optimizers[number], loss_id=loss_id)

    def grad(self, number=0):
        return next(amp.master_params(self.optimizers[number])).grad.flatten()[0].item()

    def zero_grad(self):
        for each in (*self.optimizers, *self.models):
            each.zero_grad()


@pytest.fixture(autouse=True)
def _ends_clean():
    yield
    amp.reset()


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("outer_first", [False, True])
def test_a_block_inside_another_for_the_same_parameters_is_refused(face, outer_first):
    """Before, the gradients of both were divided by one scale twice, and those of the other not at all."""
    pair = Pair(face)
    with pair.block() as loss:
        loss.backward()
    refused = pytest.raises(RuntimeError, match="scale_loss inside the block of another")
    with refused, pair.block() as outer:
        if outer_first:
            outer.backward()
        with pair.block(loss_id=1) as inner:
            inner.backward()
    assert pair.grad() == 0.25  # of the first block, since the refused one has raised


@pytest.mark.parametrize("face", FACES)
def test_a_refused_block_changes_nothing(face):
    pair = Pair(face)
    with pair.block() as outer:
        outer.backward()
        with contextlib.suppress(RuntimeError), pair.block(loss_id=1) as inner:
            inner.backward()
    assert pair.grad() == 0.25


@pytest.mark.parametrize("face", FACES)
def test_blocks_one_after_the_other_add_up(face):
    pair = Pair(face)
    for loss_id in (0, 1):
        with pair.block(loss_id=loss_id) as loss:
            loss.backward()
    assert pair.grad() == 0.5


@pytest.mark.parametrize("face", FACES)
def test_blocks_inside_one_another_for_other_parameters_are_right(face):
    pair = Pair(face)
    with pair.block(0) as outer, pair.block(1, loss_id=1) as inner:
        inner.backward()
        outer.backward()
    assert (pair.grad(0), pair.grad(1)) == (0.25, 0.25)


@pytest.mark.parametrize("face", FACES)
def test_a_block_of_a_context_manager_of_ones_own_is_seen(face):
    pair = Pair(face)

    @contextlib.contextmanager
    def wrapped():
        with pair.block() as loss:
            yield loss

    for _ in range(2):
        with wrapped() as loss:
            loss.backward()
    assert pair.grad() == 0.5
    refused = pytest.raises(RuntimeError, match="scale_loss inside the block of another")
    with refused, wrapped(), wrapped():
        pass


@pytest.mark.parametrize("face", ["O1", "O2", "GradScaler"])
def test_a_block_that_an_exception_or_an_interrupt_has_ended_does_not_count(face):
    """Also where the same statement begins the next block, and the interrupt came before the block could end itself."""
    pair = Pair(face)

    def step():
        for error in (ValueError, None, None):
            pair.zero_grad()
            with contextlib.suppress(ValueError, KeyboardInterrupt), pair.block() as loss:
                loss.backward()
                if error is not None:
                    raise error

    step()
    for interrupt in interrupted_everywhere(step, first=3, every=101):
        pair.zero_grad()
        with pair.block() as loss:
            loss.backward()
        assert pair.grad() == 0.25, interrupt
        pair.zero_grad()
