"""The trainer: states, changes at step boundaries, requests, failures, events in order."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from enum import Enum

import numpy as np
import pytest
import torch

from amplab.lab import (
    ConfigChanged,
    Experiment,
    ExperimentConfig,
    Failed,
    GradientsReady,
    InputsReady,
    SkipExplained,
    StagesReady,
    StateChanged,
    StepRecord,
    TraceReady,
    Trainer,
    load_run,
)
from amplab.lab.models import MODELS, ModelChoice

SMALL = ExperimentConfig(hidden=16)


def records(trainer: Trainer) -> list[StepRecord]:
    return [replace(record, seconds=0.0) for record in trainer.history.records()]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_run_start_step_and_bare_steps_give_the_same_history(level, until):
    config = replace(SMALL, opt_level=level)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        experiment = Experiment(config)
        bare = [replace(experiment.step(), seconds=0.0) for _ in range(12)]
    finally:
        torch.set_num_threads(threads)
    ran, started, stepped = Trainer(config), Trainer(config), Trainer(config)
    ran.run(5)
    ran.run(7)
    started.start()
    until(lambda: len(started.history) >= 12)
    started.pause()
    for _ in range(12):
        stepped.step()
    assert all(trainer.wait(20) for trainer in (started, stepped))
    assert records(ran) == bare
    assert records(started)[:12] == bare
    assert records(stepped) == bare


def test_states_and_their_events(trainer, listen, until):
    ear = listen(trainer)
    assert trainer.state == "ready"
    trainer.start()
    assert trainer.state == "running"
    until(lambda: len(trainer.history) > 3)
    trainer.pause()
    assert trainer.state == "paused"
    assert trainer.wait(10)
    resting = len(trainer.history)
    time.sleep(0.05)
    assert len(trainer.history) == resting
    trainer.resume()
    until(lambda: len(trainer.history) > resting + 3)
    trainer.step()  # one more, then rest
    assert trainer.wait(10)
    trainer.stop()
    assert trainer.wait(10)
    assert ear.states == ["running", "paused", "running", "paused", "stopped"]
    assert ear.of(StateChanged)[1].step == resting
    assert [record.step for record in ear.of(StepRecord)] == list(range(len(trainer.history)))
    assert ear.threads == {"amplab trainer"}
    with pytest.raises(RuntimeError, match=r"start\(\): the run has stopped"):
        trainer.start()
    with pytest.raises(RuntimeError, match=r"step\(\): the run has stopped"):
        trainer.step()


def test_step_from_rest_makes_one_step(trainer, listen):
    ear = listen(trainer)
    trainer.step()
    trainer.step()
    assert trainer.wait(10)
    assert (len(trainer.history), trainer.state) == (2, "paused")
    assert ear.states == ["paused"]


def test_start_with_a_number_of_steps_rests_after_them(trainer):
    trainer.start(4)
    assert trainer.wait(20)
    assert (len(trainer.history), trainer.state) == (4, "paused")


def test_a_change_lands_on_a_step_boundary_with_weights_kept(trainer, listen, until):
    ear = listen(trainer)
    trainer.start()
    until(lambda: len(trainer.history) > 5)
    trainer.change(opt_level="O2")
    trainer.change(lr=0.01)
    until(lambda: trainer.config.learning_rate == 0.01 and trainer.history.last.opt_level == "O2")
    trainer.pause()
    assert trainer.wait(10)
    first, second = ear.of(ConfigChanged)
    assert (first.previous, first.config.opt_level, first.reset) == (SMALL, "O2", False)
    assert (second.config.opt_level, second.config.lr) == ("O2", 0.01)
    assert trainer.history.level_changes() == [(0, "O1"), (first.step, "O2")]
    where = ear.events.index(first)
    assert all(event.opt_level == "O1" for event in ear.events[:where] if isinstance(event, StepRecord))


def test_changes_before_a_run_hold_from_its_first_step(trainer):
    trainer.change(opt_level="O3", loss_scale=8.0)
    record = trainer.run(1).last
    assert (record.opt_level, record.loss_scale) == ("O3", 8.0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"opt_level": "O9"}, "opt_level=O9:"),
        ({"opt_leevl": "O1"}, "did you mean opt_level"),
        ({"hidden": 32}, "hidden=32:"),
        ({"model": "cnn"}, "model=cnn:"),
        ({"batch_size": 5000}, "batch_size=5000:"),
        ({"loss_scale": -2.0}, "loss_scale=-2: expected"),
        ({"master_weights": True}, "master_weights=true with opt_level=O1: "),
    ],
)
def test_a_bad_change_is_refused_in_the_call_and_changes_nothing(trainer, fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer.change(**fields)
    assert trainer.wait(10)
    assert (trainer.config, trainer.state) == (SMALL, "ready")


def test_reset_begins_anew_from_the_seed(trainer, listen):
    ear = listen(trainer)
    trainer.inject("overflow")
    trainer.inject("underflow")
    trainer.run(6)
    old = trainer.history
    trainer.reset()
    trainer.run(6)
    assert len(old) == 6
    assert old.record(0).injected == "overflow+underflow"
    assert records(trainer) == records_of(SMALL, 6)
    assert ear.of(ConfigChanged) == [ConfigChanged(SMALL, SMALL, 0, reset=True)]
    other = replace(SMALL, model="cnn", opt_level="O2")
    trainer.reset(other)
    trainer.run(2)
    assert records(trainer) == records_of(other, 2)
    assert ear.states == ["running", "paused", "ready", "running", "paused", "ready", "running", "paused"]


def records_of(config: ExperimentConfig, steps: int) -> list[StepRecord]:
    trainer = Trainer(config)
    trainer.run(steps)
    return records(trainer)


def test_reset_in_full_flight(trainer, until):
    trainer.start()
    until(lambda: len(trainer.history) > 5)
    trainer.reset()
    assert trainer.state == "ready"
    assert trainer.wait(10)
    assert (len(trainer.history), trainer.state) == (0, "ready")


def test_faults_are_recorded_in_their_step(trainer):
    trainer.run(3)
    trainer.inject("overflow")
    trainer.run(1)
    trainer.inject("nan")
    trainer.inject("underflow", on=True)
    trainer.run(2)
    trainer.inject("underflow", on=False)
    trainer.run(1)
    assert trainer.history.column("injected").tolist() == [
        None, None, None, "overflow", "underflow+nan", "underflow", None,
    ]  # fmt: skip
    assert [record.step for record in trainer.history.skips()] == [3, 4]
    with pytest.raises(ValueError, match="'zap'"):
        trainer.inject("zap")


def test_numbers_flags_and_names_of_numpy_and_of_enums_take_effect_as_plain_ones(trainer, listen):
    ear = listen(trainer)
    trainer.set_speed(np.float64(1e4))
    assert type(trainer.speed) is float
    assert len(trainer.run(np.int64(2))) == 2
    trainer.inject(Enum("Fault", {"BAD": "nan"}, type=str).BAD)
    assert trainer.run(1).last.injected == "nan"
    trainer.inject("underflow", on=np.True_)
    trainer.inject("underflow", on=np.False_)
    for request in (trainer.request_explanation, trainer.request_stages):
        request(np.int64(2))
    trainer.request_inputs(np.int64(0))
    assert trainer.wait(20)
    assert [change.text for change in trainer.history.changes][-1:] == ["injected underflow: off"]
    assert {type(event.step) for event in ear.of(StagesReady) + ear.of(SkipExplained)} == {int}
    assert type(ear.of(InputsReady)[0].index) is int
    trainer.reset()
    assert trainer.wait(20)
    trainer.kept.show(1, is_shown=np.False_)
    assert trainer.kept.runs[0].is_shown is False
    with pytest.raises(ValueError, match="steps="):
        trainer.run(np.int64(0))


def test_requests_are_answered_at_rest_and_in_flight(trainer, listen, until):
    ear = listen(trainer)
    trainer.request_trace()
    assert trainer.wait(20)
    (at_rest,) = ear.of(TraceReady)
    assert (at_rest.step, at_rest.opt_level, len(at_rest.trace) > 10) == (0, "O1", True)
    trainer.start()
    until(lambda: len(trainer.history) > 3)
    trainer.request_gradients()
    until(lambda: bool(ear.of(GradientsReady)))
    trainer.pause()
    assert trainer.wait(10)
    (answer,) = ear.of(GradientsReady)
    assert answer.record.step >= 3
    assert records(trainer) == records_of(SMALL, len(trainer.history))  # looking changed nothing


def test_a_request_that_waits_is_not_queued_twice(trainer, listen):
    ear = listen(trainer)
    gate = threading.Event()
    trainer.subscribe(lambda event: gate.wait(10) if isinstance(event, StepRecord) else None)
    trainer.step()
    for _ in range(5):
        trainer.request_trace()
    gate.set()
    assert trainer.wait(20)
    assert len(ear.of(TraceReady)) == 1


class Boom(RuntimeError):
    pass


def fail_at_the_next_forward(trainer: Trainer) -> torch.utils.hooks.RemovableHandle:
    def explode(module: torch.nn.Module, inputs: object) -> None:
        raise Boom("out of order")

    return trainer._run.experiment.model.register_forward_pre_hook(explode)


def test_a_failed_run_says_so_and_a_reset_recovers(trainer, listen):
    ear = listen(trainer)
    trainer.run(2)
    fail_at_the_next_forward(trainer)
    with pytest.raises(RuntimeError, match=r"run\(5\): failed at step 2"):
        trainer.run(5)
    assert trainer.state == "failed"
    (told,) = ear.of(Failed)
    assert told.fatal
    assert "Boom: out of order" in told.text
    assert ear.states == ["running", "paused", "running", "failed"]
    with pytest.raises(RuntimeError, match="the run has failed"):
        trainer.start()
    trainer.reset()
    trainer.run(3)
    assert records(trainer) == records_of(SMALL, 3)


def test_a_failed_run_cannot_continue_after_a_reset(trainer):
    trainer.run(2)
    fail_at_the_next_forward(trainer)
    with pytest.raises(RuntimeError, match="failed at step 2"):
        trainer.run(5)
    trainer.reset()
    trainer.run(3)
    (failed,) = trainer.kept.runs
    assert failed.error == "Training failed."
    with pytest.raises(ValueError, match="its training failed"):
        trainer.continue_from(failed)
    trainer.undo()
    assert trainer.wait(20)
    assert (trainer.state, len(trainer.history)) == ("failed", 2)


def test_a_failed_run_that_undo_brings_back_has_its_failure_again(trainer, listen):
    trainer.run(2)
    fault = fail_at_the_next_forward(trainer)
    with pytest.raises(RuntimeError, match="Boom: out of order"):
        trainer.run(5)
    fault.remove()  # the score of a replaced run is a forward too
    (failure,) = trainer.failures
    trainer.reset()
    trainer.run(3)
    assert trainer.failures == ()
    ear = listen(trainer)
    trainer.undo()
    assert trainer.wait(20)
    assert trainer.failures == tuple(ear.of(Failed)) == (failure,)
    trainer.reset()
    trainer.undo()
    assert trainer.wait(20)
    assert (trainer.state, trainer.failures) == ("failed", (failure,))


def test_a_run_whose_failure_another_thread_forgets_still_says_that_it_failed(trainer):
    """As a reset does, between the end of the run and the message."""
    trainer.run(2)
    fail_at_the_next_forward(trainer)
    trainer.subscribe(lambda event: isinstance(event, Failed) and trainer._publisher.forget_run())
    with pytest.raises(RuntimeError, match=r"run\(5\): failed at step 2"):
        trainer.run(5)


def test_a_reset_that_cannot_be_made_loses_no_run(trainer, monkeypatch):
    trainer.run(4)
    wide = replace(SMALL, hidden=32)
    monkeypatch.setattr("amplab.lab.models.MODELS", {})
    trainer.reset(wide)
    with pytest.raises(RuntimeError, match="The new run cannot begin"):
        trainer.run(1)
    monkeypatch.undo()
    assert (trainer.state, len(trainer.history), trainer.config) == ("failed", 4, SMALL)
    trainer.reset()
    trainer.undo()
    trainer.run(3)
    assert records(trainer) == records_of(SMALL, 7)


def test_a_trace_that_fails_leaves_the_run_alone(trainer, listen):
    ear = listen(trainer)
    handle = trainer._run.experiment.model.register_forward_pre_hook(lambda *_: 1 / 0)
    trainer.request_trace()
    assert trainer.wait(10)
    handle.remove()
    (told,) = ear.of(Failed)
    assert told.text.startswith("trace failed; the run is not changed.\nTraceback")
    assert (told.fatal, trainer.state) == (False, "ready")
    trainer.run(2)


def test_a_nan_that_stays_in_batchnorm_is_reported_once(listen):
    trainer = Trainer(replace(SMALL, model="cnn"))
    ear = listen(trainer)
    trainer.run(2)
    for _ in range(2):
        trainer.inject("nan")
        trainer.run(1)
    (told,) = ear.of(Failed)
    assert told.text.startswith("Step 2 left NaN or inf in ")
    assert "running_mean" in told.text
    assert trainer.history.last.skipped
    trainer.reset()
    trainer.run(1)
    assert len(ear.of(Failed)) == 1


def test_a_skipped_nan_in_a_model_without_buffers_is_not_a_failure(trainer, listen):
    ear = listen(trainer)
    trainer.inject("nan")
    trainer.run(2)
    assert ear.of(Failed) == []


def test_run_refuses_what_it_cannot_do(trainer):
    for steps in (0, -3, 2.5, True, None):
        with pytest.raises(ValueError, match="expected a whole number > 0"):
            trainer.run(steps)
    trainer.start()
    with pytest.raises(RuntimeError, match=r"run\(3\): .*running already"):
        trainer.run(3)


def test_a_forgotten_run_pauses_at_its_limit(listen):
    trainer = Trainer(SMALL, step_limit=20)
    ear = listen(trainer)
    trainer.start()
    assert trainer.wait(20)
    assert len(trainer.history) == 20
    assert ear.of(StateChanged)[-1].note == "20 steps are done, the limit of one run; call reset() to start again."


def test_all_runs_have_their_logs_in_one_folder_though_the_working_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trainer = Trainer(SMALL, log="runs")
    trainer.run(1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.reset()
    trainer.run(1)
    assert trainer.log_path.parent == tmp_path / "runs"


def test_steps_that_were_asked_for_are_made_beyond_the_limit():
    assert len(Trainer(SMALL, step_limit=20).run(30)) == 30


WITHOUT_COMPILER = """
from amplab.lab import ExperimentConfig, Trainer
trainer = Trainer(ExperimentConfig(hidden=16))
trainer.run(2)
print(trainer.state, trainer.failures[0].fatal, trainer.failures[0].text)
"""


def test_kernels_that_cannot_be_built_are_an_event_and_no_warning(tmp_path):
    nowhere = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment = {**os.environ, "AMPLAB_KERNELS": "auto", **nowhere}
    command = [sys.executable, "-W", "error", "-c", WITHOUT_COMPILER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("paused False amplab kernels: failed. ")
    assert "To enable them: " in result.stdout


class WithDropout(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.nn.functional.dropout(x, 0.01)
        return self.last(torch.relu(self.first(x.flatten(1))))


def test_trainers_that_train_at_once_draw_the_random_numbers_of_their_own_seeds(monkeypatch):
    """Each is, bit for bit, the run that it is alone; and the numbers of the process stay its own."""
    monkeypatch.setitem(MODELS, "dropping", ModelChoice("Dropout", WithDropout, ("digits",)))
    configs = [ExperimentConfig(model="dropping", hidden=16, seed=seed) for seed in range(3)]
    alone = [Trainer(config) for config in configs]
    for each in alone:
        each.run(60)
    state = torch.get_rng_state()
    together = [Trainer(config) for config in configs]
    for each in together:
        each.start(60)
    assert all(each.wait(200) for each in together)
    assert torch.equal(torch.get_rng_state(), state)
    assert [records(each) for each in together] == [records(each) for each in alone]


@pytest.mark.parametrize("control", ["continue_from", "undo"])
def test_a_stop_after_a_control_that_brings_a_run_back_ends_that_run(control, tmp_path):
    trainer = Trainer(ExperimentConfig(hidden=4), log=tmp_path)
    trainer.run(3)
    log = trainer.log_path
    trainer.reset()
    trainer.run(2)
    trainer.continue_from(trainer.kept.runs[0]) if control == "continue_from" else trainer.undo()
    trainer.stop()
    trainer.wait()
    assert (trainer.state, len(trainer.history)) == ("stopped", 3)
    with pytest.raises(RuntimeError, match="the run has stopped"):
        trainer.run(4)
    trainer.reset()
    trainer.run(1)
    trainer.continue_from(next(each for each in trainer.kept.runs if len(each.history) == 3))
    trainer.run(4)
    trainer.stop()
    trainer.wait()
    assert trainer.log_path == log
    assert len(load_run(log).history) == 7


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_an_interrupt_of_a_run_does_not_wait_for_a_long_step(monkeypatch):
    monkeypatch.setattr("amplab.lab.trainer._STEP_SECONDS", 0.2)
    step_ends = threading.Event()
    trainer = Trainer(ExperimentConfig(hidden=4))
    trainer.subscribe(lambda event: step_ends.wait(60) if isinstance(event, StepRecord) else None)
    interrupt = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.run(5)
    step_ends.set()
    trainer.wait()
    assert (trainer.state, len(trainer.history)) == ("paused", 1)


def test_a_run_after_an_undo_returns_when_its_steps_are_done(trainer):
    trainer.set_speed(20)
    trainer.run(20)
    trainer.reset()
    trainer.run(2)
    trainer.undo()  # the run continues that has 20 steps
    assert len(trainer.run(5)) == 25


def test_a_run_that_is_started_again_meanwhile_returns(trainer):
    trainer.set_speed(20)
    starter = threading.Timer(0.5, trainer.start)
    starter.start()
    try:
        assert len(trainer.run(30)) > 30
        assert trainer.state == "running"
    finally:
        starter.join()
        trainer.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_waits_for_no_trainer_of_its_parent():
    code = """
