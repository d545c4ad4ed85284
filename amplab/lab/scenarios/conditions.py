"""What must be seen in a run before a scenario is over: conditions as values, checked between two steps.

A condition returns the numbers that it found, as text, or None while it is not met. The numbers fill the sentences of
its scenario. Every condition also gives those of `Observed.numbers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from amplab.display.numbers import count, power, short_text
from amplab.lab.events import StepRecord
from amplab.lab.history import History
from amplab.lab.tasks import Score

__all__ = [
    "CHECK_EVERY",
    "Both",
    "Condition",
    "Fails",
    "LossFalls",
    "LossIsNaN",
    "LossStays",
    "Numbers",
    "Observed",
    "OwnScales",
    "ScaleRises",
    "ScoreReaches",
    "ScoreStays",
    "Skips",
    "Steps",
]

CHECK_EVERY = 25
"""Steps between two checks of what is measured over many steps; also of the score, which is measured as often."""

_SMOOTHED = 20  # steps over which a loss is averaged
_SKIPS_READ = 200

Numbers = Mapping[str, str]


@dataclass(frozen=True)
class Observed:
    """A run, from the step at which a scenario or its mend began.

    Attributes:
        history: The whole run.
        begin: That step.
        score: What its task measures, None if nothing.
        failure: The error that ended the run, as one line; None if none did.
    """

    history: History
    begin: int
    score: Score | None = None
    failure: str | None = None

    @property
    def steps(self) -> int:
        """Steps since the beginning."""
        return len(self.history) - self.begin

    @property
    def is_due(self) -> bool:
        """Whether conditions over many steps are checked now."""
        return self.steps > 0 and self.steps % CHECK_EVERY == 0

    def skips(self) -> list[StepRecord]:
        """Return the skipped steps since the beginning, of very many the last ones."""
        found = self.history.skips(max(0, self.history.skip_count - _SKIPS_READ))
        return [record for record in found if record.step >= self.begin]

    def losses(self) -> np.ndarray:
        """Return the losses since the beginning `(steps,)`."""
        return self.history.column("loss")[self.begin :]

    def first_loss(self) -> float:
        """Return the mean loss of the first steps."""
        return float(np.mean(self.losses()[:_SMOOTHED]))

    def last_loss(self) -> float:
        """Return the mean loss of the last steps."""
        return float(np.mean(self.losses()[-_SMOOTHED:]))

    def numbers(self) -> dict[str, str]:
        """Return what every sentence may name: steps, skipped, scale, loss, first_loss, score, failure."""
        last = self.history.last
        if last is None:
            return {"steps": "0", "failure": self.failure or ""}
        skipped = self.history.skip_count
        return {
            "steps": f"{self.steps:,}",
            "skipped": f"{count(skipped, 'step') if skipped else 'No step'} {'were' if skipped > 1 else 'was'} skipped",
            "scale": power(last.next_loss_scale, raised=True),
            "loss": short_text(self.last_loss(), digits=2),
            "first_loss": short_text(self.first_loss(), digits=2),
            "score": self._score_text(),
            "failure": self.failure or "",
        }

    def _score_text(self) -> str:
        value = self.history.last_score
        if self.score is None or value is None:
            return "–"
        return self.score.text(value) if self.score.is_share else f"{round(value, 2) + 0.0:.2f}"  # + 0.0: no -0.00


class Condition(Protocol):
    """What must be seen."""

    def met(self, run: Observed) -> Numbers | None:
        """Return the numbers of its own if the run shows it by now, else None. Called after every step."""


@dataclass(frozen=True)
class Steps:
    """So many steps were made without an error."""

    count: int

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        return {} if run.steps >= self.count else None


@dataclass(frozen=True)
class Skips:
    """So many steps in a row were skipped.

    Numbers: step, before and after (the loss scale of the first of them and of the next step), parameter.

    Attributes:
        count: Their number.
        injected: The fault that caused them, None for none.
    """

    count: int = 1
    injected: str | None = None

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        if not run.history.skip_count:
            return None
        row: list[StepRecord] = []
        for record in run.skips():
            if record.injected != self.injected:
                row = []
                continue
            row = [*row, record] if row and record.step == row[-1].step + 1 else [record]
            if len(row) >= self.count:
                first = row[0]
                return {
                    "step": f"{first.step:,}",
                    "before": power(first.loss_scale, raised=True),
                    "after": power(first.next_loss_scale, raised=True),
                    "parameter": first.first_nonfinite or "",
                }
        return None


@dataclass(frozen=True)
class ScaleRises:
    """The loss scale is so many times that of the first step. Numbers: first_scale."""

    times: float

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        last = run.history.last
        if last is None or run.steps < 1:
            return None
        first = run.history.record(run.begin).loss_scale
        return {"first_scale": power(first, raised=True)} if last.next_loss_scale >= self.times * first else None


@dataclass(frozen=True)
class ScoreReaches:
    """The score on held-out data is at least as good as a value."""

    value: float

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        if not run.is_due or run.score is None or (score := run.history.last_score) is None or math.isnan(score):
            return None
        return {} if (score >= self.value if run.score.higher_is_better else score <= self.value) else None


@dataclass(frozen=True)
class ScoreStays:
    """The score on held-out data is not better than a value, so many steps after the beginning."""

    value: float
    steps: int

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        if not run.is_due or run.steps < self.steps or run.score is None:
            return None
        return {} if ScoreReaches(self.value).met(run) is None else None


@dataclass(frozen=True)
class LossStays:
    """The loss is at least a share of that of the first steps, so many steps after the beginning."""

    share: float
    steps: int

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        if not run.is_due or run.steps < self.steps:
            return None
        return {} if run.last_loss() >= self.share * run.first_loss() else None


@dataclass(frozen=True)
class LossFalls:
    """The loss is at most a share of that of the first steps."""

    share: float

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        return {} if run.is_due and run.last_loss() <= self.share * run.first_loss() else None


@dataclass(frozen=True)
class LossIsNaN:
    """The loss is NaN for so many steps. Numbers: step, the first of them."""

    count: int = 1

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        last = run.history.last
        if last is None or not math.isnan(last.loss):
            return None
        nan = np.isnan(run.losses())
        if nan.sum() < self.count:
            return None
        return {"step": f"{run.begin + int(nan.argmax()):,}"}


@dataclass(frozen=True)
class Fails:
    """The run ends with an error that contains some words. Numbers: advice, its sentence that contains them."""

    words: str

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        sentences = [each for each in re.split(r"(?<=\.)\s", run.failure or "") if self.words in each]
        return {"advice": sentences[-1].strip()} if sentences else None


@dataclass(frozen=True)
class OwnScales:
    """The losses of a step had different loss scales. Numbers: scales, step."""

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        mixed = [each for each in run.history.mixed_scales if each.step >= run.begin]
        if not mixed:
            return None
        scales = ", ".join(power(scale, raised=True) for scale in mixed[-1].scales)
        return {"scales": scales, "at": f"{mixed[-1].step:,}"}


@dataclass(frozen=True, init=False)
class Both:
    """All of several conditions at the same time, with the numbers of all; of equal names the last."""

    conditions: tuple[Condition, ...]

    def __init__(self, *conditions: Condition) -> None:
        object.__setattr__(self, "conditions", conditions)

    def met(self, run: Observed) -> Numbers | None:
        """See `Condition`."""
        found: dict[str, str] = {}
        for condition in self.conditions:
            numbers = condition.met(run)
            if numbers is None:
                return None
            found |= numbers
        return found
