"""Modes of amplab leave the stack in any order, and leave nothing behind in what torch stores about modes."""

import itertools

import pytest
import torch
from interrupts import interrupted_everywhere
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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
