"""Which losses of a watched loop belong to a step of its first optimizer, and their sum.

A loop may have several losses in a step, and other optimizers, which step in between::

    loss, loss, step of the first      the step has both
    loss, step of another one          the loss is none of the first
    loss, both step, in any order      the step of the first has it
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from amplab.amp.backward.added_losses import added_losses
from amplab.lab.scale_probe import NO_STEPS, Steps

__all__ = ["NO_LOSSES", "LossSource", "StepLosses"]


class LossSource(IntEnum):
    """Who gives a loss. If several give the same one, the highest counts: a loop may divide what its model returns."""

    SESSION = 0
    OUTPUT = 1
    LOOP = 2


class StepLosses(NamedTuple):
    """The losses since the last record; a value, so that an interrupt leaves the one before or the one after a change.

    Attributes:
        total: sum of those since the last step of any optimizer; None if there is none.
        source: who has given them.
        of_step: sum of those with which the first optimizer has stepped since the last record.
        has_stepped: whether it has.
        steps: the steps of the optimizers, as of the last loss or record.
    """

    total: float | Tensor | None = None
    source: LossSource = LossSource.SESSION
    of_step: float | Tensor | None = None
    has_stepped: bool = False
    steps: Steps = NO_STEPS

    def after(self, steps: Steps) -> StepLosses:
        """Return them after the steps so far: the losses before the last step of any optimizer do not wait any more.

        Sync: none.
        """
        if steps == self.steps:
            return self
        if steps.of_first == self.steps.of_first:
            return StepLosses(None, LossSource.SESSION, self.of_step, self.has_stepped, steps)
        of_step = self.of_step if self.total is None else added_losses(self.of_step, self.total)
        return StepLosses(None, LossSource.SESSION, of_step, True, steps)

    def plus(self, loss: float | Tensor, source: LossSource) -> StepLosses:
        """Return them with one more. Sync: none."""
        if source < self.source:
            return self
        total = self.total if source == self.source else None
        return StepLosses(added_losses(total, loss), source, *self[2:])

    def recorded(self, steps: Steps) -> tuple[float | Tensor | None, StepLosses]:
        """Return the loss of the step of the first optimizer that is recorded, and the losses left. Sync: none.

        Args:
            steps: those so far.
        """
        if not self.has_stepped and steps.of_first == self.steps.of_first:
            return self.total, StepLosses(steps=steps)
        losses = self.after(steps)
        return losses.of_step, losses._replace(of_step=None, has_stepped=False)


NO_LOSSES = StepLosses()
