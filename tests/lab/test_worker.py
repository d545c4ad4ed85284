"""The trainer's thread: its compute threads, its idle end, an interrupt, the end of Python."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from amplab.lab import ExperimentConfig, Failed, StepRecord, TraceReady, Trainer, load_run
from amplab.lab.own_task import register_own
from amplab.lab.worker import Worker

pytestmark = pytest.mark.usefixtures("nothing_own")

SMALL = ExperimentConfig(hidden=16)


def test_waiting_in_a_callback_is_refused_instead_of_hanging(trainer, listen, until):
    ear = listen(trainer)
    trainer.subscribe(lambda event: trainer.run(2) if isinstance(event, TraceReady) else None)
    trainer.request_trace()
    until(lambda: bool(ear.of(Failed)))
    assert "would wait for itself" in ear.of(Failed)[0].text
    assert len(trainer.history) == 0


def test_controls_may_be_used_in_a_callback(trainer):
    trainer.subscribe(lambda event: trainer.pause() if isinstance(event, StepRecord) and event.step == 7 else None)
    trainer.start()
    assert trainer.wait(20)
    assert len(trainer.history) == 8


def test_only_the_trainers_own_thread_computes_with_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    seen: dict[str, int] = {}
    try:
        trainer = Trainer(SMALL)
        trainer.subscribe(lambda event: seen.__setitem__("trainer", torch.get_num_threads()))
        trainer.run(1)
        later = threading.Thread(target=lambda: seen.__setitem__("later", torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == {"trainer": 1, "later": 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_code_of_a_step_that_sets_the_number_of_threads_sets_it_for_that_step_alone():
    """As a function that scores on all cores: the steps after it, and runs after a reset, have the bits of before."""
    seen = list[int]()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(2)
        return (output - target).square().mean()

    model, batch = torch.nn.Linear(4, 2), (torch.ones(8, 4), torch.zeros(8, 2))
    trainer = Trainer(ExperimentConfig(task=register_own(model, [batch], loss=loss)))
    seen.clear()
    trainer.run(3)
    trainer.reset()
    trainer.run(2)
    assert {*seen} == {1}
    assert len(seen) >= 5
    of_later = list[int]()
    later = threading.Thread(target=lambda: of_later.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert of_later == [2]  # as that code wanted it


def test_an_idle_trainer_is_collected(monkeypatch):
    monkeypatch.setattr("amplab.lab.worker._IDLE_SECONDS", 0.05)
    trainer = Trainer(SMALL)
    trainer.run(1)
    gone, thread = weakref.ref(trainer), trainer._worker._thread
    del trainer
    thread.join(10)
    gc.collect()
    assert gone() is None


def test_it_starts_again_after_its_thread_has_ended(monkeypatch, until):
    monkeypatch.setattr("amplab.lab.worker._IDLE_SECONDS", 0.01)
    trainer = Trainer(SMALL)
    for _ in range(3):
        trainer.run(1)
        until(lambda: trainer._worker._thread is None)
    assert trainer.history.column("step").tolist() == [0, 1, 2]


INTERRUPTED = """
import signal, sys, threading, time, os
from amplab.lab import ExperimentConfig, Trainer
trainer = Trainer(ExperimentConfig(hidden=16), log=sys.argv[1])
trainer.run(1)
def interrupt(event):
    if getattr(event, "step", 0) == 20:
        os.kill(os.getpid(), signal.SIGINT)
trainer.subscribe(interrupt)
try:
    trainer.run(10**6)
except KeyboardInterrupt:
    print(trainer.state, len(trainer.history) > 1, trainer.run(1).last.step == len(trainer.history) - 1)
trainer.start()  # and left running: the end of Python must be clean
time.sleep(0.3)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGINT to itself")
def test_an_interrupt_pauses_at_a_boundary_and_python_ends_cleanly(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", INTERRUPTED, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["paused", "True", "True"]
    run = load_run(path)
    assert not run.truncated
    assert run.history.column("step").tolist() == list(range(len(run.history)))


def new_worker(errors, *, seconds_left=lambda: 0.0, wanted=()):
    return Worker(step=lambda: None, is_wanted=lambda: bool(wanted), on_error=errors.append, seconds_left=seconds_left)


def test_a_step_that_is_due_in_a_million_years_ends_no_thread():
    errors, wanted = [], [True]
    worker = new_worker(errors, seconds_left=lambda: 3e13, wanted=wanted)
    worker.wake()
    time.sleep(0.05)
    assert worker.ask(lambda: "answer") == "answer"
    wanted.clear()
    assert worker.wait(10)
    assert not errors


def test_what_its_owner_raises_while_it_waits_is_reported_and_ends_no_thread():
    errors = []

    def seconds_left():
        wanted.clear()
        sys.exit("at the wait")

    wanted = [True]
    worker = new_worker(errors, seconds_left=seconds_left, wanted=wanted)
    worker.wake()
    assert worker.wait(10)
    assert worker.ask(lambda: 1) == 1
    assert "at the wait" in errors[0]


def test_a_thread_that_has_died_is_started_again():
    worker = new_worker([])
    worker._thread = threading.Thread(target=lambda: None)
    worker._thread.start()
    worker._thread.join()
    answers = []
    worker.post(lambda: answers.append(1))
    assert worker.wait(10)
    assert answers == [1]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_model_raises_fails_the_run_which_a_reset_begins_again(kind):
    class Model(torch.nn.Linear):
        raises = False

        def forward(self, x):
            if self.raises and torch.is_grad_enabled():
                raise kind("from the model")
            return super().forward(x)

    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
    model = Model(4, 2)
    trainer = Trainer(ExperimentConfig(task=register_own(model, data, loss=torch.nn.functional.cross_entropy)))
    Model.raises = True
    with pytest.raises(RuntimeError, match="from the model"):
        trainer.run(3)
    assert trainer.state == "failed"
    Model.raises = False
    trainer.reset()
    assert len(trainer.run(3)) == 3
    Model.raises = True
    trainer.request_trace()
    trainer.compare(steps=1)
    assert trainer.wait(60)
    assert (trainer.state, trainer.comparison) == ("paused", None)
