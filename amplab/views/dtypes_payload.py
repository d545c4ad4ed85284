"""The table of op dtypes as plain values, from a trace of one training step.

A row is one op: its number, name, module, the dtypes in and out with repetitions counted, and the reason. Views and
other ops that move no numbers are left out, as in the trace's own table. No widget here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from amplab.trace import OpRecord, TensorInfo, Trace

__all__ = ["dtypes_payload"]


def dtypes_payload(trace: Trace, *, before: Trace | None = None, levels: tuple[str | None, str] = (None, "")) -> dict:
    """Return the rows of the table and the sentence above it.

    Args:
        trace: The step at the present opt_level.
        before: The trace at the level before; rows that differ from it are marked.
        levels: Names of the level before (None at first) and of the present one.
    """
    changed = trace.changed_since(before) if before is not None else frozenset()
    shown = [record for record in trace.records if not record.is_view]
    rows = [_row(number, record, record.index in changed) for number, record in enumerate(shown, start=1)]
    return {"rows": rows, "summary": _sentence(rows, shown, before, levels)}


def _row(number: int, record: OpRecord, changed: bool) -> dict:
    return {
        "number": number,
        "op": record.op,
        "aten": record.aten,
        "phase": record.phase,
        "module": record.module,
        "inputs": _dtypes(record.inputs),
        "outputs": _dtypes(record.outputs),
        "reason": f"{record.reason} ({record.note})" if record.note else record.reason,
        "cast": record.is_cast,
        "changed": changed,
    }


def _dtypes(infos: Iterable[TensorInfo]) -> list[list]:
    """Dtypes in order, equal neighbours counted: float32, float32, float16 -> [["float32", 2], ["float16", 1]]."""
    return [[name, len(list(group))] for name, group in groupby(info.dtype_name for info in infos)]


def _sentence(
    rows: list[dict], shown: list[OpRecord], before: Trace | None, levels: tuple[str | None, str]
) -> str:
    casts = [record.cast_bytes for record in shown if record.is_cast]
    moved = f"{len(casts)} casts, {sum(casts) / 1000:.0f} kB" if casts else "no casts"
    parts = [f"{levels[1]}: {len(rows)} ops", moved]
    if before is not None:
        since = levels[0] if levels[0] != levels[1] else "the change"
        changed = sum(row["changed"] for row in rows)
        parts.append(f"since {since}: {changed} changed, casts {len(before.casts)} → {len(casts)}")
    return " · ".join(parts)
