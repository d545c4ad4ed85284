"""Which rows of a long run a screen needs: the ones that a drawing of all of them would show.

The rows are cut into buckets of equal length. Of each bucket these are kept, for every column: the first row, the
smallest and the largest finite value, and the first NaN, the first inf and the first -inf, because they are drawn at
the edge. Marked rows (skipped steps) are all kept while they fit into half of the limit; beyond that, the first of each
bucket. Columns of many rows are searched through `BlockExtremes`, which grows with the run, so the cost does not.
"""

from __future__ import annotations

import numpy as np

__all__ = ["BLOCK", "BlockExtremes", "extreme_rows", "thin"]

BLOCK = 64
"""Rows per block of `BlockExtremes`."""


def extreme_rows(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the positions that stand for each bucket: smallest and largest finite, first NaN, first inf, first -inf.

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
    return np.unique(np.concatenate([_first_of_each(mask, bucket) for mask in wanted]))


def _first_of_each(mask: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """Return, for each bucket with a True, the position of its first one."""
    rows = np.flatnonzero(mask)
    if len(rows) == 0:
        return rows
    owner = bucket[rows]
    return rows[np.concatenate([[True], owner[1:] != owner[:-1]])]


class BlockExtremes:
    """The extreme rows of every complete block of `BLOCK` rows of one column, extended as the column grows."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._done = 0

    def rows(self, column: np.ndarray) -> np.ndarray:
        """Return the sorted candidate rows of `column`: the extremes of its complete blocks, and its tail in full."""
        complete = len(column) - len(column) % BLOCK
        if complete > self._done:
            fresh = column[self._done : complete]
            self._rows.append(extreme_rows(fresh, np.arange(0, len(fresh), BLOCK)) + self._done)
            self._done = complete
        if len(self._rows) > 1:
            self._rows = [np.concatenate(self._rows)]
        return np.concatenate([*self._rows, np.arange(self._done, len(column))])


def thin(columns: list[np.ndarray], *, candidates: list[np.ndarray], marked: np.ndarray, limit: int) -> np.ndarray:
    """Return the sorted rows to draw, about `limit` of them; every row where they all fit.

    Args:
        columns: The columns that will be drawn, each `(rows,)`.
        candidates: For each column the sorted rows that may be extremes (`BlockExtremes.rows`).
        marked: Sorted rows that must be seen.
        limit: Rows wanted, at least 16. Columns with many NaN or inf beside finite values may add to it.
    """
    total = len(columns[0])
    if total <= limit:
        return np.arange(total)
    if len(marked) > limit // 2:
        marked = _spread(marked, total, limit // 2)
    per_bucket = 1 + 2 * len(columns)
    buckets = max(1, (limit - len(marked)) // per_bucket)
    width = -(-total // buckets)
    kept = [np.arange(0, total, width), [total - 1], marked]
    for column, rows in zip(columns, candidates, strict=True):
        owner = rows // width
        starts = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
        kept.append(rows[extreme_rows(column[rows], starts)])
    return np.unique(np.concatenate(kept)).astype(np.int64)


def _spread(marked: np.ndarray, total: int, buckets: int) -> np.ndarray:
    """Return the first marked row of each of `buckets` equal buckets."""
    return marked[_first_of_each(np.ones(len(marked), dtype=bool), marked * buckets // total)]
