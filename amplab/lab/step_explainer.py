"""Explains single steps of one run: those that were skipped, and the first one after each change.

A skipped step is explained when it happens, within the run's `ExplanationBudget`. One that is left over runs again
later, in an experiment beside the run, from what `past_skips` keeps. The run itself is never changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from functools import partial

from amplab.diagnose import Finding, finding_of
from amplab.lab.events import Event, SkipExplained, StepRecord
from amplab.lab.experiment import Experiment
from amplab.lab.findings import diverged, lost_at_another_rate
from amplab.lab.past_skips import PastSkip
from amplab.lab.run_store import RunStore
from amplab.lab.skip_explanation import explained
from amplab.lab.step_stages import StepStages

__all__ = ["StepExplainer"]

_EXAMINATION = "examination"


class StepExplainer:
    """Explains steps of one experiment, in the trainer's thread and between two steps.

    Args:
        experiment: The experiment.
        store: Keeps what is found, and how much time explanations may take.
        publish: Called with a `SkipExplained`.
        attempt: Called with a sentence and a function to call; reports what the function raises.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        publish: Callable[[Event], None],
        attempt: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._experiment, self._store = experiment, store
        self._publish, self._attempt = publish, attempt
        self._beside: Experiment | None = None  # of the steps that run again, while they do
        self._is_to_examine = True

    @property
    def explainable(self) -> tuple[int, ...]:
        """The skipped steps that can run again: the latest ones, and the last step."""
        skip, kept = self._experiment.last_skip, self._experiment.past_skips.steps
        return kept if skip is None or skip.step in kept[-1:] else (*kept, skip.step)

    @property
    def walkable(self) -> tuple[int, ...]:
        """The skipped steps that `stages` can record: those of one optimizer that are kept."""
        return self._experiment.past_skips.steps if len(self._experiment.optimizers) == 1 else ()

    def examine_next(self) -> None:
        """Request an examination, after the next step for which the budget allows one."""
        self._is_to_examine = True

    def after(self, record: StepRecord) -> None:
        """Explain a step that was skipped, and examine the next one after a change, as far as the budget allows."""
        budget, seconds = self._store.budget, self._store.seconds
        if record.skipped and budget.allows(_kind_of_skip(record), seconds):
            self.explain_last()
        if self._is_to_examine and budget.allows(_EXAMINATION, seconds):
            self.examine()

    def explain_last(self) -> None:
        """Explain the last step if it was skipped: its batch, weights and random state are still there."""
        record = self._experiment.last_skip
        if record is None or record.step in self._store.history.explanations:
            return
        began = time.perf_counter()
        self._attempt(f"step {record.step} could not run again.", partial(self._explain, record, self._experiment))
        self._store.budget.took(time.perf_counter() - began, _kind_of_skip(record))

    def examine(self) -> None:
        """Examine the next step, which is as the one after a change."""
        self._is_to_examine = False
        began, step = time.perf_counter(), self._experiment.steps_done
        self._attempt(
            "the examination of a step failed; the run is not changed.",
            lambda: self._store.examine(step, self._examined(step)),
        )
        self._store.budget.took(time.perf_counter() - began, _EXAMINATION)

    def left_over(self) -> list[int]:
        """Return one kept step of each row of skips that has no reason, the newest last."""
        kept, explanations = self._experiment.past_skips.steps, self._store.history.explanations
        left = []
        for first, last in self._store.history.skip_groups().tolist():
            if not any(first <= step <= last for step in explanations):
                left += [step for step in kept if first <= step <= last][:1]
        return left

    def explain_past(self, step: int) -> bool:
        """Explain a kept step in an experiment beside the run; return False if it is not kept any more."""
        skip = self._experiment.past_skips.get(step)
        if skip is not None and step not in self._store.history.explanations:
            what = f"step {step} could not run again."
            self._attempt(what, lambda: self._explain(skip.record, self._as_in(skip)))
        return skip is not None

    def answer(self, step: int) -> None:
        """Explain a step that a person asks for; publish what is known of it already."""
        explanations, last = self._store.history.explanations, self._experiment.last_skip
        if step in explanations:
            self._publish(SkipExplained(step, explanations[step]))
        elif last is not None and last.step == step:
            self.explain_last()
        elif self.explain_past(step):
            self.end_past()
        else:
            self._publish(SkipExplained(step, None))

    def stages(self, step: int, parameter: str | None) -> StepStages | None:
        """Record a kept step in its stages, in an experiment beside the run; None if it is not `walkable`."""
        skip = self._experiment.past_skips.get(step)
        if skip is None or step not in self.walkable:
            return None
        try:
            return self._as_in(skip).step_in_stages(parameter)[1]
        finally:
            self.end_past()

    def end_past(self) -> None:
        """Free the experiment beside the run."""
        self._beside = None

    def _as_in(self, skip: PastSkip) -> Experiment:
        """Return an experiment beside the run, in the state in which a skipped step began."""
        if self._beside is None or self._beside.config != skip.config:
            self._beside = Experiment(skip.config)
        self._beside.become(skip)
        self._beside.goes_on = self._experiment.goes_on
        return self._beside

    def _explain(self, record: StepRecord, experiment: Experiment) -> None:
        found, history = experiment.explain_skip(), self._store.history
        why = explained(
            found,
            step=record.step,
            injected=record.injected,
            loss=record.loss,
            first_loss=history.record(0).loss,
            rank=self._store.rank,
        )
        self._store.explain(why)
        if found is not None and why.kind != "injected":
            for each in (finding_of(found), *diverged(history, why, experiment.config)):
                self._store.find(record.step, each)
        self._publish(SkipExplained(record.step, why))

    def _examined(self, step: int) -> list[Finding]:
        found = self._experiment.examine().harmful
        is_lost = lost_at_another_rate(self._store.history, step)
        return [each for each in found if not (is_lost and each.name == "diverging")]


def _kind_of_skip(record: StepRecord) -> Hashable:
    """What is known of a skipped step before it runs again, to tell kinds apart."""
    return record.opt_level, record.injected, math.isfinite(record.loss)
