"""What a benchmark says: a goal, a row, and the rows of one run with the machine they were measured on.

    at least g    ratio = their time / our time     "3 times as fast"
    at most g     ratio = our time / their time     "1.08 times their time"

A figure that misses its goal is told, not an error. Text and JSON of the rows are in `report`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BenchResults", "Goal", "Row"]


@dataclass(frozen=True)
class Goal:
    """What a ratio has to reach.

    >>> Goal("at most", 1.08).met_by(1.05), str(Goal("at least", 3.0))
    (True, '≥ 3')

    Attributes:
        sense: whether more is better or less.
        value: the bound, itself good enough.
    """

    sense: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        """Show the bound as the table does."""
        return f"{'≥' if self.sense == 'at least' else '≤'} {self.value:g}"

    def met_by(self, ratio: float) -> bool:
        """Whether ``ratio`` is good enough."""
        return ratio >= self.value if self.sense == "at least" else ratio <= self.value

    def ratio(self, ours: float, theirs: float) -> float:
        """The ratio of two times in the sense of this goal."""
        return theirs / ours if self.sense == "at least" else ours / theirs


@dataclass(frozen=True)
class Row:
    """One comparison, measured.

    Attributes:
        name: what was timed.
        against: what it was compared with.
        ratio: median over the rounds of the ratio that `goal` speaks of.
        spread: first and third quartile of the same.
        goal: what the ratio has to reach.
        met: whether it does.
        details: median milliseconds of both, how often each ran, sizes.
    """

    name: str
    against: str
    ratio: float
    spread: tuple[float, float]
    goal: Goal
    met: bool
    details: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchResults:
    """The rows of one suite.

    Attributes:
        suite: its name.
        machine: where and when it was measured (`machine_facts`).
        rows: in the order in which they were measured.
    """

    suite: str
    machine: Mapping[str, float | int | str]
    rows: tuple[Row, ...]
