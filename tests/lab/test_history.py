"""History: every record is returned, copies are consistent while it grows, thinning keeps extremes and marks."""

import math
import os
import signal
import threading
import time
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest

from amplab.formats import ExponentHistogram
from amplab.lab import COLUMNS, History, StepRecord
from amplab.lab.events import GradientSample, MixedScales
from amplab.lab.growing_columns import MOST_IN_MEMORY
from amplab.lab.history import MOST_MIXED, MOST_SAMPLES

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
    assert [entry.step for entry in history.records_at([7, 2000, 3])] == [7, 2000, 3]
    with pytest.raises(IndexError):
        history.record(2500)


def test_a_loop_gets_the_records_one_after_another():
    history = filled(9000)  # some blocks, and steps that are pending
    assert repr(list(history)) == repr(history.records())
    assert [entry.step for entry, _ in zip(history, range(3), strict=False)] == [0, 1, 2]
    assert list(History()) == []


def test_a_loop_ends_with_the_steps_that_there_were_when_it_began():
    history, seen = filled(5000), []
    for entry in history:
        seen.append(entry.step)
        history.append(record(5000 + entry.step))
    assert seen == list(range(5000))
    assert len(history) == 10_000


def test_a_loop_over_a_long_run_holds_one_block_of_it():
    history = History()
    history.extend(rows(200_000))
    tracemalloc.start()
    try:
        assert sum(entry.skipped for entry in history) == history.skip_count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000 * 32, "bytes; a list of the records has hundreds for each"


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
    drawn, all_of_them = thinned["loss"], history.column("loss")[steps]
    assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(all_of_them), np.nanmax(all_of_them))
    assert np.isnan(drawn).any() == np.isnan(all_of_them).any()


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


def sample(step: int) -> GradientSample:
    return GradientSample(step, 1.0, ExponentHistogram(np.array([step]), 0, 0, 0, 0, step))


def test_of_many_histograms_some_are_kept_from_the_whole_run_and_the_last_one():
    history = History()
    for step in range(10_000):
        history.keep(sample(step))
        kept = [each.step for each in history.gradient_samples] if step % 97 == 0 or step > 9_990 else [0, step]
        assert (kept[0], kept[-1]) == (0, step)
        assert len(kept) <= MOST_SAMPLES + 1
    assert set(np.diff(kept[:-1])) == {16}, "evenly spread"
    assert len(kept) >= MOST_SAMPLES // 2


def test_of_many_steps_with_several_scales_the_last_ones_are_kept():
    history = History()
    for step in range(2 * MOST_MIXED):
        history.keep_scales(MixedScales(step, (1.0, 2.0)))
    assert [each.step for each in history.mixed_scales] == list(range(MOST_MIXED, 2 * MOST_MIXED))


def rows(count: int) -> dict[str, list]:
    losses = [None if step % 3 == 1 else math.nan if step % 3 == 2 else 1.0 for step in range(count)]
    one = {name: [getattr(FIRST, name)] * count for name in COLUMNS}
    return one | {"step": list(range(count)), "loss": losses, "skipped": [step % 1000 == 9 for step in range(count)]}


def test_a_run_longer_than_what_memory_holds_loses_nothing():
    """Half a million steps: the rows of the file and those of memory, single and together."""
    count = 2 * MOST_IN_MEMORY
    history = History()
    tracemalloc.start()
    try:
        history.extend(rows(count))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 80 * MOST_IN_MEMORY, "bytes"
    assert history.column("step").tolist() == list(range(count))
    assert history.skipped_steps() == list(range(9, count, 1000))
    assert history.skip_count == len(history.skips()) == len(history.skip_groups())
    assert history.missing_losses() == set(range(1, count, 3))
    for row in (0, 1, count // 4, count // 2, count - 1, -count):
        found, step = history.record(row), row % count
        assert (found.step, math.isnan(found.loss), found.skipped) == (step, step % 3 != 0, step % 1000 == 9)
    zoomed = history.thinned(["loss"], 800, 1000, 1499)
    assert zoomed["step"].tolist() == list(range(1000, 1500))
    assert len(history.thinned(["loss"], 800)["step"]) < 2000


def test_the_steps_without_a_loss_from_some_row_on():
    history = History()
    history.extend(rows(10))
    assert [history.missing_losses(start) for start in (0, 5, -1, -3)] == [{1, 4, 7}, {7}, set(), {7}]
    history.extend({name: column[7:8] for name, column in rows(10).items()} | {"step": [10]})
    assert history.missing_losses(-1) == {10}
    history.forget_losses()
    assert history.missing_losses(-4) == {7, 8, 9, 10}
    history.append(record(11, loss=math.nan))
    assert history.missing_losses() == set(range(11))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_reads_a_history_that_another_thread_reads_and_fills_at_the_fork():
    history, stop = filled(1000), threading.Event()

    def read_and_fill():
        step = 1000
        while not stop.is_set():
            history.append(record(step))
            history.records(step - 900)
            step += 1

    thread = threading.Thread(target=read_and_fill)
    thread.start()
    try:
        for _ in range(20):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # which ends a child that hangs
                steps = [each.step for each in history.records()]
                os._exit(int(steps != list(range(len(history)))))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
