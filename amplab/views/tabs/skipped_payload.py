"""The table of skipped steps as plain values. No widget here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from amplab.diagnose import FirstNonfinite
from amplab.display.numbers import count, power
from amplab.lab import History, StepRecord

__all__ = ["LIMIT", "explanation", "is_broken", "skipped_payload"]

NOTHING: Mapping[int, str] = MappingProxyType({})

LIMIT = 200
"""Rows in the page; the history and the run log hold every skipped step."""


def skipped_payload(history: History, explained: Mapping[int, str] = NOTHING, limit: int = LIMIT) -> dict[str, object]:
    """Return one row for each skipped step, newest first, and the sentence above the table.

    Args:
        history: The run.
        explained: The cause of a skipped step, by the number of the step.
        limit: Largest number of rows.
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


def explanation(found: FirstNonfinite | None) -> str:
    """Return in a few words what the replay of a skipped step found."""
    if found is None:
        return "not reproduced: the weights have changed since"
    where = found.tensor if found.record is None else f"{found.record.op} in {found.record.module or 'the loss'}"
    phase = f", {found.phase}" if found.phase else ""
    fits = f"; no overflow at a scale of {power(found.fitting_scale, raised=True)}" if found.fitting_scale else ""
    return f"{_CAUSES.get(found.cause, f'{found.cause} not finite')}: {where}{phase}{fits}"


_CAUSES = {
    "scale": "loss scale too large",
    "format": "overflows float16 at any loss scale",
    "model": "not finite in float32 either",
    "state": "finite when repeated",
}


def _row(record: StepRecord, explained: str | None) -> dict[str, object]:
    return {
        "step": record.step,
        "before": record.loss_scale,
        "after": record.next_loss_scale,
        "tensor": record.first_nonfinite or "–",
        "level": record.opt_level,
        "cause": "; ".join(filter(None, (f"injected {record.injected}" if record.injected else None, explained)))
        or "unknown; no fault injected",
    }


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
