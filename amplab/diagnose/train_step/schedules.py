"""The learning-rate schedulers of a training step: which ones its code uses, and when they step in a rehearsal."""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["ScheduleMove", "ScheduleWatch", "reached_from", "schedulers_of"]

_MOST_ELEMENTS = 1_000  # of a container: a list of examples is long
_DEPTH = 4
"""How many functions and objects away from the step the search goes."""


class ScheduleMove(NamedTuple):
    """A change of a scheduler during a step.

    Args:
        scheduler: its class.
        optimizer: number of its optimizer.
        before_step: it advanced before the first step of its optimizer.
        without_step: it advanced although no parameter of its optimizer changed.
    """

    scheduler: str
    optimizer: int
    before_step: bool
    without_step: bool


def schedulers_of(
    train_step: Callable[[], Any], stateful: Sequence[Any] = (), *, counting: bool = True
) -> list[LRScheduler]:
    """The schedulers in `stateful`, and those that the variables in the code of `train_step` lead to.

    Args:
        train_step: a whole iteration.
        stateful: objects with state_dict and load_state_dict.
        counting: leave out those that do not count steps, since they follow a measured value.

    >>> import torch
    >>> scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)
    >>> schedulers_of(lambda: scheduler.step()) == [scheduler]
    True
    """
    found = {id(each): each for each in stateful if isinstance(each, LRScheduler)}
    found |= {id(each): each for each in reached_from(train_step) if isinstance(each, LRScheduler)}
    return [each for each in found.values() if not (counting and isinstance(each, ReduceLROnPlateau))]


def reached_from(train_step: Callable[[], Any], names: Container[str] | None = None) -> Iterator[Any]:
    """What a function can reach by the names in its code, itself first: functions, and the contents of objects.

    Args:
        train_step: the function.
        names: the attributes of objects to follow; None for all.
    """
    seen: set[int] = set()
    waiting = [(train_step, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) not in seen:
            yield value
        if depth < _DEPTH and id(value) not in seen and not isinstance(value, LRScheduler):
            seen.add(id(value))
            waiting += [(each, depth + 1) for each in _named_in(value, names)]


def _named_in(value: Any, names: Container[str] | None) -> Iterator[Any]:
    """What a function names, the object of a method, the contents of a container or of a plain object."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
        yield from _own_methods(value)
    elif isinstance(value, types.FunctionType):
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
        yield from _in_cells(value)
    elif isinstance(value, list | tuple | set):
        yield from islice(value, _MOST_ELEMENTS)
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_ELEMENTS)
    elif _is_users(value):
        yield from (each for name, each in vars(value).items() if names is None or name in names)


def _own_methods(method: types.MethodType) -> Iterator[types.MethodType]:
    """The methods of the same object that a method of a user's class names."""
    if _is_users(owner := method.__self__):
        for name in getattr(method.__func__, "__code__", _NO_CODE).co_names:
            if isinstance(getattr(type(owner), name, None), types.FunctionType):
                yield types.MethodType(getattr(type(owner), name), owner)


_NO_CODE = compile("", "", "exec")


def _in_cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def _is_users(value: Any) -> bool:
    """Whether it is a plain object of a class outside of torch and amplab, such as a trainer."""
    plain = not isinstance(value, type | types.ModuleType) and isinstance(getattr(value, "__dict__", None), dict)
    return plain and type(value).__module__.partition(".")[0] not in ("torch", "amplab", "builtins")


class ScheduleWatch:
    """Records when schedulers advance in one step."""

    def __init__(self, schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
        numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        counted = [each for each in schedulers if hasattr(each, "last_epoch")]  # a ChainedScheduler has several counts
        self._followed = [(each, numbers[id(each.optimizer)]) for each in counted if id(each.optimizer) in numbers]
        self._start = [each.last_epoch for each, _ in self._followed]
        self._at_step: dict[int, list[int]] = {}

    def at_step(self, optimizer: int) -> None:
        """Record that an optimizer is about to step; only the first time counts."""
        self._at_step.setdefault(optimizer, [each.last_epoch for each, _ in self._followed])

    def moves(self, unmoved: Sequence[bool]) -> tuple[ScheduleMove, ...]:
        """Return the schedulers that advanced; `unmoved` says by optimizer whether its parameters are unchanged."""
        return tuple(
            ScheduleMove(type(each).__name__, number, self._was_before(place, number), unmoved[number])
            for place, (each, number) in enumerate(self._followed)
            if each.last_epoch != self._start[place]
        )

    def _was_before(self, place: int, number: int) -> bool:
        return number in self._at_step and self._at_step[number][place] != self._start[place]
