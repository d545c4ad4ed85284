"""The table of skipped steps as plain values. No widget here."""

from __future__ import annotations

import math

import numpy as np

from amplab.lab import History, StepRecord

__all__ = ["LIMIT", "is_broken", "overflows_payload"]

LIMIT = 200
"""Rows in the page; the history and the run log hold them all."""


def overflows_payload(history: History, limit: int = LIMIT) -> dict:
    """Return one row for each skipped step, newest first, and the sentence above the table."""
    total = history.skip_count
    latest = history.skips(max(0, total - limit))
    sentence = _sentence(total, sum(record.injected is not None for record in latest), limit)
    broken = _broken_sentence(history)
    return {
        "rows": [_row(record) for record in reversed(latest)],
        "summary": f"{broken} {sentence if total else ''}".strip() if broken else sentence,
        "count": f"{total:,}" if total else "",
    }


def is_broken(history: History) -> bool:
    """Return whether the last step had a loss of NaN or inf and was not skipped."""
    last = history.last
    return last is not None and not last.skipped and not math.isfinite(last.loss)


def _broken_sentence(history: History) -> str:
    """Say since which step no loss has been finite, where the weights took it in; else nothing."""
    if not is_broken(history):
        return ""
    losses, steps = history.column("loss"), history.column("step")
    finite = np.flatnonzero(np.isfinite(losses))
    first = int(finite[-1]) + 1 if len(finite) else 0
    if first == len(steps):  # a step came between
        return ""
    word = "NaN" if np.isnan(losses[-1]) else "inf"
    return (
        f"The loss is {word} since step {steps[first]:,}: a static scale (or O3) let it into the weights; "
        f"Reset begins anew."
    )


def _row(record: StepRecord) -> dict:
    return {
        "step": record.step,
        "before": record.loss_scale,
        "after": record.next_loss_scale,
        "tensor": record.first_nonfinite or "–",
        "level": record.opt_level,
        "cause": f"injected {record.injected}" if record.injected else "not injected",
    }


def _sentence(total: int, injected: int, limit: int) -> str:
    if total == 0:
        return "A dynamic scale skips a step whose gradients are not finite, and halves; a static one lets it through."
    if total > limit:
        return f"{total:,} steps skipped; the latest {limit} are listed, {injected} of them with an injected fault."
    return f"{total:,} step{'s' * (total != 1)} skipped, {injected} with an injected fault."
