"""Measured rows as a table to read and as JSON to keep.

The JSON is one object: ``{"amplab_bench": 1, "suite": …, "machine": {…}, "rows": [{"name": …, "goal": "≥ 3", …}]}``.
"""

import json
import textwrap
from typing import Any

from amplab.bench.rows import BenchResults, Row

__all__ = ["FORMAT", "as_json", "as_text"]

FORMAT = 1
"""Version of the JSON, the value of "amplab_bench"."""

_HEADS = ("what", "against", "ratio", "quartiles", "goal", "")
_WIDTH = 120


def as_text(results: BenchResults) -> str:
    """Return the table, with the machine below it."""
    lines = [_HEADS, *(_cells(row) for row in results.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    table.insert(1, "-" * max(map(len, table)))
    return "\n".join([*table, "", *_foot(results)])


def as_json(results: BenchResults) -> str:
    """Return the JSON, indented."""
    rows = [_entry(row) for row in results.rows]
    whole = {"amplab_bench": FORMAT, "suite": results.suite, "machine": dict(results.machine), "rows": rows}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.spread
    verdict = "met" if row.met else "missed"
    return row.name, row.against, f"{row.ratio:.2f}", f"{low:.2f}–{high:.2f}", str(row.goal), verdict


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
