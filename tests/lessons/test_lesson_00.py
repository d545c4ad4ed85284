"""Lesson 0: the checks say what is wrong; one of them reads the run of the dashboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from amplab.lab import ExperimentConfig, Trainer
from amplab.lessons import lesson_00
from amplab.lessons.exercises import NOT_ANSWERED
from amplab.views import Dashboard


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dashboard]:
    monkeypatch.setenv("AMPLAB_RUNS", str(tmp_path))
    shown = Dashboard(Trainer(ExperimentConfig(hidden=16)))
    yield shown
    shown.close()


def test_check_skipped_step_reads_the_run(lab: Dashboard) -> None:
    lab.run(steps=3)
    verdict = lesson_00.check_skipped_step(lab)
    assert not verdict.right
    assert "no step was skipped in the 3 steps" in repr(verdict)
    lab.trainer.inject("overflow")
    lab.run(steps=1)
    assert "step 3 was skipped and is the last one" in repr(lesson_00.check_skipped_step(lab))
    lab.run(steps=1)
    assert lesson_00.check_skipped_step(lab).right


@pytest.mark.parametrize(("answer", "said"), [(1, "pass `lab`"), (..., NOT_ANSWERED)])
def test_check_skipped_step_wants_the_lab(answer, said: str) -> None:
    assert said in repr(lesson_00.check_skipped_step(answer))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (1 / 50, "Right"),
        (1 / 51, "Right"),
        (1 / 49, "to grow once"),
        (2, "not a share"),
        (0.0005, "window of 2000"),
        (0.5, "to grow once"),
        (..., NOT_ANSWERED),
    ],
)
def test_check_share_of_skips(answer, said: str) -> None:
    verdict = lesson_00.check_share_of_skips(answer)
    assert said in repr(verdict)
    assert verdict.right is (said == "Right")


@pytest.mark.parametrize(
    ("answer", "said"), [(1, "Right"), (65536, "a dynamic scale starts"), (128, "does not set"), (..., NOT_ANSWERED)]
)
def test_check_o3_scale(answer, said: str) -> None:
    verdict = lesson_00.check_o3_scale(answer)
    assert said in repr(verdict)
    assert verdict.right is (answer == 1)
