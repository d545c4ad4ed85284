"""The learning-rate schedulers of a training step: which ones its code uses, and when they step in a rehearsal."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from amplab.trace.reached_values import reached_from

__all__ = ["ScheduleMove", "ScheduleWatch", "schedulers_of"]


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
    train_step: Callable[[], Any],
    stateful: Sequence[Any] = (),
    optimizers: Sequence[Optimizer] = (),
    *,
    counting: bool = True,
) -> list[LRScheduler]:
    """The schedulers in `stateful`, those to which the variables in the code of `train_step` lead, those of optimizers.

    Args:
        train_step: a whole iteration.
        stateful: objects with state_dict and load_state_dict.
        optimizers: their schedulers are found wherever they are, as in a hook on a step, among all objects: with a
            million of them it takes 0.3 s.
        counting: leave out those that do not count steps, since they follow a measured value.

    >>> import torch
    >>> scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)
    >>> schedulers_of(lambda: scheduler.step()) == [scheduler]
    True
    """
    found = {id(each): each for each in stateful if isinstance(each, LRScheduler)}
    found |= {id(each): each for each in reached_from(train_step) if isinstance(each, LRScheduler)}
    if optimizers:
        ids = {*map(id, optimizers)}
        every = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        found |= {id(each): each for each in every if id(vars(each).get("optimizer")) in ids}
    return [each for each in found.values() if not (counting and isinstance(each, ReduceLROnPlateau))]


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
