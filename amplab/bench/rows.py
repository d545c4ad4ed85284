"""The results of a benchmark: a goal, a row, the rows of one run, and the two forms in which they are printed.

    at least g    ratio = their time / our time     "3 times as fast"
    at most g     ratio = our time / their time     "1.08 times their time"

A row that misses its goal is reported; it is not an error. The JSON is one object::

    {"amplab_bench": 1, "suite": …, "machine": {…}, "rows": [{"name": …, "ratio": 3.1, "goal": "≥ 3", …}]}
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FORMAT", "BenchResults", "Goal", "Row", "as_json", "as_text"]

FORMAT = 1
"""Version of the JSON, the value of "amplab_bench"."""

_HEADS = ("what", "against", "ratio", "quartiles", "goal", "")
_EXTRA_COLUMNS = {
    "python_ms": "python",
    "bound_ms": "of bound",
    "wire_mib": "each rank sends",
}  # columns of the tables that have them
_WIDTH = 120


@dataclass(frozen=True)
class Goal:
    """The bound of a ratio.

    >>> Goal("at most", 1.08).met_by(1.05), str(Goal("at least", 3.0))
    (True, '≥ 3')

    Attributes:
        sense: "at least" if more is better, "at most" if less is.
        value: the bound; a ratio equal to it meets the goal.
    """

    sense: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        """Return the bound as the table shows it."""
        return f"{'≥' if self.sense == 'at least' else '≤'} {self.value:g}"

    def met_by(self, ratio: float) -> bool:
        """Return whether ``ratio`` meets the goal."""
        return ratio >= self.value if self.sense == "at least" else ratio <= self.value

    def ratio(self, ours: float, theirs: float) -> float:
        """Return the ratio of two times in the sense of this goal."""
        return theirs / ours if self.sense == "at least" else ours / theirs


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what was timed.
        against: what it was compared with.
        goal: the bound of the ratio.
        ratio: median of the ratio over the rounds; None if it was not measured.
        spread: first and third quartile of the ratio; None if it was not measured.
        details: median milliseconds of both sides, number of runs and sizes; or ``why`` it was not measured.
    """

    name: str
    against: str
    goal: Goal
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    details: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if the row was not measured."""
        return None if self.ratio is None else self.goal.met_by(self.ratio)

    def entry(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "name": self.name,
            "against": self.against,
            "ratio": self.ratio,
            "spread": None if self.spread is None else list(self.spread),
            "goal": str(self.goal),
            "met": self.met,
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class BenchResults:
    """The rows of one suite.

    Attributes:
        suite: its name.
        machine: where and when it was measured (`machine_facts`).
        rows: in the order in which they were measured.
    """

    suite: str
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]


def as_text(results: BenchResults) -> str:
    """Return the table, and below it the machine."""
    extra = [key for key in _EXTRA_COLUMNS if any(key in row.details for row in results.rows)]
    lines = [(*_HEADS, *(_EXTRA_COLUMNS[key] for key in extra)), *(_cells(row, extra) for row in results.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    table.insert(1, "-" * max(map(len, table)))
    return "\n".join([*table, "", *_foot(results)])


def as_json(results: BenchResults, **more: Any) -> str:
    """Return the JSON, indented, with the fields of ``more`` before the rows."""
    rows = [row.entry() for row in results.rows]
    whole = {"amplab_bench": FORMAT, "suite": results.suite, "machine": dict(results.machine), **more, "rows": rows}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _cells(row: Row, extra: Sequence[str]) -> tuple[str, ...]:
    if row.ratio is None or row.spread is None:
        return row.name, row.against, "not measured", "", str(row.goal), "", *("" for _ in extra)
    low, high = row.spread
    result = "met" if row.met else "missed"
    ratio = f"{row.ratio:.2f}", f"{low:.2f}–{high:.2f}"
    return row.name, row.against, *ratio, str(row.goal), result, *(_extra_cell(row, key) for key in extra)


def _extra_cell(row: Row, key: str) -> str:
    """Return how many times as fast as plain Python, which part of the bound, or MiB; empty if it was not measured."""
    if key not in row.details:
        return ""
    if key == "wire_mib":
        return f"{float(row.details[key]):.1f} MiB"
    times = float(row.details[key]) / float(row.details["ours_ms"])
    return f"{times:.0%}" if key == "bound_ms" else f"{times:.1f} ×"


def _foot(results: BenchResults) -> list[str]:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    measured = [row for row in results.rows if row.ratio is not None]
    met = sum(bool(row.met) for row in measured)
    explained = (
        f"{met} of {len(measured)} goals met. Medians of interleaved rounds, one thread; ≥: how many times as "
        "fast, ≤: how many times the time."
    )
    lines = [*_reasons(results), explained if measured else "Nothing was measured.", facts]
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH)]


def _reasons(results: BenchResults) -> list[str]:
    """Return why rows were not measured, each reason once."""
    names: dict[str, dict[str, None]] = {}
    for row in results.rows:
        if "why" in row.details:
            names.setdefault(str(row.details["why"]), {})[row.name] = None
    few = 3
    return [
        f"No figure for {', '.join(rows) if len(rows) <= few else f'{len(rows)} cases'}: {why}."
        for why, rows in names.items()
    ]
