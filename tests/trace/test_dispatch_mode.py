"""Modes of amplab leave the stack in any order, and leave nothing behind in what torch stores about modes."""

import itertools
import threading

import pytest
import torch
from interrupts import interrupted_everywhere
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import amplab
from amplab.trace.dispatch_mode import DispatchMode


class Own(DispatchMode):
    """A mode of amplab that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Foreign(TorchDispatchMode):
    """A mode of the user."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def flags():
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


@pytest.mark.parametrize("kinds", list(itertools.product((Own, Foreign), repeat=3)))
def test_own_modes_end_in_any_order(kinds):
    """Those of torch end with their blocks, the last one first."""
    assert not any(flags().values())
    modes = [kind() for kind in kinds]
    for mode in modes:
        mode.__enter__()
    inside = flags()
    left = list(modes)
    for mode in (*(each for each in modes if isinstance(each, Own)), *reversed(modes)):
        if mode not in left:
            continue
        mode.__exit__(None, None, None)
        left.remove(mode)
        assert _get_current_dispatch_mode_stack() == left
        assert flags() == (inside if left else dict.fromkeys(inside, False))
        assert torch.ones(2).add(1).sum() == 4


def test_modes_of_two_threads_that_overlap_leave_nothing():
    """As a trace of the lab in its thread, and xray in a cell: the one that ends last has begun inside the other."""
    first_begun, second_begun, first_ended = threading.Event(), threading.Event(), threading.Event()

    def first():
        with Own():
            first_begun.set()
            assert second_begun.wait(10)
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_begun.wait(10)
    with Own():
        second_begun.set()
        assert first_ended.wait(10)
    thread.join()
    assert not any(flags().values())


def test_a_second_exit_does_nothing():
    own = Own()
    with Foreign() as foreign:
        with own:
            pass
        own.__exit__()
        assert _get_current_dispatch_mode_stack() == [foreign]
        assert any(flags().values())
    assert not any(flags().values())


def test_an_exit_after_an_interrupted_entry_leaves_nothing():
    mode = Own()
    for interrupt in interrupted_everywhere(mode.__enter__, folders=[_python_dispatch.__file__]):
        mode.__exit__()
        assert not any(flags().values()), interrupt
        assert _get_current_dispatch_mode_stack() == [], interrupt
    mode.__exit__()


def by_cond(y):
    return torch.cond(y.detach().sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))


def by_while_loop(y):
    with torch.no_grad():
        (times,) = while_loop(lambda n: n < 3, lambda n: (n + 1,), (torch.zeros((), dtype=torch.int64),))
    return y * times


class Branching(nn.Linear):
    """Calls an operator of torch that compiles itself, without `torch.compile` in the program."""

    def __init__(self, operator):
        super().__init__(4, 4)
        self.operator = operator

    def forward(self, x):
        return self.operator(super().forward(x))


def loss_of(output):
    return output.square().mean()


def watched(model, batch, *, in_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with amplab.watch(model, optimizer) as w:
        for x in w.batches([batch] * 2) if in_batches else [batch] * 2:
            w.loss(loss_of(model(x))).backward()
            optimizer.step()
    assert w.failures == ()
    assert len(w.history) == 2


TOOLS = {
    "xray": lambda model, x: amplab.xray(model, x, loss=loss_of),
    "first_nonfinite": lambda model, x: amplab.first_nonfinite(model, x, loss=loss_of),
    "doctor": lambda model, x: amplab.doctor(model, x, loss=loss_of),
    "watch": lambda model, x: watched(model, x, in_batches=False),
    "batches": lambda model, x: watched(model, x, in_batches=True),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler
@pytest.mark.parametrize(
    ("tool", "operator"),
    [*((tool, by_while_loop) for tool in TOOLS), ("watch", by_cond), ("batches", by_cond)],
)
def test_a_higher_order_operator_runs_in_a_tool_and_afterwards(tool, operator):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Branching(operator), torch.ones(2, 4)
    TOOLS[tool](model, x)
    found = model(x)
    torch._dynamo.reset()
    assert torch.equal(found, model(x))
    torch._dynamo.reset()  # a look of the next test begins