import os, time
from amplab.lab import ExperimentConfig, Trainer
from amplab.lab.trainer import _stop_all
trainer = Trainer(ExperimentConfig(hidden=16))
trainer.start()
if os.fork() == 0:
    began = time.monotonic()
    _stop_all()  # which runs when Python exits
    print(time.monotonic() - began, flush=True)
    os._exit(0)
os.wait()
trainer.stop()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert float(done.stdout) < 2


FORKING_STEP = """
import os, signal, sys
import torch
from torch import nn
import amplab.lab

class Forking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.ended = nn.Linear(4, 3), 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls == 7:
            if (child := os.fork()) == 0:
                signal.alarm(30)  # which ends a child that hangs
                {end}
            else:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                print("ended with", status, flush=True)
        return self.linear(x)

data = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))] * 20
amplab.lab.open(model=Forking(), data=data, loss=nn.functional.cross_entropy)
trainer = amplab.lab.active()
print(len(trainer.run(30)), flush=True)
trainer.stop()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError", 1), ("pass", 0)])
def test_a_process_that_a_step_forks_ends_with_that_step(end, code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_STEP.format(end=end)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout == f"ended with {code}\n30\n", done.stderr[-2000:]


IN_FORKS = """
import os, signal
from amplab.lab import ExperimentConfig, Trainer
trainer = Trainer(ExperimentConfig(hidden=16), log={log!r})
calls = {{
    "run": lambda: trainer.run(1), "step": trainer.step, "start": trainer.start, "score": trainer.score,
    "reset": trainer.reset, "stop": trainer.stop, "trace": trainer.trace, "change": lambda: trainer.change(lr=0.2),
}}
trainer.run(3)
if {training}:
    trainer.start()
