"""Measured rows as a table to read and as JSON to keep.

The JSON is one object: ``{"amplab_bench": 1, "suite": …, "machine": {…}, "rows": [{"name": …, "goal": "≥ 3", …}]}``.
"""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from amplab.bench.rows import BenchResults, Row

__all__ = ["FORMAT", "as_json", "as_text"]

FORMAT = 1
"""Version of the JSON, the value of "amplab_bench"."""

_HEADS = ("what", "against", "ratio", "quartiles", "goal", "")
_BESIDE = {"python_ms": "python", "bound_ms": "of bound"}  # columns of those tables that have them
_WIDTH = 120


def as_text(results: BenchResults) -> str:
    """Return the table, with the machine below it."""
    beside = [key for key in _BESIDE if any(key in row.details for row in results.rows)]
    lines = [(*_HEADS, *(_BESIDE[key] for key in beside)), *(_cells(row, beside) for row in results.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    table.insert(1, "-" * max(map(len, table)))
    return "\n".join([*table, "", *_foot(results)])


def as_json(results: BenchResults) -> str:
    """Return the JSON, indented."""
    rows = [_entry(row) for row in results.rows]
    whole = {"amplab_bench": FORMAT, "suite": results.suite, "machine": dict(results.machine), "rows": rows}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _cells(row: Row, beside: Sequence[str]) -> tuple[str, ...]:
    low, high = row.spread
    verdict = "met" if row.met else "missed"
    ratio = f"{row.ratio:.2f}", f"{low:.2f}–{high:.2f}"
    return row.name, row.against, *ratio, str(row.goal), verdict, *(_beside(row, key) for key in beside)


def _beside(row: Row, key: str) -> str:
    """How many times as fast as plain Python; how near to the bound. Empty where it was not measured."""
    if key not in row.details:
        return ""
    times = float(row.details[key]) / float(row.details["ours_ms"])
    return f"{times:.0%}" if key == "bound_ms" else f"{times:.1f} ×"


def _entry(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "against": row.against,
        "ratio": row.ratio,
        "spread": list(row.spread),
        "goal": str(row.goal),
        "met": row.met,
        "details": dict(row.details),
    }


def _foot(results: BenchResults) -> list[str]:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    met = sum(row.met for row in results.rows)
    explained = (
        f"{met} of {len(results.rows)} goals met. Medians of interleaved rounds, one thread; ≥: how many times as "
        "fast, ≤: how many times the time."
    )
    return [*textwrap.wrap(explained, _WIDTH), *textwrap.wrap(facts, _WIDTH)]
