"""The report of a `run` in a cell: a few lines of numbers, the same for equal runs. No widget here."""

from __future__ import annotations

from dataclasses import dataclass

from amplab.display.numbers import power
from amplab.lab import ExperimentConfig, History
from amplab.lab.tasks import Score, score_named

__all__ = ["RunReport", "run_report"]


@dataclass(frozen=True, repr=False)
class RunReport:
    """The results of some steps of a run.

    Attributes:
        config: The experiment, as a string.
        steps: Steps of this call.
        total: Steps of the run so far.
        skipped: How many of `steps` were skipped.
        first_scale: Loss scale of the first of them.
        next_scale: Loss scale that the next step will use.
        first_loss: Training loss of the first of them.
        last_loss: Training loss of the last of them.
        measured: What the task measures on held-out data; None if nothing.
        score: Its last measured value, None before the first measurement.
    """

    config: str
    steps: int
    total: int
    skipped: int
    first_scale: float
    next_scale: float
    first_loss: float
    last_loss: float
    measured: Score | None
    score: float | None

    def __repr__(self) -> str:
        """Return one line for each number, with losses rounded to tenths and an accuracy to whole percents."""
        lines = [] if self.measured is None else [f"{self.measured.name:11} {_score_text(self.measured, self.score)}"]
        return "\n".join(
            [
                self.config,
                f"steps       {self.steps} (now at {self.total}), {self.skipped} skipped",
                f"loss scale  {power(self.first_scale)} -> {power(self.next_scale)}",
                f"loss        {self.first_loss:.1f} -> {self.last_loss:.1f}",
                *lines,
            ]
        )


def run_report(config: ExperimentConfig, history: History, steps: int) -> RunReport:
    """Return the report of the last `steps` steps of `history`."""
    first, last, total = history.record(-steps), history.record(-1), len(history)
    return RunReport(
        config=str(config),
        steps=steps,
        total=total,
        skipped=int(history.column("skipped")[-steps:].sum()),
        first_scale=first.loss_scale,
        next_scale=last.next_loss_scale,
        first_loss=first.loss,
        last_loss=last.loss,
        measured=score_named(config.task),
        score=history.last_score,
    )


def _score_text(measured: Score, value: float | None) -> str:
    if value is None:
        return "not measured yet"
    return f"{100 * value:.0f} %" if measured.is_share else measured.text(value)