for name, call in calls.items():
    for _ in range({tries}):
        if (child := os.fork()) == 0:
            signal.alarm(20)  # which ends a child that hangs
            try:
                call()
                print(name, "went on in a fork", flush=True)
            except RuntimeError as refusal:
                if "forked from the one that the trainer trains in" not in str(refusal):
                    print(name, refusal, flush=True)
            trainer.state, trainer.wait(), len(trainer.history)
            assert Trainer(ExperimentConfig(hidden=16)).run(1).last.step == 0
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(name, "ended with", status, flush=True)
trainer.pause()
print(len(trainer.run(2)) >= 5)
trainer.stop()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(("training", "tries"), [(False, 1), (True, 3)])
def test_a_forked_process_is_told_that_the_trainer_is_in_the_other_one(tmp_path, training, tries):
    code = IN_FORKS.format(log=str(tmp_path), training=training, tries=tries)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.fixture
def in_a_step(trainer, monkeypatch):
    """Do something while one step runs, then pause, and return when all is done."""
    step = Experiment.step
    begun, may_end = threading.Event(), threading.Event()

    def held(self):
        begun.set()
        may_end.wait(60)
        return step(self)

    def act(do):
        with monkeypatch.context() as patched:
            patched.setattr(Experiment, "step", held)
            trainer.start()
            assert begun.wait(60)
            do()
            trainer.pause()
            may_end.set()
            trainer.wait()

    return act


