"""The table of skipped steps as plain values. No widget here."""

from __future__ import annotations

from amplab.lab import History, StepRecord

__all__ = ["LIMIT", "overflows_payload"]

LIMIT = 200
"""Rows in the page; the history and the run log hold them all."""


def overflows_payload(history: History, limit: int = LIMIT) -> dict:
    """Return one row for each skipped step, newest first, and the sentence above the table."""
    total = history.skip_count
    latest = history.skips(max(0, total - limit))
    return {
        "rows": [_row(record) for record in reversed(latest)],
        "summary": _sentence(total, sum(record.injected is not None for record in latest), limit),
        "count": f"{total:,}" if total else "",
    }


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
