"""Waiting in a cell for a run that goes on."""

import threading

import pytest

from amplab.lab import Trainer
from amplab.views.watch import watch


def test_it_waits_for_so_many_steps_and_lets_them_run_on(trainer: Trainer) -> None:
    trainer.start()
    begun = len(trainer.history)
    assert watch(trainer, 20) == 20
    assert len(trainer.history) >= begun + 20
    assert trainer.state == "running"


def test_a_pause_ends_the_waiting(trainer: Trainer, until) -> None:
    trainer.start()
    until(lambda: len(trainer.history) > 2)
    threading.Timer(0.3, trainer.pause).start()
    assert 0 < watch(trainer, 1_000_000) < 1_000_000


def test_nothing_to_wait_for_is_said(trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match=r"run\(5\): it came to rest \(ready\) before a step"):
        watch(trainer, 5)
