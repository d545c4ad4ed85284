"""History: every record is returned, copies are consistent while it grows, thinning keeps extremes and marks."""

import math
import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amplab.lab import COLUMNS, History, StepRecord
from amplab.lab.history import BLOCK, BlockExtremes, extreme_rows, thin

FIRST = StepRecord(0, 2.3, 65536.0, 65536.0, False, None, "O1", None, 0.01, None)


def record(step: int, **changes) -> StepRecord:
    return replace(FIRST, step=step, seconds=0.01 * step, **changes)


def filled(count: int) -> History:
    history = History()
    for step in range(count):
        history.append(
            record(
                step,
                loss=math.nan if step % 700 == 3 else 1.0 / (step + 1),
                skipped=step % 500 == 4,
                first_nonfinite="hidden1.weight" if step % 500 == 4 else None,
                opt_level="O2" if step >= 1200 else "O1",
                score=0.5 if step % 25 == 24 else None,
                injected="nan" if step % 700 == 3 else None,
            )
        )
    return history


def test_columns_are_the_fields_of_a_record():
    assert list(COLUMNS) == [field.name for field in fields(StepRecord)]


def test_records_come_back_as_they_went_in():
    history = filled(2500)  # grows past its first capacity
    for step in (0, 4, 24, 1199, 2499):
        assert history.record(step).step == step
    assert history.record(-1) == history.last
    assert history.record(504) == record(504, loss=1 / 505, skipped=True, first_nonfinite="hidden1.weight")
    assert math.isnan(history.record(703).loss)
    assert [entry.step for entry in history.records(2498)] == [2498, 2499]
    with pytest.raises(IndexError):
        history.record(2500)


def test_counts_and_summaries():
    history = filled(2500)
    assert (len(history), history.skip_count, history.last_score) == (2500, 5, 0.5)
    assert [entry.step for entry in history.skips()] == [4, 504, 1004, 1504, 2004]
    assert [entry.step for entry in history.skips(3)] == [1504, 2004]
    assert history.level_changes() == [(0, "O1"), (1200, "O2")]
    assert history.rate() == pytest.approx(100)
    assert history.rate(math.inf) == pytest.approx(100)
    assert repr(history) == "<History: 2500 steps, 5 skipped>"


def test_an_empty_history_has_no_figures():
    history = History()
    assert (len(history), history.last, history.last_score, history.rate()) == (0, None, None, None)
    assert history.thinned(["loss"], 100)["loss"].shape == (0,)


def test_columns_are_copies():
    history = filled(10)
    history.column("loss")[:] = 7
    assert history.column("loss")[0] == 1.0
    assert history.column("opt_level").tolist() == ["O1"] * 10


def test_short_runs_are_not_thinned():
    thinned = filled(100).thinned(["loss", "injected"], 100)
    assert list(thinned) == ["step", "loss", "injected", "skipped"]
    assert thinned["step"].tolist() == list(range(100))
    assert thinned["injected"][3] == "nan"


def test_thinned_rows_belong_together_and_lose_nothing_visible():
    history = filled(20_000)
    thinned = history.thinned(["loss", "loss_scale"], 600)
    assert len(thinned["step"]) <= 700
    assert set(np.flatnonzero(history.column("skipped"))) <= set(thinned["step"].tolist())
    np.testing.assert_array_equal(thinned["loss"], history.column("loss")[thinned["step"]])
    assert np.isnan(thinned["loss"]).sum() >= 20_000 // 700
    assert thinned["step"][0] == 0
    assert thinned["step"][-1] == 19_999


def test_thinned_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match="'losss'"):
        History().thinned(["losss"], 100)
    with pytest.raises(ValueError, match="limit=3"):
        History().thinned(["loss"], 3)


def test_reading_while_it_grows_gives_whole_rows():
    history = History()
    done = threading.Event()

    def grow() -> None:
        for step in range(20_000):
            history.append(record(step, loss=float(step), loss_scale=float(step)))
        done.set()

    writer = threading.Thread(target=grow)
    writer.start()
    while not done.is_set():
        thinned = history.thinned(["loss", "loss_scale"], 200)
        np.testing.assert_array_equal(thinned["step"], thinned["loss"])
        np.testing.assert_array_equal(thinned["step"], thinned["loss_scale"])
    writer.join()
    assert len(history) == 20_000


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
        rows = blocks.rows(column[:end])
    for start in range(0, len(column), BLOCK):
        kept = [column[row] for row in rows if start <= row < start + BLOCK]
        assert shown(kept) == shown(list(column[start : start + BLOCK]))


@pytest.mark.parametrize("total", [1_000, 50_000])
def test_thin_keeps_ends_marks_and_spikes_within_the_limit(total):
    generator = np.random.default_rng(0)
    loss, scale = generator.normal(size=total), np.full(total, 65536.0)
    loss[total // 3], loss[total // 2] = 1e6, math.nan
    marked = np.array([17, total // 3, total - 5])
    candidates = [BlockExtremes().rows(column) for column in (loss, scale)]
    rows = thin([loss, scale], candidates=candidates, marked=marked, limit=400)
    assert len(rows) <= 402
    assert {0, total - 1, total // 2, *marked.tolist()} <= set(rows.tolist())
    assert rows.dtype == np.int64


def test_thin_spreads_marks_that_do_not_fit():
    total = 100_000
    columns = [np.zeros(total)]
    rows = thin(columns, candidates=[BlockExtremes().rows(columns[0])], marked=np.arange(total), limit=500)
    assert len(rows) <= 502
    assert np.diff(rows).max() <= 2 * total / 250  # somewhere in every pixel's worth of steps


@pytest.mark.parametrize(
    "span", [(3_000, 3_050), (64, 127), (9_990, math.inf), (-math.inf, 5_000), (61, 12_345), (7, 6)]
)
def test_a_range_shows_what_all_its_rows_show(span):
    history = filled(20_000)
    low, high = span
    steps = [step for step in range(20_000) if low <= step <= high]
    thinned = history.thinned(["loss", "injected"], 200, low, high)
    rows = thinned["step"].tolist()
    assert set(rows) <= set(steps)
    if len(steps) <= 200:
        assert rows == steps, "a short range is shown step by step"
        return
    assert len(rows) <= 300
    assert {steps[0], steps[-1], *(step for step in steps if step % 500 == 4)} <= set(rows)
    assert shown(thinned["loss"].tolist()) == shown(history.column("loss")[steps].tolist())


def test_a_spike_outside_of_a_range_does_not_hide_one_inside_of_it():
    history = History()
    for step in range(10_000):  # 5,000 and 5,040 lie in one block
        history.append(record(step, loss={5_000: 1e6, 5_040: 1e3}.get(step, 1.0)))
    assert history.thinned(["loss"], 100, 5_010, 9_000)["loss"].max() == 1e3
    assert history.thinned(["loss"], 100, 1_000, 5_039)["loss"].max() == 1e6


def test_a_zoomed_range_costs_as_much_in_a_long_run_as_in_a_short_one():
    """100,000 steps zoom to single ones, at a cost that does not grow with the run."""
    history = filled(100_000)
    history.thinned(["loss", "loss_scale", "injected"], 800)
    began = time.perf_counter()
    for low in range(0, 90_000, 1_000):
        assert len(history.thinned(["loss", "loss_scale", "injected"], 800, low, low + 499)["step"]) == 500
    assert (time.perf_counter() - began) / 90 < 0.01
