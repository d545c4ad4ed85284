"""WatchedLosses: which losses of a watched loop are in the gradients of a step of its first optimizer.

`step_losses` adds them up, `held_gradients` looks at gradients where a loss comes and where a backward begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp import ScaledLoss
from amplab.lab.held_gradients import HeldGradients
from amplab.lab.scale_probe import StepCounter
from amplab.lab.step_losses import NO_LOSSES, GivenLoss, LossSource, StepLosses, value_of
from amplab.trace.dispatch_mode import current_backward

__all__ = ["WatchedLosses"]

_MOST_CLEARED = 64  # losses that a further backward may reach again


class WatchedLosses:
    """The losses since the last record.

    Args:
        model: the model.
        optimizers: those of the loop.
        steps: counts their steps.

    Attributes:
        waiting: the losses; a caller that records a step sets those left.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], steps: StepCounter) -> None:
        self._steps, self._held = steps, HeldGradients(model, optimizers)
        self.waiting = NO_LOSSES
        self._in_block = False  # of `scale_loss`, whose backward has not begun
        self._backward = -1  # the number of the last one that has reached a loss
        self._cleared: tuple[GivenLoss, ...] = ()  # losses whose gradients were gone, the last ones

    def add(self, source: LossSource, value: Tensor, scaled: ScaledLoss | None = None) -> None:
        """Add a loss to those of the step; one on a device is read later, so that nothing waits. Sync: none.

        Args:
            source: who gives it.
            value: any shape.
            scaled: of a loss that a scaler tells.
        """
        if self._steps.is_later_run or not (value.requires_grad or torch.is_grad_enabled()):
            return
        losses, aside = self.waiting.after(self._steps.steps()), (scaled and scaled.aside) or ()
        if losses.are_of_a_backward and not self._held.of_first(aside):  # of an iteration that was given up
            losses = self._without_cleared(losses)
        start = value if scaled is None else scaled.scaled
        self.waiting = losses.plus(GivenLoss.of(value, start, self._backward_begins), source)

    def add_scaled(self, scaled: ScaledLoss) -> None:
        """Add a loss that a scaler tells. Sync: none."""
        self.add(LossSource.SESSION, scaled.loss, scaled)
        self._in_block = scaled.aside is not None

    def recorded(self) -> tuple[float | Tensor | None, StepLosses]:
        """Return the loss of the step that is recorded, and the losses left, for `waiting`. Sync: none."""
        return self.waiting.recorded(self._steps.steps())

    @property
    def total(self) -> float | Tensor | None:
        """Their sum, see `StepLosses.total`. Sync: none."""
        return self.waiting.total

    def is_finite(self) -> bool:
        """Return whether the loss of the step so far is finite, or not known. Sync: as `value_of`."""
        loss = value_of(self.total)
        if loss is not None:  # so that it is not read again
            self.waiting = self.waiting._replace(given=(GivenLoss(loss, [True]),))
        return loss is None or math.isfinite(loss)

    def dropped_batches(self) -> int | None:
        """Return how many of the last batches the loop has dropped: no backward has reached their loss.

        None for all of a step. Sync: none.
        """
        if not self._held.any():
            return None
        return int(bool(self.waiting.given) and not self.waiting.given[-1].seen)

    def _without_cleared(self, losses: StepLosses, at_backward: list[bool] | None = None) -> StepLosses:
        self._cleared = (*self._cleared, *losses.given)[-_MOST_CLEARED:]
        return losses.cleared(at_backward)

    def _backward_begins(self, seen: list[bool]) -> bool:
        """Forget the losses before if their gradients are gone; called for each loss that a backward reaches.

        Return whether it is a backward: `torch.autograd.grad` leaves the gradients of parameters as they are.

        In a block of `scale_loss` they are set aside; `add` has looked at them where it began.
        """
        if not self._held.accumulates():
            return False
        is_new, self._backward = current_backward() != self._backward, current_backward()
        if self._in_block:
            self._in_block = False
        elif is_new and self.waiting.are_of_a_backward and not self._held.of_first():
            self.waiting = self._without_cleared(self.waiting, at_backward=seen)
        self.waiting = self.waiting.with_again(seen, self._cleared)
        return True