def test_changes_after_an_undo_in_the_same_step_keep_what_it_took_back(trainer, in_a_step):
    trainer.run(2)
    trainer.change(lr=0.5)
    trainer.run(1)

    def undo_then_change():
        trainer.undo()
        trainer.change(momentum=0.5)

    in_a_step(undo_then_change)
    assert (trainer.config.lr, trainer.config.momentum) == (None, 0.5)
    trainer.change(growth_interval=60)
    trainer.wait()
    assert (trainer.config.lr, trainer.config.momentum, trainer.config.growth_interval) == (None, 0.5, 60)


def test_changes_after_a_run_that_comes_back_in_the_same_step_are_changes_of_it(trainer, in_a_step):
    trainer.run(2)
    before = trainer.config
    trainer.reset(before.changed(opt_level="O0", lr=0.2))
    trainer.run(1)

    def undo_then_change():
        trainer.undo()
        trainer.change(momentum=0.5)

    in_a_step(undo_then_change)
    assert trainer.config == before.changed(momentum=0.5)


def test_a_reset_with_a_changed_field_keeps_changes_of_the_same_step(trainer, in_a_step):
    trainer.run(2)

    def change_then_reset():
        trainer.change(momentum=0.5)
        trainer.reset_with(hidden=24)

    in_a_step(change_then_reset)
    assert (trainer.config.momentum, trainer.config.hidden) == (0.5, 24)


