"""History: every record comes back, copies are consistent while it grows, thinning shares its rows."""

import math
import threading
from dataclasses import fields, replace

import numpy as np
import pytest

from amplab.lab import COLUMNS, History, StepRecord

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
                accuracy=0.5 if step % 25 == 24 else None,
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
    assert (len(history), history.skip_count, history.last_accuracy) == (2500, 5, 0.5)
    assert [entry.step for entry in history.skips()] == [4, 504, 1004, 1504, 2004]
    assert [entry.step for entry in history.skips(3)] == [1504, 2004]
    assert history.level_changes() == [(0, "O1"), (1200, "O2")]
    assert history.rate() == pytest.approx(100)
    assert history.rate(math.inf) == pytest.approx(100)
    assert repr(history) == "<History: 2500 steps, 5 skipped>"


def test_an_empty_history_has_no_figures():
    history = History()
    assert (len(history), history.last, history.last_accuracy, history.rate()) == (0, None, None, None)
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
