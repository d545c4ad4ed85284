"""What a paused run has on disk: its single steps and its changes too, for its process may end before the next step."""

import subprocess
import sys
from pathlib import Path

import pytest
from long_step import busy

from amplab.lab import Experiment, ExperimentConfig, Trainer
from amplab.lab.checkpoints import _read, last_checkpoint

SMALL = ExperimentConfig(hidden=16)


@pytest.fixture
def paused(tmp_path: Path) -> Trainer:
    """A trainer whose run is paused after two steps, and saved."""
    trainer = Trainer(SMALL, log=tmp_path / "runs")
    trainer.run(2)
    yield trainer
    trainer.stop()
    assert trainer.wait(10)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of the checkpoints that are written from now on."""
    written, save = [], Experiment.save

    def saved(experiment: Experiment, path: Path, extra: object) -> None:
        save(experiment, path, extra)
        written.append(path)

    monkeypatch.setattr(Experiment, "save", saved)
    return written


def saved_of(log: Path) -> tuple[int, float | None]:
    """Return the steps and the learning rate in the checkpoint beside a log."""
    saved = _read(log.with_suffix(".checkpoint"))
    return saved.step, saved.config.lr


def test_single_steps_are_saved_together_once_nothing_more_comes(tmp_path, monkeypatch, written, until) -> None:
    monkeypatch.setattr("amplab.lab.worker._IDLE_SECONDS", 0.5)
    trainer = Trainer(SMALL, log=tmp_path)
    trainer.run(2)
    written.clear()
    with busy(trainer):
        for _ in range(8):
            trainer.step()
    until(lambda: trainer._worker._thread is None)
    assert len(written) == 1
    assert saved_of(trainer.log_path) == (10, None)
    trainer.step()
    until(lambda: trainer._worker._thread is None)
    assert saved_of(trainer.log_path) == (11, None)


STEPPED = """
import sys
from amplab.lab import ExperimentConfig, Trainer

trainer = Trainer(ExperimentConfig(hidden=16), log=sys.argv[1])
trainer.run(2)
for _ in range(3):
    trainer.step()
trainer.wait()
"""


def test_single_steps_are_saved_at_the_end_of_python(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", STEPPED, str(tmp_path)], check=True, timeout=120)
    assert last_checkpoint(tmp_path).step == 5


def a_speed(trainer: Trainer) -> None:
    trainer.set_speed(5)


def the_same_again(trainer: Trainer) -> None:
    trainer.change(lr=0.25)


@pytest.mark.parametrize("then", [a_speed, the_same_again])
def test_a_change_is_saved_whatever_control_waits_behind_it(paused: Trainer, then) -> None:
    with busy(paused):
        paused.change(lr=0.25)
        then(paused)
    assert paused.wait(10)
    assert saved_of(paused.log_path) == (2, 0.25)


def test_a_change_is_saved_though_a_reset_waits_behind_it(paused: Trainer) -> None:
    with busy(paused):
        paused.change(lr=0.25)
        paused.reset()
    assert paused.wait(10)
    (replaced,) = paused.kept.runs
    assert saved_of(replaced.store.log_path) == (2, 0.25)


def test_changes_in_quick_succession_are_saved_together(paused: Trainer, written) -> None:
    with busy(paused):
        for rate in (0.1, 0.2, 0.3):
            paused.change(lr=rate)
    assert paused.wait(10)
    assert len(written) == 1
    assert saved_of(paused.log_path) == (2, 0.3)
