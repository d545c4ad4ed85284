"""What comes while a step of the run before is made counts for the run that takes its place, and for no other."""

import threading

import pytest
import torch
import torch.nn.functional as F
from long_step import busy
from own_models import registered
from torch import nn

from amplab.lab import Failed, Trainer
from amplab.lab.checkpoints import _read

pytestmark = pytest.mark.usefixtures("nothing_own")

BATCHES = [(torch.ones(2, 4), torch.zeros(2, 1))] * 4


class Gate:
    """Holds one forward until it is opened, and may let it fail."""

    def __init__(self):
        self.is_closed, self.fails = False, False
        self.begun, self.opened = threading.Event(), threading.Event()

    def pass_through(self):
        if self.is_closed:
            self.is_closed = False
            self.begun.set()
            self.opened.wait(30)
            if self.fails:
                raise ValueError("a bug in one forward")


class Data:
    """Batches that one cannot be read of, once."""

    def __init__(self, gate):
        self.gate = gate

    def __iter__(self):
        for batch in BATCHES:
            self.gate.pass_through()
            yield batch


@pytest.fixture
def gate():
    return Gate()


def in_a_step(gate, *, data=BATCHES, loss_passes=True, fails=False, resets=False):
    """Return a trainer that is within a step of its first run, or of one after a reset."""

    def loss(output, wanted):
        if loss_passes:
            gate.pass_through()
        return F.mse_loss(output, wanted)

    optimizer = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
    trainer = Trainer(registered(nn.Linear(4, 1), data, loss=loss, optimizer=optimizer))
    trainer.run(2)
    if resets:
        trainer.reset()
        trainer.run(1)
    gate.fails, gate.is_closed = fails, True
    trainer.start()
    assert gate.begun.wait(30)
    return trainer


def finish(trainer, gate):
    gate.opened.set()
    assert trainer.wait(30)


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_that_are_asked_for_after_a_reset_are_those_of_the_new_run(gate, steps):
    trainer = in_a_step(gate)
    trainer.reset()
    trainer.start(steps)
    finish(trainer, gate)
    assert (trainer.state, len(trainer.history)) == ("paused", steps)
    (before,) = trainer.kept.runs
    assert len(before.history) == 3
    trainer.continue_from(before)
    assert len(trainer.run(2)) == 5


def test_run_makes_its_steps_after_the_one_that_is_made(gate):
    trainer = in_a_step(gate)
    trainer.pause()
    threading.Timer(0.5, gate.opened.set).start()
    assert len(trainer.run(3)) == 6


@pytest.mark.parametrize("then", [None, 2])
def test_a_step_that_fails_before_a_reset_takes_effect_fails_its_own_run_alone(gate, then):
    trainer = in_a_step(gate, fails=True)
    trainer.reset()
    if then:
        trainer.start(then)
    finish(trainer, gate)
    assert (trainer.state, len(trainer.history)) == (("paused", then) if then else ("ready", 0))
    (before,) = trainer.kept.runs
    assert (len(before.history), before.error) == (2, "Training failed.")
    assert "a bug in one forward" in before.failure.text
    assert len(trainer.run(2)) == (then or 0) + 2


@pytest.mark.parametrize("resets", [True, False])
def test_a_step_that_fails_before_an_undo_takes_effect(gate, resets):
    """It fails its own run; where the undo leaves that one in place, it has failed."""
    trainer = in_a_step(gate, fails=True, resets=resets)
    if not resets:
        trainer.change(lr=0.05)
    trainer.undo()
    trainer.start(2)
    finish(trainer, gate)
    assert (trainer.state, len(trainer.history)) == (("paused", 4) if resets else ("failed", 2))


def test_a_step_that_fails_before_a_stop_takes_effect_leaves_a_stopped_run(gate):
    trainer = in_a_step(gate, fails=True)
    trainer.stop()
    finish(trainer, gate)
    assert trainer.state == "stopped"
    trainer.reset()
    assert len(trainer.run(2)) == 2


def test_a_failed_run_stays_failed_if_none_comes_in_its_place(gate, monkeypatch):
    trainer = in_a_step(gate, fails=True)
    trainer.reset()
    monkeypatch.setattr("amplab.lab.present_run.Experiment", lambda *_, **__: 1 / 0)
    finish(trainer, gate)
    assert trainer.state == "failed"
    monkeypatch.undo()
    trainer.reset()
    assert len(trainer.run(2)) == 2


def test_a_batch_of_the_run_before_that_cannot_be_read_does_not_pause_the_new_one(gate, listen):
    trainer = in_a_step(gate, data=Data(gate), loss_passes=False, fails=True)
    ear = listen(trainer)
    trainer.reset()
    threading.Timer(0.5, gate.opened.set).start()
    assert len(trainer.run(2)) == 2
    assert trainer.paused_by is None
    assert not ear.of(Failed)


def test_steps_that_are_asked_for_while_a_saved_run_is_read_are_those_of_the_saved_run(trainer, tmp_path):
    saved = Trainer(trainer.config, log=tmp_path)
    saved.run(2)
    with busy(trainer):
        trainer.continue_saved(_read(saved.log_path.with_suffix(".checkpoint")))
        trainer.start(3)
    assert trainer.wait(30)
    assert (trainer.state, len(trainer.history)) == ("paused", 5)


def test_a_saved_run_that_is_continued_during_a_run_is_paused(trainer, tmp_path, until):
    saved = Trainer(trainer.config, log=tmp_path)
    saved.run(2)
    trainer.start()
    until(lambda: len(trainer.history) > 3)
    trainer.continue_saved(_read(saved.log_path.with_suffix(".checkpoint")))
    assert trainer.wait(30)
    assert (trainer.state, len(trainer.history)) == ("paused", 2)


@pytest.mark.parametrize("then", [None, 2])
@pytest.mark.parametrize("fails", [True, False])
def test_a_run_that_undo_brings_back_before_a_reset_takes_effect_leaves_the_state_to_it(gate, fails, then):
    trainer = in_a_step(gate, fails=fails)
    trainer.pause()
    trainer.reset()
    finish(trainer, gate)
    with busy(trainer):
        trainer.undo()
        trainer.reset()
        if then:
            trainer.start(then)
    assert trainer.wait(30)
    assert (trainer.state, len(trainer.history)) == (("paused", then) if then else ("ready", 0))
