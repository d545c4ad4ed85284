"""Ctrl-C in a control of a trainer, subscribers that raise whatever they can, and the end of Python."""

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch
from interrupts import PACKAGE, interrupted_everywhere

from amplab.lab import ExperimentConfig, Failed, StateChanged, StepRecord, Trainer

SMALL = ExperimentConfig(hidden=16)
FILES = [f"{PACKAGE}/lab/{name}.py" for name in ("trainer", "present_run", "controls", "worker")]
PLACES = {
    "some points": {"folders": FILES, "every": 9},
    "where a lock is taken": {"folders": [threading.__file__], "functions": ["__enter__"]},
    "every point": {"folders": FILES},
}
CONTROLS = {
    "start": lambda trainer: trainer.start(3),
    "run": lambda trainer: trainer.run(3),
    "step": Trainer.step,
    "reset": Trainer.reset,
    "change": lambda trainer: trainer.change(lr=0.01),
    "set_speed": lambda trainer: trainer.set_speed(1000.0),
    "inject": lambda trainer: trainer.inject("nan"),
    "request": Trainer.request_trace,
    "undo": Trainer.undo,
    "restart": lambda trainer: (trainer.start(3), trainer.restart_with(hidden=8)),
    "stop": Trainer.stop,
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")


def in_another_thread(question):
    """Return the answer of a thread of its own, None if it takes 20 seconds."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(20)
    return answers[0] if answers else None


def check_all_works(trainer, number, interrupt):
    """Check that nothing is locked, that nothing runs on, that requests are answered, and that a run trains."""
    lock = trainer._worker.lock
    assert in_another_thread(lambda: lock.acquire(timeout=10) and (lock.release() or True)), interrupt
    assert trainer.wait(20), interrupt
    assert trainer.state != "running", interrupt
    traced = threading.Event()
    trainer.subscribe(lambda event: traced.set() if type(event).__name__ == "TraceReady" else None)
    trainer.reset()
    trainer.request_trace()
    trainer.run(2)
    assert trainer.history.column("step").tolist() == [0, 1], interrupt
    assert traced.is_set(), interrupt
    assert in_another_thread(torch.get_num_threads) == number, interrupt


@pytest.mark.parametrize(
    "places", ["some points", "where a lock is taken", pytest.param("every point", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("control", CONTROLS)
def test_ctrl_c_in_a_control_leaves_a_trainer_that_works(control, places):
    number, trainers = in_another_thread(torch.get_num_threads), []

    def act():
        trainers.append(Trainer(SMALL))
        CONTROLS[control](trainers[-1])

    for interrupt in itertools.islice(interrupted_everywhere(act, **PLACES[places]), 300):
        if trainers:
            check_all_works(trainers.pop(), number, interrupt)
        trainers.clear()


@pytest.mark.parametrize("control", ["change", "reset", "undo"])
def test_ctrl_c_in_a_control_leaves_no_change_that_is_waited_for(control):
    """A step of two batches would be taken back for it, again and again."""
    trainers = []

    def act():
        trainers.append(Trainer(SMALL.changed(accumulate=2)))
        trainers[-1].change(momentum=0.5)
        CONTROLS[control](trainers[-1])

    for interrupt in itertools.islice(interrupted_everywhere(act, folders=FILES[2:], every=3), 100):
        if trainers:
            trainer = trainers.pop()
            trainer.start(2)
            assert trainer.wait(20), interrupt
            assert len(trainer.history) == 2, interrupt
            assert trainer.wanted_config == trainer.config, interrupt
        trainers.clear()


@pytest.mark.parametrize("control", ["start", "step", "reset", "restart", "stop"])
def test_ctrl_c_in_a_control_leaves_the_state_that_was_announced(control):
    """Else each step of a comparison would be taken back for a state that never comes, again and again."""
    trainers, announced = [], []

    def act():
        trainer = Trainer(SMALL.changed(accumulate=2))
        trainer.subscribe(lambda event: announced.append(event.state) if isinstance(event, StateChanged) else None)
        trainers.append(trainer)
        CONTROLS[control](trainer)

    for interrupt in itertools.islice(interrupted_everywhere(act, folders=FILES, every=7), 30):
        if trainers:
            trainer = trainers.pop()
            assert trainer.wait(20), interrupt
            assert trainer.state == (announced or ["ready"])[-1], interrupt
            assert (trainer.state == "ready") == (not len(trainer.history) and "stopped" not in announced), interrupt
            trainer.compare([trainer.config], steps=1)
            assert trainer.wait(20), interrupt
        trainers.clear()
        announced.clear()


def test_ctrl_c_in_compare_leaves_no_comparison_or_one_that_can_be_stopped():
    """Else a comparison that nothing shows trains all its steps, and nothing ends it."""
    trainers = []

    def act():
        trainers.append(Trainer(SMALL))
        trainers[-1].compare([SMALL], steps=10**6)

    for interrupt in itertools.islice(interrupted_everywhere(act, folders=FILES, every=7), 30):
        if trainers:
            trainer = trainers.pop()
            trainer.stop_comparison()
            assert trainer.wait(20), interrupt
            assert trainer.comparison is None, interrupt
    for trainer in trainers:  # that of the call without an interrupt
        trainer.stop_comparison()


class Unprintable(Exception):
    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __repr__


class Raising:
    """A subscriber that raises at every step and at every report of a failure, and whose repr raises."""

    def __init__(self, error):
        self.error = error

    def __call__(self, event):
        if isinstance(event, StepRecord | Failed):
            raise self.error

    def __repr__(self):
        raise ValueError("no repr")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unprintable()], ids=type)
def test_whatever_a_subscriber_raises_the_run_goes_on(error):
    trainer = Trainer(SMALL)
    trainer.subscribe(Raising(error))
    trainer.start(6)
    assert trainer.wait(20)
    assert (trainer.state, len(trainer.history)) == ("paused", 6)
    assert len(trainer.failures) == 1
    assert type(error).__name__ in trainer.failures[0].text


def test_a_question_that_ends_the_thread_raises_in_the_caller():
    trainer = Trainer(SMALL)

    def ask():
        with pytest.raises(SystemExit):
            trainer._worker.ask(sys.exit)
        return "raised"

    assert in_another_thread(ask) == "raised"
    assert len(trainer.run(2)) == 2


AT_THE_END = """
import atexit
def at_the_end():  # runs after the trainers have ended
    print(trainer.comparison)
    for ask in (trainer.score, trainer.step, lambda: trainer.run(1)):
        try:
            ask()
        except RuntimeError as error:
            print(error)
atexit.register(at_the_end)
from amplab.lab import ExperimentConfig, Trainer
trainer = Trainer(ExperimentConfig(hidden=16))
trainer.run(1)
trainer.compare(steps=10**6)
while trainer.comparison is None:
    pass
"""


def test_a_comparison_ends_with_python_and_nothing_waits_for_an_ended_trainer():
    command = [sys.executable, "-c", AT_THE_END]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=os.environ.copy())
    none, *refusals = result.stdout.splitlines()
    assert (result.returncode, result.stderr, none, len(refusals)) == (0, "", "None", 3)
