"""After an interrupt anywhere in GradScaler's calls, no step takes scaled gradients, and none is taken twice."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupts import PACKAGE, Interrupt, interrupted
from torch import nn

import amplab
from amplab.amp import GradScaler

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.25),
    "fused": lambda params: torch.optim.SGD(params, lr=0.25, fused=True),
    "amplab": lambda params: amplab.optimizers.FusedSGD(params, lr=0.25),
}


class Loop:
    """Two parameters with a gradient of 1; each step subtracts 0.25."""

    def __init__(self, kind, *, explicit=False):
        self.params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.optimizer = MAKERS[kind](self.params)
        self.scaler = GradScaler("cpu", growth_interval=1000)
        self.explicit = explicit

    def backward(self):
        self.optimizer.zero_grad()
        self.scaler.scale(torch.stack([param.sum() for param in self.params]).sum()).backward()

    def finish(self):
        if self.explicit:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self):
        self.scaler.step(self.optimizer)

    def iterate(self):
        self.backward()
        self.finish()

    @property
    def steps(self):
        """The number of steps of each element."""
        return {value / -0.25 for param in self.params for value in param.tolist()}


def interrupted_loops(
    make: Callable[[], Loop],
    call: Callable[[Loop], object],
    every: int,
    folders: Collection[str] = (f"{PACKAGE}/amp/pytorch",),
) -> Iterator[tuple[Interrupt, Loop]]:
    """Yield a new loop for each point of some folders at which `call` is interrupted."""
    for at in itertools.count(1, every):
        loop = make()
        interrupt = interrupted(partial(call, loop), at, folders=folders)
        if interrupt is None:
            return
        yield interrupt, loop


def begun(kind: str, explicit: bool = False) -> Loop:
    """Return a loop after one iteration and the backward of the second."""
    loop = Loop(kind, explicit=explicit)
    loop.iterate()
    loop.backward()
    return loop


def overflowed() -> Loop:
    """Return a loop after a step that was skipped."""
    loop = Loop("sgd")
    loop.backward()
    loop.params[0].grad.fill_(torch.inf)
    loop.step()
    return loop


def refusal_of(call: Callable[[], object]) -> str:
    """Return the message with which `call` is refused, "" if it is not."""
    try:
        call()
    except RuntimeError as refusal:
        return str(refusal)
    return ""


# A generator that was interrupted can meet the interrupt again when it is deleted.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])


@EVERY
@pytest.mark.parametrize(
    ("kind", "explicit"), [("sgd", False), ("sgd", True), ("fused", False), ("amplab", False), ("amplab", True)]
)
def test_the_next_iteration_is_right_wherever_the_last_was_interrupted(kind, explicit, every):
    tried = 0
    for interrupt, loop in interrupted_loops(partial(begun, kind, explicit), Loop.finish, every):
        tried += 1
        before = loop.steps
        assert before in ({1.0}, {2.0}), interrupt
        loop.iterate()  # no step of 65536, and no "already been called"
        assert loop.steps == {each + 1 for each in before}, interrupt
        assert loop.scaler.get_scale() == 2.0**16
    assert tried > 60 / every


def first(kind: str) -> Loop:
    """Return a loop after its first backward: the scaler has not read the parameters."""
    loop = Loop(kind)
    loop.backward()
    return loop


def grown(kind: str) -> Loop:
    """Return a loop after the backward with which another group begins to train."""
    loop = Loop(kind)
    loop.iterate()
    loop.params.append(nn.Parameter(torch.full((2,), -0.25)))
    loop.optimizer.add_param_group({"params": loop.params[-1:]})
    loop.backward()
    return loop


@EVERY
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("make", [first, grown])
def test_new_parameters_are_unscaled_wherever_the_iteration_before_was_interrupted(make, kind, every):
    folders = [f"{PACKAGE}/amp/pytorch", f"{PACKAGE}/kernels", f"{PACKAGE}/scalers"]
    tried = 0
    for interrupt, loop in interrupted_loops(partial(make, kind), Loop.finish, every, folders):
        tried += 1
        expected = [param.detach() - 0.25 for param in loop.params]
        loop.iterate()
        assert all(map(torch.equal, loop.params, expected)), interrupt
    assert tried > 60 / every


@EVERY
@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_that_is_called_again_is_taken_once_at_most(kind, every):
    """Without a backward in between the gradients may be unscaled or not: it refuses, or steps for the first time."""
    for interrupt, loop in interrupted_loops(partial(begun, kind), Loop.step, every):
        refusal = refusal_of(loop.step)
        assert refusal == "" or "interrupted" in refusal or "already been called" in refusal, interrupt
        assert loop.steps in ({1.0}, {2.0}), interrupt
        loop.scaler.update()


@EVERY
def test_an_update_that_is_called_again_moves_the_scale_once_at_most(every):
    for interrupt, loop in interrupted_loops(overflowed, lambda loop: loop.scaler.update(), every):
        with contextlib.suppress(AssertionError):  # it was complete
            loop.scaler.update()
        assert loop.scaler.get_scale() in (2.0**15, 2.0**16), interrupt
        loop.iterate()
        assert loop.steps == {1.0}, interrupt


@EVERY
def test_gradients_that_an_interrupt_has_left_are_not_added_to(every):
    refused = 0
    for interrupt, loop in interrupted_loops(partial(begun, "sgd"), Loop.step, every):
        before = loop.steps
        loop.scaler.scale(torch.stack([param.sum() for param in loop.params]).sum()).backward()  # no zero_grad
        refusal = refusal_of(loop.step)
        # Where it is not refused, both gradients were scaled.
        assert loop.steps == (before if refusal else {each + 2 for each in before}), interrupt
        refused += "added to it" in refusal
    assert refused > 10 / every


FOLDERS = [f"{PACKAGE}/amp/pytorch", *(str(Path(each.__file__).parent) for each in (torch.amp, torch.optim)), __file__]


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_loop_that_catches_the_interrupt_of_its_function_goes_on(explicit, every):
    """Wherever it comes, in torch's optimizer and between the calls too."""
    tried = 0
    for at in itertools.count(1, every):
        loop, interrupt = Loop("sgd", explicit=explicit), None
        for number in range(4):
            before = loop.steps
            if number == 1:
                interrupt = interrupted(loop.iterate, at, folders=FOLDERS)  # catches it
                continue
            loop.iterate()
            assert loop.steps == {each + 1 for each in before}, interrupt
        if interrupt is None:
            break
        tried += 1
        assert loop.scaler.get_scale() == 2.0**16, interrupt
    assert tried > 100 / every


