"""A whole run: one growing numpy column per field of `StepRecord`, written by one thread, read by any.

No step is dropped, and NaN and inf are kept. Words (opt_level, injected, the first non-finite parameter) are stored as
codes. `History.thinned` picks the rows that a screen can show (`thinning.py`). The file on disk is in `run_log`.

Memory is bounded, however long the run is: 262,144 steps are held in memory, 70 bytes each, older ones in a temporary
file (`growing_columns.py`). Of the histograms of the gradients at most `MOST_SAMPLES` are kept, spread over the run,
and of the steps with several scales the last `MOST_MIXED`; the run log has all.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from amplab.amp import MemoryUse
from amplab.diagnose import ScaleHistory, WhatIf, WhatIfs, what_if, what_ifs
from amplab.formats import FLOAT16, FloatFormat
from amplab.lab.changes import RunChange
from amplab.lab.events import GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.fork_locks import LockOrder, hold_over_forks
from amplab.lab.growing_columns import GrowingColumns
from amplab.lab.levels import LEVELS
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.thinning import JOINED, BlockExtremes, thin
from amplab.policies.signals import DeferredSignals
from amplab.scalers import ScalePath, ScaleRule, first_doubt, measured_overflows, scale_path

__all__ = [
    "COLUMNS",
    "MOST_MIXED",
    "MOST_SAMPLES",
    "History",
    "recorded",
    "row_of",
]

COLUMNS: dict[str, type] = {
    "step": np.int64,
    "loss": np.float64,
    "loss_scale": np.float64,
    "next_loss_scale": np.float64,
    "skipped": np.bool_,
    "first_nonfinite": np.int32,
    "opt_level": np.int32,
    "score": np.float64,
    "seconds": np.float64,
    "injected": np.int32,
    "grad_exponent": np.float64,
}
"""The type of the column of each field of `StepRecord`, in its order; int32 columns are codes of words."""

_WORDS = tuple(name for name, kind in COLUMNS.items() if kind is np.int32)
_MISSING = "missing"  # the column that tells a loss that is missing from one that is NaN
_UNMEASURED = ("score", "grad_exponent")  # NaN where they are None
_PENDING = 256
_ROWS_IN_BLOCK = 4096
_FASTEST = 2**16  # steps that `rate` looks back
_EVERY = slice(None)

MOST_SAMPLES = 1024
"""Histograms of the gradients that a history keeps, and the last one."""

MOST_MIXED = 4096
"""Steps with several scales that a history keeps, the last ones."""

row_of: Callable[[StepRecord], StepRow] = attrgetter(*COLUMNS)
"""The values of a step, in the order of `COLUMNS`."""


def recorded(row: StepRow) -> StepRecord:
    """Return the record of a step from its values; a missing loss is NaN in it."""
    return StepRecord(row[0], math.nan if row[1] is None else row[1], *row[2:])


P = ParamSpec("P")
R = TypeVar("R")


def _filled(method: Callable[Concatenate[History, P], R]) -> Callable[Concatenate[History, P], R]:
    """Let a method of a history run with every step in the columns, and its lock held.

    Signals wait: one in between could leave steps in the columns and among those that are pending, and its handler may
    itself read the history.
    """

    @wraps(method)
    def run(self: History, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with DeferredSignals(), self._lock:
            self._fill()
            return method(self, *args, **kwargs)

    return run


class History:
    """Every step of one run, in order.

    One thread appends. Any thread can read and gets copies, and so can the handler of a signal.

    >>> history = History()
    >>> history.append(StepRecord(0, 2.3, 65536.0, 65536.0, False, None, "O1", None, 0.0, None))
    >>> history
    <History: 1 step, 0 skipped>
    >>> history.thinned(["loss"], 100)["loss"]
    array([2.3])
    >>> [record.loss for record in history]
    [2.3]
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may read while its thread has it
        self._columns = GrowingColumns(COLUMNS | {_MISSING: np.bool_})
        self._pending: list[StepRow] = []  # appended, not yet in the columns
        self._codes: dict[str | None, int] = {None: 0}
        self._words: list[str | None] = [None]
        self._skips = GrowingColumns({"row": np.int64})  # the skipped rows
        self._untold = 0  # steps from the first on whose losses are missing, whatever their column says
        self._levels: list[tuple[int, str]] = []
        self._changes: list[RunChange] = []
        self._memory: list[tuple[int, MemoryUse]] = []
        self._extremes: dict[str, BlockExtremes] = {}
        self._samples: list[GradientSample] = []
        self._last_sample: GradientSample | None = None
        self._samples_seen, self._sample_stride = 0, 1
        self._mixed: deque[MixedScales] = deque(maxlen=MOST_MIXED)
        self._explanations: dict[int, SkipExplanation] = {}
        self._last: StepRow | None = None
        self._last_score: float | None = None
        hold_over_forks(self._lock, LockOrder.HISTORY)

    def append(self, record: StepRecord) -> None:
        """Add the next step."""
        self.append_row(row_of(record))

    def append_row(self, row: StepRow) -> None:
        """Add the next step as its values, with None for a missing loss; the columns are filled later."""
        self._last = row
        score = row[7]  # as in `StepRow`
        if score is not None:
            self._last_score = score
        self._pending.append(row)  # atomic, so that a reader needs the lock and this does not
        if len(self._pending) >= _PENDING:
            with DeferredSignals(), self._lock:
                self._fill()

    def keep(self, sample: GradientSample) -> None:
        """Add a histogram of the gradients, taken at one step."""
        with self._lock:
            if self._samples_seen % self._sample_stride == 0:
                self._samples.append(sample)
            self._samples_seen, self._last_sample = self._samples_seen + 1, sample
            if len(self._samples) > MOST_SAMPLES:
                del self._samples[1::2]
                self._sample_stride *= 2

    @property
    def gradient_samples(self) -> tuple[GradientSample, ...]:
        """The histograms of the gradients, in the order of their steps: at most `MOST_SAMPLES`, and the last one."""
        with self._lock:
            last = [] if self._last_sample is None or self._samples[-1] is self._last_sample else [self._last_sample]
            return (*self._samples, *last)

    def explain(self, explanation: SkipExplanation) -> None:
        """Add why a step was skipped; a later explanation of the same step replaces it."""
        with self._lock:
            self._explanations[explanation.step] = explanation

    @property
    def explanations(self) -> dict[int, SkipExplanation]:
        """Why steps were skipped, by step, as far as they were explained."""
        with self._lock:
            return dict(self._explanations)

    @property
    def explained_count(self) -> int:
        """The number of skipped steps that were explained."""
        return len(self._explanations)

    def keep_memory(self, step: int, memory: MemoryUse) -> None:
        """Add the bytes that training holds from `step` on, unless they are those of before."""
        if not self._memory or self._memory[-1][1] != memory:
            with self._lock:
                self._memory.append((step, memory))

    @property
    def memory(self) -> tuple[tuple[int, MemoryUse], ...]:
        """(step, bytes from this step on), in order; empty for a run that the lab did not train."""
        with self._lock:
            return tuple(self._memory)

    def keep_scales(self, mixed: MixedScales) -> None:
        """Add the scales of a step whose backwards had different ones."""
        with self._lock:
            self._mixed.append(mixed)

    @property
    def mixed_scales(self) -> tuple[MixedScales, ...]:
        """The steps that accumulated backwards at different scales, in order, the last `MOST_MIXED`."""
        with self._lock:
            return tuple(self._mixed)

    def keep_changes(self, *changes: RunChange) -> None:
        """Add what was changed, in the order of the steps."""
        with self._lock:
            self._changes += changes

    @property
    @_filled
    def changes(self) -> tuple[RunChange, ...]:
        """What the run began with and everything that was changed since, in order; of a watched run, its levels."""
        if self._changes:
            return tuple(self._changes)
        return tuple(RunChange(step, "opt_level", level, f"opt_level {level}") for step, level in self._levels)

    def replay(self, rule: ScaleRule | str | None = None) -> WhatIf | WhatIfs:
        """Return what this run would have been under another loss-scaling rule.

        Gradients are measured just before the optimizer steps: those that the loop clipped are measured clipped, so
        an overflow that clipping hid is not seen.

        Args:
            rule: a rule, or the name of a published one (see `amplab.scalers.PUBLISHED_RULES`); None for all published
                ones side by side.

        Raises:
            ValueError: No rule has that name, or the run has no step yet.
        """
        if not len(self):
            raise ValueError("replay(): the run has no step yet; expected at least one. Train it first.")
        samples = [(sample.step, sample.histogram) for sample in self.gradient_samples]
        exponents = [None if math.isnan(value) else value for value in self.column("grad_exponent").tolist()]
        scales, skipped = self.column("loss_scale").tolist(), self.column("skipped").tolist()
        record = ScaleHistory(scales, skipped, exponents, samples, self._range_format())
        return what_ifs(record) if rule is None else what_if(record, rule)

    def scale_paths(self, rules: Mapping[str, ScaleRule]) -> dict[str, tuple[ScalePath, tuple[int, str] | None]]:
        """Return the scales of this run under each rule: those of `replay`, much faster.

        With each comes the first step from which it is a guess, and why; None if there is none.
        """
        overflows = measured_overflows(self.column("grad_exponent"), self.column("loss_scale"), self._range_format())
        paths = {name: scale_path(rule, overflows.limits) for name, rule in rules.items()}
        return {name: (path, first_doubt(path, overflows)) for name, path in paths.items()}

    def _range_format(self) -> FloatFormat:
        """Return the format whose range the gradients of all steps must fit; float16 if there are several."""
        formats = {LEVELS[name].range_format for _, name in self.level_changes() if name in LEVELS}
        return formats.pop() if len(formats) == 1 else FLOAT16

    def __len__(self) -> int:
        """Return the number of steps."""
        with self._lock:
            while True:
                columns, pending = len(self._columns), len(self._pending)
                if columns == len(self._columns):  # else a signal's handler has read the history in between
                    return columns + pending

    def __iter__(self) -> Iterator[StepRecord]:
        """Iterate over the steps that there are now, as records; steps that are added meanwhile are left out.

        Some thousands are read at a time, so that a long run needs little memory. For one value of each step, `column`
        is much faster.
        """
        rows = chain.from_iterable(self.row_blocks())
        return map(recorded, islice(rows, len(self)))

    def __repr__(self) -> str:
        """Return one line with the numbers."""
        return f"<History: {len(self)} step{'s' * (len(self) != 1)}, {self.skip_count} skipped>"

    @property
    def last(self) -> StepRecord | None:
        """The last step, None before the first."""
        return None if self._last is None else recorded(self._last)

    @property
    def last_score(self) -> float | None:
        """The last measured score on held-out data, None before the first."""
        return self._last_score

    @property
    @_filled
    def skip_count(self) -> int:
        """The number of skipped steps."""
        return len(self._skips)

    @_filled
    def column(self, name: str, rows: slice | np.ndarray = _EVERY) -> np.ndarray:
        """Return a copy of one column, `(steps,)`, or of some of its rows: a slice without a step, or rows from 0.

        Words are an object array; a score that was not measured is NaN.
        """
        return self._read(name, rows)

    @_filled
    def record(self, row: int) -> StepRecord:
        """Return one step by its row, from 0 (negative from the end).

        Raises:
            IndexError: There is no such row.
        """
        row = range(len(self._columns))[row]
        return self._records(slice(row, row + 1))[0]

    @_filled
    def loss(self, row: int) -> float | None:
        """Return the loss of one step by its row, as `record`; None if it is missing, or if there is no such row."""
        if not -len(self._columns) <= row < len(self._columns):
            return None
        row = range(len(self._columns))[row]
        at = slice(row, row + 1)
        is_missing = row < self._untold or self._columns.read(_MISSING, at)[0]
        return None if is_missing else float(self._columns.read("loss", at)[0])

    @_filled
    def records_at(self, rows: Sequence[int]) -> list[StepRecord]:
        """Return some steps by their rows, from 0: in one read, which is much faster than `record` for each."""
        return self._records(np.asarray(rows, dtype=np.int64))

    @_filled
    def records(self, start: int = 0) -> list[StepRecord]:
        """Return the steps from row `start` on."""
        return self._records(slice(start, None))

    def row_blocks(self) -> Iterator[list[StepRow]]:
        """Yield the values of all steps in the order of `COLUMNS`, some thousands at a time, as `records` has them."""
        start = 0
        while True:
            block = self._block_of_rows(slice(start, start + _ROWS_IN_BLOCK))
            if not block:
                return
            yield block
            start += len(block)

    @_filled
    def skips(self, start: int = 0) -> list[StepRecord]:
        """Return the skipped steps, from the `start`-th skip on."""
        return self._records(self._skipped_rows()[start:])

    @_filled
    def skipped_steps(self) -> list[int]:
        """Return the numbers of the skipped steps."""
        steps: list[int] = self._columns.read("step", self._skipped_rows()).tolist()
        return steps

    @_filled
    def skip_groups(self) -> np.ndarray:
        """Return the first and the last row of each group of skips that follow one another, `(groups, 2)`.

        Another level or another fault begins a new group.
        """
        rows = self._skipped_rows()
        codes = np.stack([self._columns.read(name, rows) for name in ("opt_level", "injected")])  # (2, skips)
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(codes) != 0).any(axis=0))
        firsts, lasts = np.append(rows[:1], rows[breaks + 1]), np.append(rows[breaks], rows[-1:])
        groups: np.ndarray = np.column_stack([firsts, lasts])
        return groups

    @_filled
    def missing_losses(self, start: int = 0) -> frozenset[int]:
        """Return the steps from row `start` on without a loss; their records hold NaN, as those of a loss that is NaN.

        Args:
            start: negative from the end.
        """
        first, *_ = slice(start, None).indices(len(self._columns))
        missing = self._columns.read(_MISSING, slice(first, None))
        missing[: max(self._untold - first, 0)] = True
        return frozenset(self._columns.read("step", first + np.flatnonzero(missing)).tolist())

    @_filled
    def forget_losses(self) -> None:
        """Mark the loss of every step so far as missing; all must be NaN."""
        self._untold = len(self._columns)

    @_filled
    def level_changes(self) -> list[tuple[int, str]]:
        """Return (step, opt_level) of the first step and of each step whose level differs from the one before."""
        return list(self._levels)

    @_filled
    def rate(self, window: float = 1.0) -> float | None:
        """Return steps per second over the last `window` seconds of training, at most 65,536 steps.

        None before the second step.
        """
        seconds = self._columns.read("seconds", slice(max(0, len(self._columns) - _FASTEST), None))
        if len(seconds) < 2:
            return None
        first = min(int(np.searchsorted(seconds, seconds[-1] - window)), len(seconds) - 2)
        span = float(seconds[-1] - seconds[first])
        return (len(seconds) - 1 - first) / span if span > 0 else None

    @_filled
    def thinned(
        self, columns: Sequence[str], limit: int, low: float = -math.inf, high: float = math.inf
    ) -> dict[str, np.ndarray]:
        """Return some columns thinned to what a screen can show, always with "step" and "skipped".

        Kept are the first and last row, every skipped step while these fit into half of the limit (then the first of
        each bucket of rows), and of each bucket the smallest and the largest finite value and the first NaN, inf and
        -inf of each requested column; see `thinning.thin`. The rows are the same in every column.

        Args:
            columns: Names of `COLUMNS`.
            limit: About how many rows, at least 16.
            low: The first step that is wanted.
            high: The last step that is wanted.

        Raises:
            ValueError: An unknown column, or a limit below 16.
        """
        if limit < 16:
            raise ValueError(f"limit={limit}: expected at least 16 rows; use record() for a single row.")
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise ValueError(f"{unknown[0]!r}: expected a column of a history; choose from {', '.join(COLUMNS)}.")
        names = dict.fromkeys(["step", *columns, "skipped"])
        floats = [name for name in columns if COLUMNS[name] is np.float64]
        rows = self._rows_to_show(floats, limit, *self._span(low, high))
        return {name: self._read(name, rows) for name in names}

    def _fill(self) -> None:
        """Move the pending steps into the columns; steps that are added meanwhile stay pending."""
        fresh = self._pending[:]
        if fresh:
            self._extend(dict(zip(COLUMNS, zip(*fresh, strict=True), strict=True)))
            del self._pending[: len(fresh)]

    @_filled
    def extend(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Add steps as the values of each of `COLUMNS`, as in a `StepRow`; a missing loss is None."""
        self._extend(values)
        self._last = cast(StepRow, tuple(values[name][-1] for name in COLUMNS))
        scores = [score for score in values["score"] if score is not None]
        self._last_score = scores[-1] if scores else self._last_score

    def _extend(self, values: Mapping[str, Sequence[Any]]) -> None:
        missing = [loss is None for loss in values["loss"]]
        coded = {name: self._coded(values[name]) for name in _WORDS}
        now = self._levels[-1][1] if self._levels else None
        if set(values["opt_level"]) != {now}:
            for step, level in zip(values["step"], values["opt_level"], strict=True):
                if level != now:
                    self._levels.append((step, level))
                    now = level
        skips = np.flatnonzero(values["skipped"]) + len(self._columns)
        self._columns.extend({**values, **coded, _MISSING: missing})
        self._skips.extend({"row": skips})

    def _coded(self, words: Sequence[str | None]) -> list[int]:
        """Return the codes of words; a new word gets the next one."""
        for word in dict.fromkeys(words):
            if word not in self._codes:
                self._codes[word] = len(self._words)
                self._words.append(word)
        return [self._codes[word] for word in words]

    def _skipped_rows(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """Return the rows of the skipped steps among some rows."""
        rows = self._skips.read("row", slice(None))
        first, last = np.searchsorted(rows, [start, len(self._columns) if end is None else end])
        return rows[first:last]

    def _span(self, low: float, high: float) -> tuple[int, int]:
        """Return the rows of the steps from `low` to `high`, as first and end."""
        rows = range(len(self._columns))

        def step(row: int) -> int:
            return int(self._columns.read("step", slice(row, row + 1))[0])

        start = 0 if not rows or low <= step(0) else bisect_left(rows, low, key=step)
        end = len(rows) if not rows or high >= step(rows[-1]) else bisect_right(rows, high, key=step)
        return start, end

    def _rows_to_show(self, names: list[str], limit: int, start: int, end: int) -> np.ndarray:
        if end - start <= limit:
            return np.arange(start, end)
        candidates = []
        for name in names or ["seconds"]:
            extremes = self._extremes.setdefault(name, BlockExtremes())
            extremes.extend(self._columns.read(name, slice(extremes.seen, None)))
            # Buckets of at least 8 blocks: what a block on the edge of two buckets hides is a small part of either.
            rows = extremes.rows(start, end, width=(end - start) * (1 + 2 * len(names)) // (limit * JOINED))
            candidates.append((rows - start, self._columns.read(name, rows)))
        return start + thin(end - start, candidates, marked=self._skipped_rows(start, end) - start, limit=limit)

    def _read(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Return some rows of a column, words as an object array."""
        values = self._columns.read(name, rows)
        return np.array(self._words, dtype=object)[values] if name in _WORDS else values

    def _records(self, rows: slice | np.ndarray) -> list[StepRecord]:
        return [recorded(row) for row in self._row_values(rows)]

    @_filled
    def _block_of_rows(self, rows: slice) -> list[StepRow]:
        return self._row_values(rows)

    def _row_values(self, rows: slice | np.ndarray) -> list[StepRow]:
        values = {name: self._read(name, rows).tolist() for name in COLUMNS}
        for name in _UNMEASURED:
            values[name] = [None if math.isnan(value) else value for value in values[name]]
        return list(zip(*values.values(), strict=True))
