"""The table of skipped steps as plain values: steps that follow one another in one row, each row with its reason.

The first skip of the run comes first and stays there; the others follow, the newest first. No widget here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from amplab.display.numbers import count
from amplab.lab import History, SkipExplanation, StepRecord
from amplab.lab.run_status import damage

__all__ = ["GONE", "LIMIT", "UNRECORDED", "UNWATCHED", "skipped_payload"]

LIMIT = 100
"""Rows in the page; the history and the run log hold every skipped step."""

KINDS = {
    "scale": "loss scale",
    "format": "float16 range",
    "data": "data",
    "divergence": "divergence",
    "injected": "injected",
    "weights": "weights",
    "float32": "float32 too",
    "other-rank": "another rank",
    "once": "not repeated",
    "open": "not explained",
}
"""What the page calls each kind of reason."""

GONE = "Not explained: explanations had used up their 5 % of the time, and the step cannot run again any more."
UNWATCHED = (
    "Not explained: the watch cannot run this step again. Pass loss= or step= to amplab.lab.watch, and iterate over "
    "w.batches(loader)."
)
UNRECORDED = "Not explained: the run log holds no reason for this step."
OPEN = "Not explained yet: explanations had used up their 5 % of the time. Press Explain, or pause the run."


def skipped_payload(
    history: History,
    *,
    explainable: Sequence[int] = (),
    walkable: Sequence[int] = (),
    gone: str = GONE,
    limit: int = LIMIT,
) -> dict[str, Any]:
    """Return the rows, the sentence above the table, and the number of skipped steps.

    Args:
        history: The run.
        explainable: Steps that can still run again, in order.
        walkable: Those of them that can be shown in their stages.
        gone: Why a step without explanation has none, if it cannot run again.
        limit: Largest number of rows.
    """
    total, explanations = history.skip_count, history.explanations
    groups = history.skip_groups()
    shown = [*reversed(groups[max(1, len(groups) - limit + 1) :].tolist()), *groups[:1].tolist()]
    told = sorted(explanations)
    spans = [span for first, last in shown for span in _spans(first, last, told, explanations)]
    ends = history.records_at([row for begin, end, _ in spans for row in (begin, end)])
    rows = [_row(*each) for each in zip(ends[::2], ends[1::2], (why for _, _, why in spans), strict=True)]
    for row in rows:
        can_explain, can_walk = (_first_in(row, steps) for steps in (explainable, walkable))
        if row["kind"] == "open":
            row["explain"] = can_explain
            row["why"] = _unexplained(row["why"], gone if can_explain is None else OPEN)
        row["walk"] = can_walk
        row["is_first"] = bool(row["step"] == groups[0][0])  # a step of an array: NumPy's bool is not JSON
    rows.sort(key=lambda row: not row["is_first"])  # stable: only the first skip of the run moves
    return {
        "rows": rows,
        "summary": " ".join(filter(None, (_broken(history), _sentence(total, len(groups), limit)))),
        "count": f"{total:,}" if total else "",
    }


def _first_in(row: Mapping[str, Any], steps: Sequence[int]) -> int | None:
    """The first of some steps in order that a row holds: the explained one if it is among them; None for none."""
    low, high = bisect_left(steps, row["step"]), bisect_right(steps, row["last"])
    within = steps[low:high]
    return row["explained"] if row["explained"] in within else next(iter(within), None)


def _spans(
    first: int, last: int, told: Sequence[int], explanations: Mapping[int, SkipExplanation]
) -> Iterator[tuple[int, int, SkipExplanation | None]]:
    """Yield first, last and reason of each row for skips that follow one another.

    The newest comes first, and there is one more wherever the reason changes. `told` are the explained steps in order.
    """
    found = [explanations[step] for step in told[bisect_left(told, first) : bisect_right(told, last)]]
    starts = [next(alike) for _, alike in groupby(found, key=lambda each: each.kind)]
    begins = [first, *(each.step for each in starts[1:])]
    ends = [*(step - 1 for step in begins[1:]), last]
    whys: list[SkipExplanation | None] = [*starts] or [None]
    yield from reversed(list(zip(begins, ends, whys, strict=True)))


def _row(began: StepRecord, ended: StepRecord, why: SkipExplanation | None) -> dict[str, Any]:
    first, last = began.step, ended.step
    kind = "open" if why is None else why.kind
    return {
        "step": first,
        "last": last,
        "steps": f"{first:,}" if first == last else f"{first:,} – {last:,}",
        "times": "" if first == last else f"{last - first + 1:,} in a row",
        "before": began.loss_scale,
        "after": ended.next_loss_scale,
        "level": began.opt_level,
        "kind": kind,
        "label": KINDS[kind],
        "why": began.first_nonfinite if why is None else _sentence_of(why, first, last),
        "line": "" if why is None else why.line,
        "explained": None if why is None else why.step,
        "explain": None,
    }


def _sentence_of(why: SkipExplanation, first: int, last: int) -> str:
    at = f"step {why.step:,}: " if first != last else ""
    return f"{at}{why.sentence}"


def _unexplained(parameter: str | None, said: str) -> str:
    return f"{said} First gradient that is not finite: {parameter}." if parameter else said


def _broken(history: History) -> str:
    """Return since which step no loss has been finite, or "" if the last one is."""
    found = damage(history)
    if found is None:
        return ""
    began, word = found
    return (
        f"The loss is {word} since step {began:,}. A static loss scale (or O3) did not skip that step, so the "
        "weights are damaged: press Reset to start over."
    )


def _sentence(total: int, groups: int, limit: int) -> str:
    if total == 0:
        return (
            "A dynamic loss scale skips a step whose gradients are not finite, and halves. A static one skips no step."
        )
    listed = f"; the first and the latest {limit - 1} rows are listed" if groups > limit else ""
    return f"{count(total, 'step')} skipped{listed}. The first one comes first."