# -- between two calls: how the function ended that has called step() tells an interrupt from a missing update() ---


def step_and_return(loop):
    loop.backward()
    loop.step()


def step_and_raise(loop):
    step_and_return(loop)
    raise KeyboardInterrupt


def step_and_clean_up(loop):
    try:
        step_and_return(loop)
        raise KeyboardInterrupt
    finally:
        del loop


def step_and_yield(loop):
    step_and_return(loop)
    yield
    raise KeyboardInterrupt


def step_and_go_on(loop):
    try:
        loop.backward()
        loop.scaler.step(loop.optimizer)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        return


@pytest.mark.parametrize("ended", [step_and_raise, step_and_clean_up])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_iteration_whose_function_was_interrupted_before_update_is_over(kind, ended):
    loop = Loop(kind)
    for steps in (1.0, 2.0):
        with pytest.raises(KeyboardInterrupt):
            ended(loop)
        assert loop.steps == {steps}
    loop.iterate()
    assert loop.steps == {3.0}


@pytest.mark.parametrize("left_out", [step_and_return, step_and_go_on, lambda loop: next(step_and_yield(loop))])
def test_an_iteration_without_update_is_refused(left_out):
    loop = Loop("sgd")
    left_out(loop)
    with pytest.raises(RuntimeError, match="already been called"):
        left_out(loop)
    assert loop.steps == {1.0}


def test_a_second_loss_of_an_iteration_begins_none():
    """As in a GAN: a function that calls step() has returned, or is running, when the next loss is scaled."""
    first, second = Loop("sgd"), Loop("sgd")
    second.scaler = first.scaler
    for each in (first, second):
        step_and_return(each)
    first.scaler.update()
    assert first.steps == second.steps == {1.0}
    with pytest.raises(AssertionError, match="No inf checks"):
        first.scaler.update()


def test_an_overflow_in_a_block_of_scale_loss_before_an_interrupt_skips_no_later_step():
    loop = Loop("sgd")

    def backward(factor):
        loop.optimizer.zero_grad()
        loss = torch.stack([param.sum() for param in loop.params]).sum()
        with loop.scaler.scale_loss(loss * factor, loop.optimizer) as scaled_loss:
            scaled_loss.backward()

    def interrupted_iteration():
        backward(torch.inf)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_iteration()
    backward(1.0)
    loop.finish()
    assert loop.steps == {1.0}


def test_an_error_of_the_optimizer_is_no_interrupt():
    loop = Loop("sgd")
    loop.backward()
    hook = loop.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.step()
    hook.remove()
    loop.scaler.step(loop.optimizer)  # as with torch's class
    assert loop.steps == {1.0}
    with pytest.raises(RuntimeError, match="already been called"):
        loop.scaler.step(loop.optimizer)


def test_an_overflow_of_an_interrupted_iteration_is_over_once_a_state_is_loaded():
    """As after Ctrl-C in a notebook, where a cell goes on from a checkpoint."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    saved = scaler.state_dict()

    def interrupted():
        scaler.scale(parameter.sum() * float("inf")).backward()
        scaler.unscale_(optimizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    scaler.load_state_dict(saved)
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
