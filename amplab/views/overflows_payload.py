"""The table of skipped steps as plain values. No widget here."""

from __future__ import annotations

import math

import numpy as np

from amplab.display.numbers import count
from amplab.lab import History, SkipExplanation, StepRecord

__all__ = ["LIMIT", "is_broken", "overflows_payload"]

LIMIT = 200
"""Rows in the page; the history and the run log hold every skipped step."""


def overflows_payload(history: History, limit: int = LIMIT) -> dict[str, object]:
    """Return one row for each skipped step, newest first, and the sentence above the table.

    Args:
        history: The run.
        limit: Largest number of rows.
    """
    explained = history.explanations
    total = history.skip_count
    latest = history.skips(max(0, total - limit))
    sentence = _sentence(total, sum(record.injected is not None for record in latest), limit)
    broken = _broken_sentence(history)
    return {
        "rows": [_row(record, explained.get(record.step)) for record in reversed(latest)],
        "summary": f"{broken} {sentence if total else ''}".strip() if broken else sentence,
        "count": f"{total:,}" if total else "",
    }


def is_broken(history: History) -> bool:
    """Return whether the last step had a loss of NaN or inf and was not skipped."""
    last = history.last
    return last is not None and not last.skipped and not math.isfinite(last.loss)


def _broken_sentence(history: History) -> str:
    """Return since which step no loss has been finite, or "" if the last one is."""
    if not is_broken(history):
        return ""
    losses, steps = history.column("loss"), history.column("step")
    finite = np.flatnonzero(np.isfinite(losses))
    first = int(finite[-1]) + 1 if len(finite) else 0
    if first == len(steps):  # the trainer has added a finite step meanwhile
        return ""
    word = "NaN" if np.isnan(losses[-1]) else "inf"
    return (
        f"The loss is {word} since step {steps[first]:,}. A static loss scale (or O3) did not skip that step, so the "
        "weights are damaged: press Reset to start over."
    )


def _row(record: StepRecord, explained: SkipExplanation | None) -> dict[str, object]:
    return {
        "step": record.step,
        "before": record.loss_scale,
        "after": record.next_loss_scale,
        "tensor": record.first_nonfinite or "–",
        "level": record.opt_level,
        "cause": _cause(record, explained),
    }


def _cause(record: StepRecord, explained: SkipExplanation | None) -> str:
    if explained is not None:
        return explained.sentence
    return f"injected {record.injected}" if record.injected else "not explained"


def _sentence(total: int, injected: int, limit: int) -> str:
    if total == 0:
        return (
            "A dynamic loss scale skips a step whose gradients are not finite, and halves. A static one skips no step."
        )
    if total > limit:
        return (
            f"{count(total, 'step')} skipped; the latest {limit} are listed, {injected} of them with an injected fault."
        )
    return f"{count(total, 'step')} skipped, {injected} with an injected fault."
