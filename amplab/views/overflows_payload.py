"""The table of skipped steps as plain values. No widget here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from amplab.diagnose import FirstNonfinite
from amplab.lab import History, StepRecord

__all__ = ["LIMIT", "explanation", "is_broken", "overflows_payload"]

NOTHING: Mapping[int, str] = MappingProxyType({})

LIMIT = 200
"""Rows in the page; the history and the run log hold them all."""


def overflows_payload(history: History, explained: Mapping[int, str] = NOTHING, limit: int = LIMIT) -> dict:
    """Return one row for each skipped step, newest first, and the sentence above the table.

    Args:
        history: The run.
        explained: What was found out about a skipped step, by its number.
        limit: Rows at most.
    """
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


def explanation(found: FirstNonfinite | None) -> str:
    """Return in a few words what a replay has found."""
    if found is None:
        return "not found again: the weights have moved on"
    where = found.tensor if found.record is None else f"{found.record.op} in {found.record.module or 'the loss'}"
    phase = f", {found.phase}" if found.phase else ""
    fits = f"; fits at {found.fitting_scale:g}" if found.fitting_scale else ""
    return f"{_CAUSES.get(found.cause, f'{found.cause} not finite')}: {where}{phase}{fits}"


_CAUSES = {
    "scale": "scale too large",
    "format": "leaves float16 at any scale",
    "model": "not finite in float32 either",
    "state": "finite in a second run",
}


def _row(record: StepRecord, explained: str | None) -> dict:
    return {
        "step": record.step,
        "before": record.loss_scale,
        "after": record.next_loss_scale,
        "tensor": record.first_nonfinite or "–",
        "level": record.opt_level,
        "cause": "; ".join(filter(None, (f"injected {record.injected}" if record.injected else None, explained)))
        or "not injected",
    }


def _sentence(total: int, injected: int, limit: int) -> str:
    if total == 0:
        return "A dynamic scale skips a step whose gradients are not finite, and halves; a static one lets it through."
    if total > limit:
        return f"{total:,} steps skipped; the latest {limit} are listed, {injected} of them with an injected fault."
    return f"{total:,} step{'s' * (total != 1)} skipped, {injected} with an injected fault."
