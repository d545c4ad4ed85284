"""The states of schedules, and of what else the hooks of optimizers step, as a checkpoint can hold them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.run_state.file_format import is_loadable
from amplab.policies.signals import is_interrupt
from amplab.trace.reached_values import reached_from

__all__ = ["left_out", "load_states", "schedules_in_hooks", "sets_rates", "states_of"]

_OTHERS = nn.Module, Optimizer, torch.amp.GradScaler, type


def schedules_in_hooks(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return what hooks of the optimizers name that has state_dict and load_state_dict, such as an LRScheduler."""
    hooks = (hook for each in optimizers for hooks in hooks_of(each) for hook in hooks.values())
    reached = {id(each): each for hook in hooks for each in reached_from(hook)}.values()
    return [each for each in reached if not isinstance(each, _OTHERS) and _has_state(type(each))]


def sets_rates(schedule: Any) -> bool:
    """Whether an object is a schedule of learning rates: an LRScheduler, or it has an optimizer."""
    own = getattr(schedule, "__dict__", {})
    return isinstance(schedule, LRScheduler) or any(isinstance(each, Optimizer) for each in own.values())


def states_of(schedules: Sequence[Any]) -> list[dict[str, Any]]:
    """Return their states, without the entries that a checkpoint cannot hold: functions, and see `left_out`."""
    states = [{name: _plain(value) for name, value in _state_of(each).items()} for each in schedules]
    return [{name: value for name, value in state.items() if is_loadable({name: value})} for state in states]


def left_out(schedules: Sequence[Any]) -> list[str]:
    """Return the names of entries that `states_of` leaves out and that may change, such as "Warmup.generator"."""
    return [
        f"{type(each).__name__}.{name}"
        for each in schedules
        for name, value in _state_of(each).items()
        if not callable(value) and not is_loadable({name: _plain(value)})
    ]


def load_states(schedules: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
    """Load the states of schedules that the same code has made; those of others are ignored."""
    if len(schedules) != len(states):
        return
    for schedule, state in zip(schedules, states, strict=True):
        own = _state_of(schedule)
        if state and state.keys() <= own.keys():
            schedule.load_state_dict({**own, **{name: _in_form_of(own[name], each) for name, each in state.items()}})


def _state_of(schedule: Any) -> dict[Any, Any]:
    """Return the state of an object, {} if that is no dict: another thing of this name."""
    try:
        state = schedule.state_dict()
    except Exception as failure:
        if is_interrupt(failure):
            raise
        return {}
    return state if isinstance(state, dict) else {}


def _has_state(kind: type) -> bool:
    is_own = kind.__module__.partition(".")[0] != "amplab"
    return is_own and callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _plain(value: Any) -> Any:
    """Return a value with plain containers and numbers: MultiStepLR has a Counter."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | deque | set | frozenset):
        return [_plain(each) for each in value]
    return tuple(_plain(each) for each in value) if isinstance(value, tuple) else value


def _in_form_of(own: Any, value: Any) -> Any:
    """Return a value from `_plain` with the classes that the present one of its owner has."""
    if isinstance(own, np.generic) and isinstance(value, bool | int | float):
        return type(own)(value)
    if isinstance(own, deque) and isinstance(value, list):
        return deque(value, own.maxlen)
    if isinstance(own, set | frozenset) and isinstance(value, list):
        return type(own)(value)
    if isinstance(own, Counter) and isinstance(value, dict):
        return Counter(value)
    if isinstance(own, dict) and isinstance(value, dict):
        return {name: _in_form_of(own.get(name), each) for name, each in value.items()}
    if isinstance(own, list) and isinstance(value, list) and len(own) == len(value):
        return [*_each_in_form(own, value)]
    return value


def _each_in_form(own: list[Any], values: list[Any]) -> Iterator[Any]:
    for one, value in zip(own, values, strict=True):
        yield _in_form_of(one, value)
