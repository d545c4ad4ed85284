"""The speed of a run: how many steps it takes per second, and that nothing else depends on it."""

import time
from dataclasses import replace

import pytest

from amplab.lab import ConfigChanged, ExperimentConfig, StateChanged, StepRecord, Trainer
from amplab.lab.trainer import LOWEST_SPEED

SMALL = ExperimentConfig(hidden=16)


def records(trainer: Trainer) -> list[StepRecord]:
    return [replace(record, seconds=0.0) for record in trainer.history.records()]


def test_a_run_takes_so_many_steps_per_second_and_uses_no_processor_in_between(trainer):
    trainer.run(1)
    trainer.set_speed(20)
    wall, processor = time.perf_counter(), time.process_time()
    trainer.run(21)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert 1.0 <= wall < 3.0  # 20 waits of 1/20 s
    assert processor < 0.6 * wall


def test_the_steps_are_those_of_a_run_at_full_speed(trainer):
    trainer.set_speed(200)
    trainer.run(6)
    trainer.set_speed(None)
    trainer.run(6)
    fast = Trainer(SMALL)
    fast.run(12)
    assert records(trainer) == records(fast)


def slow_and_started(trainer, until):
    trainer.set_speed(0.05)  # the second step would begin after 20 s
    trainer.start()
    until(lambda: len(trainer.history) == 1)
    time.sleep(0.05)


@pytest.mark.parametrize(
    ("control", "seen"),
    [
        (lambda trainer: trainer.pause(), lambda event: isinstance(event, StateChanged) and event.state == "paused"),
        (lambda trainer: trainer.change(opt_level="O2"), lambda event: isinstance(event, ConfigChanged)),
        (lambda trainer: trainer.reset(), lambda event: isinstance(event, ConfigChanged) and event.reset),
        (lambda trainer: trainer.step(), lambda event: isinstance(event, StepRecord) and event.step == 1),
        (lambda trainer: trainer.set_speed(None), lambda event: isinstance(event, StepRecord) and event.step == 1),
    ],
    ids=["pause", "change", "reset", "step", "full speed"],
)
def test_a_control_does_not_wait_for_the_next_slow_step(trainer, listen, until, control, seen):
    slow_and_started(trainer, until)
    ear = listen(trainer)
    asked = time.perf_counter()
    control(trainer)
    until(lambda: any(map(seen, ear.events)), seconds=5)
    assert time.perf_counter() - asked < 0.5
    trainer.pause()


def test_start_after_a_pause_takes_its_first_step_at_once(trainer, until):
    slow_and_started(trainer, until)
    trainer.pause()
    asked = time.perf_counter()
    trainer.start()
    until(lambda: len(trainer.history) == 2, seconds=5)
    assert time.perf_counter() - asked < 0.5


def test_a_slow_run_outlives_the_idle_time_of_its_thread(monkeypatch, trainer, until):
    monkeypatch.setattr("amplab.lab.worker._IDLE_SECONDS", 0.01)
    trainer.set_speed(10)
    trainer.start()
    until(lambda: len(trainer.history) >= 3, seconds=5)


@pytest.mark.parametrize("speed", [0, -1, "fast", True, float("nan")])
def test_other_speeds_are_refused(trainer, speed):
    with pytest.raises(ValueError, match="speed="):
        trainer.set_speed(speed)
    assert trainer.speed is None


def test_the_speed_is_kept_by_a_reset(trainer):
    trainer.set_speed(5)
    trainer.reset()
    assert trainer.wait(10)
    assert trainer.speed == 5


@pytest.mark.parametrize("speed", [1e-11, 5e-324, 0, -1, float("nan"), float("inf"), 10**400, True, "5"])
def test_a_speed_that_makes_no_sense_is_refused(trainer, speed):
    with pytest.raises(ValueError, match="speed="):
        trainer.set_speed(speed)
    assert trainer.speed is None


def test_the_lowest_speed_takes_a_step_and_ends_with_the_next_control(trainer, until):
    trainer.set_speed(LOWEST_SPEED)
    trainer.start()
    until(lambda: len(trainer.history) == 1)
    trainer.set_speed(None)
    until(lambda: len(trainer.history) > 3)
