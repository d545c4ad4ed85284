"""Run a skipped step again with `first_nonfinite`, from the state in which it began.

A step that accumulates gradients has several batches. Each has its own random state; all start from the buffers before
the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab.diagnose import Finding, FirstNonfinite, finding_of, first_nonfinite
from amplab.trace.handed_step import Loss, Scaler

__all__ = ["StepRerun"]

_HAS_CUDA = torch.backends.cuda.is_built()
_RERUN_AFTER = (1, 5)  # skips in a row after which a step runs again: one may be a scale that settles, five are not
_MAX_RERUNS = 6  # of one watch; each takes as long as 3 to 6 steps, or 25 if a step takes microseconds

_BATCHES = 64  # kept of one step at most, since a loop may never step


class _Begun(NamedTuple):
    """The batch and the random state of one forward."""

    batch: Any
    random: list[Tensor]


class StepRerun:
    """Keeps the state in which a step began, and explains the step.

    Args:
        model: the model.
        loss, step: as `first_nonfinite` takes them; if both are None, steps cannot run again.
        scaler: as `first_nonfinite` takes it.

    Attributes:
        is_possible: whether a step can run again: there is a loss or a step, and batches are known.
        at_work: whether a step is running again now.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, step: Loss | None, scaler: Scaler | None) -> None:
        self._model, self._loss, self._step, self._scaler = model, loss, step, scaler
        self._runs_again = loss is not None or step is not None
        self._buffers = list(model.buffers()) if self._runs_again else []
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._begun: deque[_Begun] = deque(maxlen=_BATCHES)
        self._made = 0
        self.is_possible = False
        self.at_work = False

    def remember(self, batch: Any) -> None:
        """Keep a reference to the batch, and copies of the random state and of the buffers. Sync: none."""
        if not self._runs_again:
            return
        if self._buffers and not self._begun:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._buffers)
        self._begun.append(_Begun(batch, _random_states()))
        self.is_possible = True

    def forget(self) -> None:
        """Drop the batches: their step is over."""
        self._begun.clear()

    def is_worth_it(self, skips_in_a_row: int) -> bool:
        """Whether to explain this skip: that is possible, and only some skips of a long row are explained."""
        return self.is_possible and skips_in_a_row in _RERUN_AFTER and self._made < _MAX_RERUNS

    def explain(self, loss_scale: float) -> Finding | None:
        """Run the kept step again at its scale, batch by batch; return None if every batch is finite.

        Sync: as many as several steps, for each batch up to the first that is not finite.
        """
        self._made += 1
        for begun in tuple(self._begun):
            with self._as_it_began(begun.random):
                found = self._first_nonfinite(begun.batch, loss_scale)
            if found is not None:
                return finding_of(found)
        return None

    def _first_nonfinite(self, batch: Any, loss_scale: float) -> FirstNonfinite | None:
        return first_nonfinite(
            self._model, batch, loss=self._loss, step=self._step, scaler=self._scaler, loss_scale=loss_scale
        )

    @contextmanager
    def _as_it_began(self, random: list[Tensor]) -> Iterator[None]:
        now = _random_states(), [buffer.detach().clone() for buffer in self._buffers]
        self.at_work = True
        try:
            self._set(random, self._kept)
            yield
        finally:
            self._set(*now)
            self.at_work = False

    @torch.no_grad()
    def _set(self, random: list[Tensor], buffers: list[Tensor]) -> None:
        torch.set_rng_state(random[0])
        if len(random) > 1:
            torch.cuda.set_rng_state_all(random[1:])
        for buffer, value in zip(self._buffers, buffers, strict=True):
            buffer.copy_(value)


def _random_states() -> list[Tensor]:
    on_host = torch.get_rng_state()
    return [on_host, *torch.cuda.get_rng_state_all()] if _HAS_CUDA and torch.cuda.is_initialized() else [on_host]
