"""Thinning: which rows of a long run a screen needs, namely those that a drawing of all rows would show.

The rows are cut into buckets of equal length. Of each bucket these are kept, for every column: the first row, the
smallest and the largest finite value, and the first NaN, the first inf and the first -inf, because these are drawn at
the edge. Marked rows (skipped steps) are all kept while they fit into half of the limit; beyond that, the first of
each bucket. Long columns are searched through `BlockExtremes`, which grows with the run, so the cost does not:
the blocks are an eighth of a bucket, or 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

__all__ = ["BLOCK", "JOINED", "BlockExtremes", "extreme_rows", "thin"]

BLOCK = 64
"""Rows in the smallest blocks of `BlockExtremes`."""

JOINED = 8
"""Blocks in the next larger one."""


def extreme_rows(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the positions that represent each bucket: smallest and largest finite, first NaN, first inf, first -inf.

    Args:
        values: `(rows,)`, numbers.
        starts: `(buckets,)`, increasing positions where buckets begin, the first 0; no bucket is empty.

    Returns:
        Sorted unique positions, at most five for each bucket.
    """
    lengths = np.diff(starts, append=len(values))
    bucket = np.repeat(np.arange(len(starts)), lengths)
    finite = np.isfinite(values)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    wanted = [finite & (values == low[bucket]), finite & (values == high[bucket])]
    if not finite.all():
        wanted += [np.isnan(values), values == np.inf, values == -np.inf]
    rows: np.ndarray = np.unique(np.concatenate([_first_of_each(mask, bucket) for mask in wanted]))
    return rows


def _first_of_each(mask: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """Return, for each bucket with a True, the position of its first one."""
    rows = np.flatnonzero(mask)
    first: np.ndarray = rows[_starts(bucket[rows])]
    return first


def _starts(values: np.ndarray) -> np.ndarray:
    """Return the positions where a sorted array has a value for the first time."""
    return np.flatnonzero(np.diff(values, prepend=values[:1] - 1))


class BlockExtremes:
    """The extreme rows of every complete block of rows of one column, extended as the column grows.

    Blocks of `BLOCK` rows are joined, `JOINED` at a time, to larger blocks, so that few rows describe a long range.
    """

    def __init__(self) -> None:
        self._levels = [_Blocks(BLOCK)]
        self._length = 0

    @property
    def seen(self) -> int:
        """Rows in complete blocks, which are not read again."""
        return self._levels[0].end

    def extend(self, fresh: np.ndarray) -> None:
        """Take the values from row `seen` to the end of the column."""
        start, self._length = self.seen, self.seen + len(fresh)
        self._levels[0].extend(np.arange(start, self._length), fresh, self._length)
        largest = self._levels[-1]
        if largest.end >= JOINED * largest.size:
            self._levels.append(_Blocks(JOINED * largest.size))
        for small, large in pairwise(self._levels):
            if small.end - large.end >= large.size:
                large.extend(*small.extremes, small.end)

    def rows(self, start: int = 0, end: int | None = None, *, width: int = BLOCK) -> np.ndarray:
        """Return the sorted candidate rows of the column from `start` to before `end`.

        They are the extremes of the complete blocks in between, of at most `width` rows where there are several sizes,
        and all rows of the smallest blocks that are cut.
        """
        end = self._length if end is None else end
        fitting = [level for level in self._levels if level.size <= max(width, BLOCK)]
        return np.concatenate([*_candidates(fitting, start, end)])


class _Blocks:
    """The extreme rows, and their values, of every complete block of `size` rows; the blocks end before row `end`."""

    def __init__(self, size: int) -> None:
        self.size, self.end = size, 0
        self._parts = [(np.arange(0), np.arange(0.0))]

    @property
    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """The extreme rows of all blocks in order, and their values."""
        if len(self._parts) > 1:
            rows, values = zip(*self._parts, strict=True)
            self._parts = [(np.concatenate(rows), np.concatenate(values))]
        return self._parts[0]

    def extend(self, rows: np.ndarray, values: np.ndarray, end: int) -> None:
        """Take the sorted rows before `end` that can be extremes, and their values; those of old blocks are ignored."""
        complete = end - end % self.size
        fresh = slice(*np.searchsorted(rows, [self.end, complete]))
        rows, values, self.end = rows[fresh], values[fresh], complete
        if len(rows):
            kept = extreme_rows(values, _starts(rows // self.size))
            self._parts.append((rows[kept], values[kept]))


def _candidates(levels: Sequence[_Blocks], start: int, end: int) -> Iterator[np.ndarray]:
    """Yield the rows of the largest blocks between `start` and `end`; smaller ones describe what these cut."""
    if not levels:
        yield np.arange(start, end)
        return
    *smaller, largest = levels
    first = min(-(-start // largest.size) * largest.size, end)  # of the first block that is not cut
    last = max(first, min(largest.end, end - end % largest.size))
    known, _ = largest.extremes
    yield from _candidates(smaller, start, first)
    yield known[slice(*np.searchsorted(known, [first, last]))]
    yield from _candidates(smaller, last, end)


def thin(
    total: int, candidates: Sequence[tuple[np.ndarray, np.ndarray]], *, marked: np.ndarray, limit: int
) -> np.ndarray:
    """Return the sorted rows to draw, about `limit` of them, or all rows if they fit.

    Args:
        total: The number of rows.
        candidates: For each column to draw the sorted rows that can be extremes (`BlockExtremes.rows`), and their
            values.
        marked: Sorted rows that must be drawn.
        limit: Number of rows, at least 16. Columns with many NaN or inf among finite values can exceed it.
    """
    if total <= limit:
        return np.arange(total)
    if len(marked) > limit // 2:
        marked = _spread(marked, total, limit // 2)
    per_bucket = 1 + 2 * len(candidates)
    buckets = max(1, (limit - len(marked)) // per_bucket)
    width = -(-total // buckets)
    kept: list[np.ndarray] = [np.arange(0, total, width), np.array([total - 1]), marked]
    for rows, values in candidates:
        kept.append(rows[extreme_rows(values, _starts(rows // width))])
    return np.unique(np.concatenate(kept)).astype(np.int64)


def _spread(marked: np.ndarray, total: int, buckets: int) -> np.ndarray:
    """Return the first marked row of each of `buckets` equal buckets."""
    first: np.ndarray = marked[_starts(marked * buckets // total)]
    return first
