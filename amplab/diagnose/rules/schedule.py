"""Rules about when a learning-rate schedule moves: pure functions from a `Rehearsal` to findings, notes all of them.

    scheduler-before-step    it moves before its optimizer's step, whose first rate is never used
    scheduler-counts-skips   it moves in a step that the loss scaler skips

A schedule is rarely worse for one value lost. Where skips have cost it a warm-up, `rules.run` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amplab.diagnose.finding import Finding
from amplab.diagnose.remedies.api_styles import scheduler_after_step, step_before_scheduler
from amplab.diagnose.train_step.rehearsal import Rehearsal

__all__ = ["SCHEDULE_RULES", "schedule_findings"]


def schedule_findings(rehearsal: Rehearsal, face: str = "") -> list[Finding]:
    """Apply every rule of this file; in the words of a face, see `remedies.api_styles`."""
    return [finding for rule in SCHEDULE_RULES for finding in rule(rehearsal, face)]


def moves_before_the_step(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """A scheduler that had moved when its optimizer was stepped."""
    for move in rehearsal.schedules:
        if move.before_step:
            yield Finding(
                "scheduler-before-step",
                "note",
                f"{move.scheduler} moves before optimizer {move.optimizer} steps.",
                "Its first learning rate is never used, and all others come one step early; torch warns of it.",
                step_before_scheduler(face),
                tensor=f"optimizer {move.optimizer}",
                evidence={"optimizer": move.optimizer},
            )


def counts_skipped_steps(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """A scheduler that moved in a step with an overflow, in which its optimizer's parameters did not."""
    for move in rehearsal.skipped.schedules if rehearsal.skipped else ():
        if move.without_step:
            yield Finding(
                "scheduler-counts-skips",
                "note",
                f"{move.scheduler} moves on in a step that is skipped for an overflow.",
                "Most loops do so, and a skip now and then does no harm. Where the first steps are skipped, a warm-up "
                "is shorter than meant, and torch warns.",
                scheduler_after_step(face),
                tensor=f"optimizer {move.optimizer}",
                evidence={"optimizer": move.optimizer},
            )


SCHEDULE_RULES: tuple[Callable[[Rehearsal, str], Iterator[Finding]], ...] = (
    moves_before_the_step,
    counts_skipped_steps,
)
