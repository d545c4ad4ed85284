"""Skipped steps that can run again later: what each needs is copied when it is skipped, within `MOST_BYTES`.

A skipped step changes no weight, so steps that are skipped one after the other share one copy of the weights. A copy
takes about 1 % of the time of a step. The oldest steps are dropped for newer ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amplab.formats.kept_property import kept_property
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import StepRecord
from amplab.lab.step_rerun import StepBeginning
from amplab.policies.nested_tensors import tensors_in
from amplab.scalers import ScaleState

__all__ = ["MOST_BYTES", "PastSkip", "PastSkips"]

MOST_BYTES = 2**26
"""Bytes of all kept steps of one run: batches, weights, buffers and random states."""


@dataclass(frozen=True, eq=False)
class PastSkip:
    """A skipped step, and the state in which it began.

    Attributes:
        record: The step, as in the history.
        config: The config in effect.
        loss_id: Number of the loss whose gradients were not finite.
        scalers: State of each loss scaler before the step.
        beginning: Batches, random states and buffers.
        weights: The model's parameters, and the masters if there are any; shared with neighboring steps.
        own: What code of one's own kept, see `OwnChanges.state`.
    """

    record: StepRecord
    config: ExperimentConfig
    loss_id: int
    scalers: tuple[ScaleState, ...]
    beginning: StepBeginning
    weights: tuple[Tensor, ...]
    own: Mapping[str, Any]

    @kept_property
    def nbytes(self) -> int:
        """Bytes of what no other step shares."""
        return self.beginning.nbytes + _bytes(tensors_in(self.own))


class PastSkips:
    """The latest skipped steps of one run, by step. One thread adds; any thread can read."""

    def __init__(self) -> None:
        self._skips: dict[int, PastSkip] = {}
        self._users: Counter[int] = Counter()  # of each copy of the weights, by its id
        self.nbytes = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can run again, the oldest first."""
        return tuple(self._skips)

    def get(self, step: int) -> PastSkip | None:
        """Return a step; None if it is not kept."""
        return self._skips.get(step)

    def keep(self, weights: Sequence[Tensor], *, is_same: bool, make: Callable[[tuple[Tensor, ...]], PastSkip]) -> None:
        """Keep a step, unless it alone exceeds the limit.

        Args:
            weights: The present weights, which are copied.
            is_same: Whether they are those of the latest kept step, whose copy is then shared.
            make: Makes the step from the copy. Sync: none.
        """
        latest = next(reversed(self._skips.values()), None)
        if latest is not None and is_same:
            skip = make(latest.weights)
        elif _bytes(weights) <= MOST_BYTES:
            skip = make(tuple(each.detach().clone() for each in weights))
        else:
            return
        self._add(skip)
        while self.nbytes > MOST_BYTES:
            self._drop_oldest()

    def _add(self, skip: PastSkip) -> None:
        self._skips[skip.record.step] = skip
        self._users[id(skip.weights)] += 1
        self.nbytes += skip.nbytes + (_bytes(skip.weights) if self._users[id(skip.weights)] == 1 else 0)

    def _drop_oldest(self) -> None:
        skip = self._skips.pop(next(iter(self._skips)))
        self._users[id(skip.weights)] -= 1
        self.nbytes -= skip.nbytes
        if not self._users[id(skip.weights)]:
            del self._users[id(skip.weights)]
            self.nbytes -= _bytes(skip.weights)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.nbytes for each in tensors_in(tensors))
