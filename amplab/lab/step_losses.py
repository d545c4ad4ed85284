"""Which losses of a watched loop belong to a step of its first optimizer, and their sum.

A loop may have several losses in a step, and other optimizers, which step in between::

    loss, loss, step of the first      the step has both
    loss, step of another one          the loss is none of the first
    loss, both step, in any order      the step of the first has it
    loss without a backward            the step does not have it, if it has another one: the loop has dropped the batch
    loss, zero_grad, loss, step        the step has the second: it is the one in the gradients
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import reduce
from typing import NamedTuple

from torch import Tensor

from amplab.amp.backward.added_losses import added_losses
from amplab.lab.scale_probe import NO_STEPS, Steps

__all__ = ["NO_LOSSES", "GivenLoss", "LossSource", "StepLosses", "value_of"]


class LossSource(IntEnum):
    """Who gives a loss. If several give the same one, the highest counts: a loop may divide what its model returns."""

    SESSION = 0
    OUTPUT = 1
    LOOP = 2


class GivenLoss(NamedTuple):
    """One loss of a loop.

    Attributes:
        value: the loss; of a tensor on a device, that tensor, which is read later.
        seen: holds True once a backward has reached it, or if there is no telling; False for `torch.autograd.grad`.
        has_graph: whether a backward can reach it.
    """

    value: float | Tensor
    seen: list[bool]
    has_graph: bool = True

    @classmethod
    def of(cls, loss: Tensor, start: Tensor, at_backward: Callable[[list[bool]], bool]) -> GivenLoss:
        """Return a loss of which a hook tells whether a backward reaches it. Sync: one on the CPU, else none.

        Args:
            loss: any shape.
            start: from which the backward starts: the loss itself, or what it is scaled to.
            at_backward: called with `seen` when a backward is about to reach it; returns what to add.
        """
        seen: list[bool] = []
        if start.requires_grad:
            start.register_hook(lambda _: seen.append(at_backward(seen)))
        else:
            seen.append(True)
        return cls(loss.item() if loss.is_cpu and loss.numel() == 1 else loss.detach(), seen, loss.requires_grad)


class StepLosses(NamedTuple):
    """The losses since the last record; a value, so that an interrupt leaves the one before or the one after a change.

    Attributes:
        given: those since the last step of any optimizer.
        source: who has given them.
        of_step: sum of those with which the first optimizer has stepped since the last record.
        has_stepped: whether it has.
        steps: the steps of the optimizers, as of the last loss or record.
    """

    given: tuple[GivenLoss, ...] = ()
    source: LossSource = LossSource.SESSION
    of_step: float | Tensor | None = None
    has_stepped: bool = False
    steps: Steps = NO_STEPS

    @property
    def total(self) -> float | Tensor | None:
        """The sum of those that a backward has reached, or of all before that; None without one. Sync: none."""
        counted = [each.value for each in self.given if any(each.seen)] or [each.value for each in self.given]
        return reduce(added_losses, counted) if counted else None

    @property
    def are_of_a_backward(self) -> bool:
        """Whether a backward has reached one."""
        return any(any(each.seen) for each in self.given)

    def after(self, steps: Steps) -> StepLosses:
        """Return them after the steps so far: the losses before the last step of any optimizer do not wait any more.

        Sync: none.
        """
        if steps == self.steps:
            return self
        if steps.of_first == self.steps.of_first:
            return StepLosses((), LossSource.SESSION, self.of_step, self.has_stepped, steps)
        total = self.total
        of_step = self.of_step if total is None else added_losses(self.of_step, total)
        return StepLosses((), LossSource.SESSION, of_step, True, steps)

    def cleared(self, at_backward: list[bool] | None = None) -> StepLosses:
        """Return them after the gradients were cleared: without those that a backward has reached. Sync: none.

        Args:
            at_backward: `seen` of a loss that a backward is about to reach: it stays, and so do losses without a graph,
                which may be its own.
        """
        given = tuple(
            each
            for each in self.given
            if not any(each.seen) or each.seen is at_backward or (at_backward is not None and not each.has_graph)
        )
        return self._replace(given=given, source=self.source if given else LossSource.SESSION)

    def with_again(self, seen: list[bool], cleared: tuple[GivenLoss, ...]) -> StepLosses:
        """Return them with a loss that was cleared, which a backward reaches again. Sync: none."""
        if any(each.seen is seen for each in self.given):
            return self
        again = [each for each in cleared if each.seen is seen][-1:]
        return self._replace(given=(*self.given, *again))

    def plus(self, loss: GivenLoss, source: LossSource) -> StepLosses:
        """Return them with one more. Sync: none."""
        if source < self.source:
            return self
        given = self.given if source == self.source else ()
        return StepLosses((*given, loss), source, *self[2:])

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


def value_of(loss: float | Tensor | None) -> float | None:
    """Return a loss as a number; None for None and for several elements. Sync: one if it is on a device."""
    if isinstance(loss, Tensor):
        return loss.item() if loss.numel() == 1 else None
    return loss
