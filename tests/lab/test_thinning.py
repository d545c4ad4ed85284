"""Thinned rows show what a drawing of all rows shows; checked on ranges of every bucket."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amplab.lab.thinning import BLOCK, BlockExtremes, extreme_rows, thin

NONFINITE = [math.nan, math.inf, -math.inf]
VALUES = st.lists(st.floats(-1e3, 1e3, width=16) | st.sampled_from(NONFINITE), min_size=1, max_size=300)


def shown(bucket: list[float]) -> tuple:
    """What a bucket of a drawing shows: its range, and which edges are marked."""
    finite = [value for value in bucket if math.isfinite(value)]
    return (
        min(finite, default=None),
        max(finite, default=None),
        any(math.isnan(value) for value in bucket),
        math.inf in bucket,
        -math.inf in bucket,
    )


@given(VALUES, st.integers(1, 40))
def test_extreme_rows_show_what_all_rows_show(values, width):
    rows = extreme_rows(np.array(values), np.arange(0, len(values), width))
    assert (np.diff(rows) > 0).all()
    for start in range(0, len(values), width):
        kept = [values[row] for row in rows if start <= row < start + width]
        assert shown(kept) == shown(values[start : start + width])
        assert len(kept) <= 5


@given(VALUES, st.integers(1, 7))
def test_block_extremes_grow_with_the_column(values, pieces):
    column = np.array(values * 3)
    blocks = BlockExtremes()
    for end in sorted({len(column) * piece // pieces for piece in range(1, pieces + 1)} - {0}):
        blocks.extend(column[blocks.seen : end])
        rows = blocks.rows()
    for start in range(0, len(column), BLOCK):
        kept = [column[row] for row in rows if start <= row < start + BLOCK]
        assert shown(kept) == shown(list(column[start : start + BLOCK]))


@pytest.mark.parametrize("width", [BLOCK, 8 * BLOCK, 70 * BLOCK])
def test_larger_blocks_show_what_all_rows_show_in_fewer_rows(width):
    generator = np.random.default_rng(0)
    column = generator.normal(size=300 * BLOCK + 17)
    column[generator.integers(0, len(column), 40)] = math.nan
    column[generator.integers(0, len(column), 40)] = -math.inf
    blocks, ends = BlockExtremes(), np.sort(generator.integers(0, len(column), 60)).tolist()
    for end in [*ends, len(column)]:
        blocks.extend(column[blocks.seen : end])
    for start, end in ((0, len(column)), (100, len(column) - 1), (5 * BLOCK, 9 * BLOCK), (10, 40)):
        rows = blocks.rows(start, end, width=width)
        assert (np.diff(rows) > 0).all()
        assert start <= rows[0] <= rows[-1] < end
        size = max(each for each in (BLOCK, 8 * BLOCK, 64 * BLOCK) if each <= width)
        assert len(rows) < 5 * (end - start) / size + 4 * size
        for bucket in range(-(-start // size) * size, end - size, size):
            kept = rows[(bucket <= rows) & (rows < bucket + size)]
            assert shown(column[kept].tolist()) == shown(column[bucket : bucket + size].tolist())


def candidates(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = BlockExtremes()
    blocks.extend(column)
    return blocks.rows(), column[blocks.rows()]


@pytest.mark.parametrize("total", [1_000, 50_000])
def test_thin_keeps_ends_marks_and_spikes_within_the_limit(total):
    generator = np.random.default_rng(0)
    loss, scale = generator.normal(size=total), np.full(total, 65536.0)
    loss[total // 3], loss[total // 2] = 1e6, math.nan
    marked = np.array([17, total // 3, total - 5])
    rows = thin(total, [candidates(loss), candidates(scale)], marked=marked, limit=400)
    assert len(rows) <= 402
    assert {0, total - 1, total // 2, *marked.tolist()} <= set(rows.tolist())
    assert rows.dtype == np.int64


def test_thin_spreads_marks_that_do_not_fit():
    total = 100_000
    rows = thin(total, [candidates(np.zeros(total))], marked=np.arange(total), limit=500)
    assert len(rows) <= 502
    assert np.diff(rows).max() <= 2 * total / 250  # somewhere in every pixel's worth of steps
