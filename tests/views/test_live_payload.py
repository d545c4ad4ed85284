"""Frames of the live view: complete, thin enough, and with every skip, NaN and inf in them."""

import numpy as np
import pytest

from amplab.amp import MemoryUse
from amplab.kernels import BuildReport
from amplab.lab import History, RunChange
from amplab.lab.tasks import ACCURACY
from amplab.lab.watched_run import NO_LEVEL
from amplab.views.live_payload import INJECTED, MARKS, ROWS, SKIPPED, change_marks, frame_rows, modes_line, summary

MEMORY = MemoryUse(parameters=100, gradients=20, masters=3, optimizer_state=4000)


def test_a_short_run_is_shown_in_full(eventful: History) -> None:
    rows = frame_rows(eventful)
    assert rows.dtype == np.float64
    np.testing.assert_array_equal(rows[:, 0], np.arange(10))
    np.testing.assert_array_equal(rows[:, 1], [1, 1, 1, np.nan, 1, 1, 1, 1, np.inf, 1])
    np.testing.assert_array_equal(rows[:, 2], eventful.column("loss_scale"))
    np.testing.assert_array_equal(rows[:, 3], [0, 0, 0, 0, 0, SKIPPED + INJECTED, 0, 0, SKIPPED, 0])


def test_a_long_run_is_thinned_and_keeps_what_must_be_seen(record) -> None:
    history, steps = History(), 20_000
    odd = {7_001: {"loss": np.nan}, 11_111: {"loss": np.inf}, 15_000: {"loss": 9.0}, 16_001: {"skipped": True}}
    noise = np.random.default_rng(0).random(steps)
    for step in range(steps):
        history.append(record(step, **{"loss": float(noise[step]), **odd.get(step, {})}))
    rows = frame_rows(history)
    assert len(rows) <= 1.2 * ROWS
    assert set(odd) <= set(rows[:, 0])
    assert rows[0, 0] == 0
    assert rows[-1, 0] == steps - 1
    assert np.isnan(rows[rows[:, 0] == 7_001, 1])
    assert rows[rows[:, 0] == 16_001, 3] == SKIPPED


def test_on_a_logarithmic_axis_the_first_steps_of_a_long_run_have_as_many_rows_as_the_last(record) -> None:
    history, steps = History(), 20_000
    for step in range(steps):
        history.append(record(step, loss=1.0 / (step + 1)))
    rows = frame_rows(history, logarithmic=True)
    shown = rows[:, 0]
    assert len(rows) <= 1.2 * ROWS
    assert list(shown[:60]) == list(range(60))
    assert (np.diff(shown) > 0).all()
    assert shown[-1] == steps - 1
    np.testing.assert_array_equal(frame_rows(history, 100, 199, logarithmic=True)[:, 0], np.arange(100, 200))
    assert len(frame_rows(history, steps, 2 * steps, logarithmic=True)) == 0


def test_the_figures_are_those_of_the_run(eventful: History) -> None:
    shown = summary(eventful, loss_scale=32768.0, rate=None, memory=MEMORY, modes="so", score=ACCURACY)
    assert shown == {
        "step": 10,
        "skipped": 2,
        "scale": 32768.0,
        "score": None,
        "score_label": "Accuracy",
        "score_is_share": True,
        "rate": None,
        "memory": 4123,
        "memory_parts": "parameters 100 B · gradients 20 B · masters 3 B · optimizer state 4,000 B",
        "modes": "so",
        "unknown": (),
    }
    watched = summary(eventful, loss_scale=1.0, rate=None, memory=None, modes="so", unknown=("memory",))
    assert (watched["memory"], watched["memory_parts"], watched["unknown"]) == (None, "", ("memory", "score"))


@pytest.mark.parametrize("status", ["reference", "building", "built", "failed"])
def test_the_line_of_modes_names_kernels_and_arithmetic(status: str) -> None:
    line = modes_line(BuildReport(status, "CPU kernels", cause="no compiler", remedy="install g++"), "fp32_accumulate")
    assert line.startswith("float16 on CPU: accumulated in float32 and rounded once")
    assert ("C++" in line) == (status != "reference")
    assert ("no compiler" in line and "install g++" in line) == (status == "failed")


def test_the_changes_of_a_frame_are_few_and_the_latest() -> None:
    history = History()
    history.keep_changes(RunChange(0, "start", "O1", "start: digits, MLP, O1"))
    history.keep_changes(*(RunChange(step, "lr", f"lr {step}", f"Learning rate {step}") for step in range(1, 1000)))
    marks = change_marks(history)
    assert len(marks) == MARKS
    assert marks[0] == (0, "start", "O1", "start: digits, MLP, O1")
    assert marks[-1] == (999, "lr", "lr 999", "Learning rate 999")


def test_a_run_without_levels_has_no_changes(record) -> None:
    history = History()
    history.append(record(0, opt_level=NO_LEVEL))
    assert change_marks(history) == []
