"""Rules about when a learning-rate scheduler steps: pure functions from a `Rehearsal` to findings, all of them notes.

    scheduler-before-step    it steps before its optimizer, so its first learning rate is never used
    scheduler-counts-skips   it advances in a step that the loss scaler skips

One lost value of a schedule rarely matters. `rules.run` reports skips that shorten a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.train_step.rehearsal import Rehearsal
from amplab.diagnose.train_step.schedules import ScheduleMove

__all__ = ["SCHEDULE_RULES", "schedule_findings"]


def schedule_findings(rehearsal: Rehearsal, api: Api) -> list[Finding]:
    """Apply every rule of this file."""
    return [found for rule in SCHEDULE_RULES for found in rule(rehearsal, api)]


def moves_before_the_step(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A scheduler that had stepped before its optimizer did."""
    for move in rehearsal.schedules:
        if move.before_step:
            yield _finding("scheduler-before-step", move, api)


def counts_skipped_steps(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A scheduler that advanced in a step with an overflow, in which its optimizer did not change the parameters."""
    for move in rehearsal.skipped.schedules if rehearsal.skipped else ():
        if move.without_step:
            yield _finding("scheduler-counts-skips", move, api)


def _finding(name: str, move: ScheduleMove, api: Api) -> Finding:
    number = move.optimizer
    return finding(
        name, api=api, tensor=f"optimizer {number}", evidence={"optimizer": number}, scheduler=move.scheduler
    )


SCHEDULE_RULES: tuple[Callable[[Rehearsal, Api], Iterator[Finding]], ...] = (
    moves_before_the_step,
    counts_skipped_steps,
)
