"""The table of op dtypes as plain values, from a trace of one training step.

Its rows are those of `Trace.rows`: an op, or several in succession that differ only in shape, with the dtypes of its
inputs and outputs, the number of repetitions and the reason. No widget here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from amplab.display.numbers import count, size
from amplab.trace import OpRecord, Trace

__all__ = ["dtypes_payload"]


def dtypes_payload(
    trace: Trace, *, before: Trace | None = None, levels: tuple[str | None, str] = (None, "")
) -> dict[str, Any]:
    """Return the rows of the table and the sentence above it.

    Args:
        trace: The step at the present opt_level.
        before: The trace at the previous level; rows that differ from it are marked.
        levels: Names of the previous level (None at first) and of the present one.
    """
    changed = trace.changed_since(before) if before is not None else frozenset()
    rows = [_row(row, any(record.index in changed for record in group)) for row, group in _rows_with_records(trace)]
    return {"rows": rows, "summary": _sentence(rows, trace, before, levels)}


def _rows_with_records(trace: Trace) -> Iterator[tuple[dict[str, str], list[OpRecord]]]:
    """Yield each row of the trace's table with the records that it combines."""
    records = (record for record in trace if not record.folds)
    for row in trace.rows():
        yield row, list(islice(records, int(row["times"])))


def _row(row: dict[str, str], changed: bool) -> dict[str, Any]:
    return {
        "index": row["index"],
        "op": row["op"],
        "times": int(row["times"]),
        "aten": row["aten"],
        "shapes": row["shapes"],
        "phase": row["phase"],
        "module": row["module"],
        "inputs": _counted(row["in"]),
        "outputs": _counted(row["out"]),
        "reason": f"{row['reason']} ({row['note']})" if row["note"] else row["reason"],
        "cast": row["cast"] == "yes",
        "changed": changed,
    }


def _counted(dtypes: str) -> list[list[object]]:
    """Return dtypes in order, with the number of equal ones in succession.

    >>> _counted("float32, float32, float16")
    [['float32', 2], ['float16', 1]]
    """
    return [[name, len(list(group))] for name, group in groupby(dtypes.split(", "))] if dtypes else []


def _sentence(rows: list[dict[str, Any]], trace: Trace, before: Trace | None, levels: tuple[str | None, str]) -> str:
    casts = len(trace.casts)
    moved = f"{count(casts, 'cast')}, {size(trace.cast_bytes)}" if casts else "no casts"
    parts = [f"{levels[1]}: {count(sum(row['times'] for row in rows), 'op')}", moved]
    if before is not None:
        since = levels[0] if levels[0] != levels[1] else "the change"
        changed = count(sum(row["changed"] for row in rows), "row")
        parts.append(f"since {since}: {changed} changed, casts {len(before.casts)} → {casts}")
    return " · ".join(parts)
