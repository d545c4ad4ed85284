"""Explains the bad steps of a watched loop: those that were skipped, and those that nothing skips and that should be.

A bad step runs again if that is possible, and its code then keeps what it kept before. Otherwise, after some skips in a
row, `StepCheck` looks at the next step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from amplab.diagnose import finding_of
from amplab.diagnose.catalogue import finding
from amplab.display.numbers import short_text
from amplab.formats.stored_values import stored_values
from amplab.lab.events import StepRecord
from amplab.lab.run_store import RunStore
from amplab.lab.skip_explanation import SkipExplanation, explained
from amplab.lab.step_check import StepCheck
from amplab.lab.step_code import CannotRunAgain
from amplab.lab.step_losses import value_of
from amplab.lab.step_rerun import StepRerun
from amplab.parallel.ranks import NeedsOtherRanks
from amplab.policies.signals import DeferredSignals, is_interrupt
from amplab.scalers.unscaler import local_shard

__all__ = ["WatchedSkips", "names_of_nonfinite_gradients"]

_SETTLED = 5  # skips in a row: fewer may be a scale that settles, so the fifth is a kind of its own
_NOT_TAKEN_BACK = (
    "a step ran again for its reason, and its code has changed what is not restored after that (a tensor of more than "
    "256 MiB, the size of an array). Leave out step= and loss= to run none again."
)
_SKIPS_BEFORE_CHECK = 5  # skips in a row after which `StepCheck` looks at the next step, if steps cannot run again


class WatchedSkips:
    """Explains steps of one loop, in its thread and between two steps.

    Args:
        model: The model.
        rerun: Runs a step again.
        store: Keeps what is found, and how much time explanations may take.
        pause: Called before a step runs again, which is none of the loop's.
        fail: Called with a sentence if an explanation fails; the loop goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: StepRerun,
        store: RunStore,
        pause: Callable[[], None],
        fail: Callable[[str], object],
    ) -> None:
        self._model, self._rerun, self._store = model, rerun, store
        self._pause, self._fail = pause, fail
        self._check: StepCheck | None = None
        self._in_a_row = 0
        self._needs_other_ranks = False  # no step can run again on this rank alone
        self._told: set[str] = set()

    @property
    def awaits_next(self) -> bool:
        """Whether `after` is needed after a step that was not skipped, too."""
        return self._in_a_row > 0 or self._check is not None

    def after(self, record: StepRecord, loss: float | None, seconds: float) -> None:
        """Explain a skipped step by running it again, or check the next one.

        Args:
            record: The step that is over.
            loss: Its loss, None if it is missing.
            seconds: Since the loop began.
        """
        if self._check is not None:
            for found in self._check.findings(record, _SKIPS_BEFORE_CHECK, has_loss=loss is not None):
                self._store.find(record.step, found)
            self._check = None
        self._in_a_row = self._in_a_row + 1 if record.skipped else 0
        if record.skipped:
            self.explain(record.step, record.loss_scale, loss, in_a_row=self._in_a_row, seconds=seconds)
        cannot = not self._rerun.is_possible or self._needs_other_ranks
        if self._in_a_row == _SKIPS_BEFORE_CHECK and cannot:
            with DeferredSignals():  # so that the end of the watch knows its hooks
                self._check = StepCheck(self._model, self._fail)

    def explain(
        self, step: int, loss_scale: float, loss: float | Tensor | None, *, in_a_row: int = 1, seconds: float
    ) -> None:
        """Explain a bad step by running it again, if that is possible and the budget allows it. Sync: as `value_of`."""
        value = value_of(loss)
        kind = value is None or math.isfinite(value), in_a_row >= _SETTLED
        began = time.perf_counter()
        if not self._rerun.is_possible or not self._store.budget.allows(kind, seconds):
            return
        self._pause()
        try:
            found = self._rerun.first_nonfinite(loss_scale, value)
        except Exception as error:  # a failed explanation must not end the loop
            if is_interrupt(error):
                raise
            self._not_explained(step, value, error)
        else:
            first = self._store.history.loss(0)
            self._store.explain(explained(found, step=step, loss=value, first_loss=first, rank=self._store.rank))
            if found is not None:
                self._store.find(step, finding_of(found))
        if not self._rerun.is_taken_back:
            self._tell_once(_NOT_TAKEN_BACK, _NOT_TAKEN_BACK)
        self._store.budget.took(time.perf_counter() - began, kind)

    def end(self) -> None:
        """Remove the hooks of a check; a second call does nothing."""
        if self._check is not None:
            self._check.end()

    def _not_explained(self, step: int, loss: float | None, error: Exception) -> None:
        """Keep why a step could not run again, and tell each reason once."""
        needs_ranks = isinstance(error, NeedsOtherRanks)
        failure = str(error) if needs_ranks or isinstance(error, CannotRunAgain) else f"{type(error).__name__}: {error}"
        evidence, rank = {"step": step}, self._store.rank
        if needs_ranks and loss is not None and rank is not None:
            is_finite = math.isfinite(loss)
            failure += f" The loss of rank {rank} was {'finite' if is_finite else short_text(loss)}."
            evidence |= {} if is_finite else {"rank": rank}
            failure += self._where_gradients_overflow() if is_finite else ""
        case = "ranks" if needs_ranks else ""
        self._store.find(step, finding("step-not-explained", case, evidence=evidence, failure=failure))
        self._store.explain(SkipExplanation(step, "once", f"could not run again: {failure}", rank=rank))
        self._needs_other_ranks = needs_ranks
        self._tell_once(failure, f"step {step} could not run again: {failure}")

    def _where_gradients_overflow(self) -> str:
        """Say which gradients of this rank are finite: a backward, which begins at the last one, overflowed there."""
        given = [name for name, each in self._model.named_parameters() if each.grad is not None]
        bad = names_of_nonfinite_gradients(self._model)
        if not bad or bad[-1] == given[-1]:
            return ""
        return f" The gradient of {bad[-1]} is not finite, and the gradients of the parameters after it are."

    def _tell_once(self, reason: str, text: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._fail(text)


def names_of_nonfinite_gradients(model: nn.Module) -> list[str]:
    """Return the names of the parameters whose gradients hold inf or NaN, in the model's order. Sync: one for each."""
    given = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
    return [name for name, grad in given if not torch.isfinite(stored_values(local_shard(grad))).all()]