LONG = ExperimentConfig(model="cnn", hidden=16, batch_size=8, accumulate=50)


class Held:
    """Holds the forward of a model at one batch, in whatever thread, until it is let go; counts the batches."""

    def __init__(self, at: int) -> None:
        self.count, self._at = 0, at
        self.reached, self.free = threading.Event(), threading.Event()

    def __call__(self, module: torch.nn.Module, _inputs: object) -> None:
        if type(module).__name__ == "CNN" and module.training:
            self.count += 1
            if self.count == self._at:
                self.reached.set()
                assert self.free.wait(20)


@pytest.fixture
def held():
    """Hold the next steps at a batch."""
    handles = []

    def hold(at: int) -> Held:
        one = Held(at)
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(one))
        return one

    yield hold
    for handle in handles:
        handle.remove()


CONTROLS = {
    "pause": lambda trainer: trainer.pause(),
    "reset": lambda trainer: trainer.reset(),
    "stop": lambda trainer: trainer.stop(),
    "pause and change": lambda trainer: (trainer.pause(), trainer.change(lr=0.05)),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("at", [3, 60], ids=["in the histogram before it", "in the step"])
def test_a_control_in_a_step_of_many_batches_takes_effect_within_one(control, at, held, listen):
    trainer = Trainer(LONG)
    trainer.change(lr=0.02)
    assert trainer.wait(20)
    ear, step = listen(trainer), held(at)
    trainer.start()
    assert step.reached.wait(20)
    CONTROLS[control](trainer)
    step.free.set()
    assert trainer.wait(20)
    assert step.count == at
    assert ear.of(StepRecord) == []
    assert (len(trainer.history), len(trainer.history.gradient_samples)) == (0, 0)
    assert trainer.state == {"reset": "ready", "stop": "stopped"}.get(control, "paused")
    if control != "stop":
        trainer.run(2)
        whole = Trainer(trainer.config)
        whole.run(2)
        assert records(trainer) == records(whole)
        assert [each.step for each in trainer.history.gradient_samples] == [0]


@pytest.mark.parametrize("control", [lambda trainer: trainer.change(lr=0.05), lambda trainer: trainer.undo()])
def test_a_change_in_a_step_of_many_batches_comes_before_that_step(control, held, listen, until):
    trainer = Trainer(LONG)
    trainer.change(lr=0.02)
    trainer.run(1)
    ear, step = listen(trainer), held(20)
    trainer.start()
    assert step.reached.wait(20)
    control(trainer)
    step.free.set()
    until(lambda: len(trainer.history) >= 2)
    trainer.pause()
    assert trainer.wait(20)
    assert [each.step for each in ear.of(ConfigChanged)] == [1]


def test_a_run_that_is_reset_in_a_step_continues_as_if_it_had_not_been(held):
    trainer, whole = Trainer(LONG), Trainer(LONG)
    trainer.run(2)
    step = held(20)
    trainer.start()
    assert step.reached.wait(20)
    trainer.reset()
    step.free.set()
    assert trainer.wait(20)
    (kept,) = trainer.kept.runs
    assert len(kept.history) == 2
    trainer.continue_from(kept)
    trainer.run(2)
    whole.run(4)
    assert records(trainer) == records(whole)


def test_a_step_that_was_asked_for_is_made_before_what_is_called_after_it(held):
    trainer = Trainer(LONG)
    step = held(60)
    trainer.step()
    assert step.reached.wait(20)
    trainer.change(lr=0.05)
    trainer.pause()
    step.free.set()
    assert trainer.wait(20)
    assert len(trainer.history) == 1
    assert [each.step for each in trainer.history.changes] == [0, 1]


@pytest.mark.parametrize("way", ["step", "step_in_stages"])
def test_a_reset_does_not_wait_for_a_step_that_was_asked_for(way, held):
    trainer = Trainer(LONG)
    step = held(60)
    getattr(trainer, way)()
    assert step.reached.wait(20)
    trainer.reset()
    step.free.set()
    assert trainer.wait(20)
    assert step.count == 60
    assert (trainer.state, len(trainer.history), len(trainer.kept.runs)) == ("ready", 0, 0)
    assert trainer.failures == ()


def test_a_comparison_ends_within_a_batch(held):
    trainer = Trainer(LONG)
    step = held(70)
    trainer.compare(steps=3)
    assert step.reached.wait(20)
    trainer.stop_comparison()
    step.free.set()
    assert trainer.wait(20)
    (run,) = trainer.kept.runs
    assert (len(run.history), run.error) == (1, "")


@pytest.mark.parametrize("control", ["pause", "reset"])
def test_a_control_does_not_wait_for_the_explanation_of_a_skipped_step_of_many_batches(control, listen):
    trainer = Trainer(ExperimentConfig(hidden=16, batch_size=8, accumulate=4))
    trainer.run(1)
    ear = listen(trainer)
    trainer.subscribe(lambda event: isinstance(event, StepRecord) and event.skipped and getattr(trainer, control)())
    trainer.inject("overflow")
    trainer.start()
    assert trainer.wait(30)
    kinds = [type(each) for each in ear.events if isinstance(each, StateChanged | ConfigChanged | SkipExplained)]
    change = StateChanged if control == "pause" else ConfigChanged
    assert SkipExplained not in kinds[: kinds.index(change, kinds.index(StateChanged) + 1)]
    assert (SkipExplained in kinds) == (control == "pause"), "a paused run has the time"
    trainer.stop()
    assert trainer.wait(10)


@pytest.mark.parametrize("control", ["reset", "stop"])
def test_a_step_that_was_asked_for_before_the_run_ends_is_not_made(control, listen):
    trainer = Trainer(ExperimentConfig(hidden=16, batch_size=8, accumulate=4))
    trainer.run(1)
    ear = listen(trainer)
    trainer.request_twin()  # keeps the thread busy while both come
    trainer.step()
    getattr(trainer, control)()
    assert trainer.wait(60)
    assert ear.of(StepRecord) == []
    trainer.stop()
    assert trainer.wait(10)
