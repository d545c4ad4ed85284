"""A time limit, as a handler of a signal that raises, ends every tool and every watched loop, wherever it comes."""

import ctypes
import errno
import itertools
import os
import posixpath
import signal
import tempfile
import zipfile
from dataclasses import replace

import pytest
import torch
from interrupts import PACKAGE, interrupted
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import amplab
from amplab import amp
from amplab.amp.run_state import file_format, save_and_load
from amplab.amp.run_state.paths import given_path
from amplab.diagnose.train_step import loop_recorder
from amplab.lab import load_run
from amplab.lab.run_log import RunLog
from amplab.lab.run_log.header import held_by

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends SIGUSR1")
X = torch.ones(8, 4)


class Late(TimeoutError):
    """What the handler raises."""


class Clock:
    """Sends a signal at one of its ticks."""

    def __init__(self):
        self._ticks, self.ends = ctypes.c_long(0), None  # not a plain number, which a watch restores after a rerun

    @property
    def ticks(self):
        return self._ticks.value

    def tick(self):
        self._ticks.value += 1
        if self.ticks == self.ends:
            signal.raise_signal(signal.SIGUSR1)

    def ticking(self, function):
        """Return `function` with a tick before each call."""

        def ticks(*given, **options):
            self.tick()
            return function(*given, **options)

        return ticks

    def passes(self, run, at_least):
        """Send the signal at each tick of `run`: what its handler raises comes out of it, and nothing stays on."""
        for self.ends in itertools.count(1):
            self._ticks.value = 0
            try:
                run()
            except Late:
                assert not _get_current_dispatch_mode_stack()
                assert torch.is_grad_enabled()
            else:
                assert at_least <= self.ticks < self.ends
                return


def late(*_):
    raise Late(errno.ETIME, os.strerror(errno.ETIME))


class LateObject:
    def __call__(self, *_):
        raise Late


@pytest.fixture(params=[late, LateObject()], ids=["function", "object"])
def clock(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield Clock()
    signal.signal(signal.SIGUSR1, before)


def loss_of(output, _target=None):
    return output.square().mean()


def made(weight=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.mul_(weight)
    return model


def step(model, optimizer, scaler, loss):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        value = loss(model(X))
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()


def doctored_loop(loss):
    model = made()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def train():
        step(model, optimizer, scaler, loss)

    amplab.doctor(model, X, loss=loss_of, train_step=train, optimizer=optimizer, scaler=scaler)


class CopiedSlowly(nn.Linear):
    def __init__(self, copies):
        super().__init__(4, 1)
        self.copies = copies

    def __deepcopy__(self, memo):
        self.copies(torch.ones(1))
        return nn.Linear(4, 1)


TOOLS = {
    "doctor": lambda loss: amplab.doctor(made(), X, loss=loss),
    "doctor of a loop": doctored_loop,
    "ladder": lambda loss: amplab.ladder(
        made, [(X, X)], loss=loss, steps=8, rungs={"O1": "O1", "fp32": "fp32"}, tell=lambda _: None
    ),
    "twin": lambda loss: amplab.twin(made(), X, loss=loss, steps=2),
    "twin, in its copy": lambda loss: amplab.twin(CopiedSlowly(loss), X, loss=loss_of, steps=2),
    "first_nonfinite": lambda loss: amplab.first_nonfinite(made(1e6), X, loss=loss, opt_level="O2"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_time_limit_ends_a_tool_at_every_call_of_the_users_code(name, clock):
    clock.passes(lambda: TOOLS[name](clock.ticking(loss_of)), at_least=1)


def train(steps=3, log=None, loss_of_rerun=loss_of, watches=None):
    """Run a watched loop of which every step overflows."""
    model = made()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def again(batch):
        with torch.autocast("cpu", torch.float16):
            return loss_of_rerun(model(batch))

    with amplab.watch(model, optimizer, scaler=scaler, log=log, step=again, every=1) as w:
        if watches is not None:
            watches.append(w)
        for _ in w.batches([X] * steps):
            step(model, optimizer, scaler, lambda output: w.loss(loss_of(output)))


def test_a_time_limit_in_a_step_that_runs_again_ends_the_loop(clock):
    clock.passes(lambda: train(loss_of_rerun=clock.ticking(loss_of)), at_least=1)


def test_a_time_limit_while_a_look_records_ends_the_loop_and_the_look(clock, monkeypatch):
    monkeypatch.setattr(loop_recorder, "norm_of", clock.ticking(loop_recorder.norm_of))
    clock.passes(lambda: train(steps=1), at_least=4)


def test_a_time_limit_while_a_log_is_written_loses_no_record(clock, tmp_path, monkeypatch):
    for name in ("_open", "_write_block", "_end_of_file"):
        monkeypatch.setattr(RunLog, name, clock.ticking(getattr(RunLog, name)))
    logs = (tmp_path / f"{number}.jsonl" for number in itertools.count())
    watches = []

    def run():
        log = next(logs)
        try:
            train(log=log, watches=watches)
        finally:
            assert len(load_run(log).history) == len(watches.pop().history)

    clock.passes(run, at_least=8)


def test_a_time_limit_while_a_checkpoint_is_loaded_does_not_call_it_damaged(clock, tmp_path, monkeypatch):
    path, model = tmp_path / "run.pt", made()
    amp.save_run_state(path, model=model)
    copied = clock.ticking(torch.Tensor.copy_)
    for owner, name in [
        (torch, "load"),
        (file_format, "_compressed"),
        (save_and_load, "model_problems"),
        (zipfile, "_EndRecData"),
        (model, "load_state_dict"),
    ]:
        monkeypatch.setattr(owner, name, clock.ticking(getattr(owner, name)))

    class CopiesSlowly(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return (copied if function is torch.Tensor.copy_ else function)(*args, **(kwargs or {}))

    def load():
        with CopiesSlowly():
            amp.load_run_state(path, model=model)

    clock.passes(load, at_least=9)


def saved(folder):
    (folder / ".run.pt.0123abcd.partial").touch()  # as a killed process leaves it
    file_format.write_run_state(given_path(folder / "run.pt"), {"extra": 1})


def watched(folder):
    model = made()
    amplab.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), log=folder)


def read_again(folder):
    log = folder / "run.jsonl"
    if not log.exists():
        train(steps=1, log=log)
    run = load_run(log)
    assert replace(run, held=tuple(held_by(log))).end.state == "lost"


AMPLABS = [f"{PACKAGE}/amp/run_state", f"{PACKAGE}/lab/run_log"]
FILES = [*AMPLABS, posixpath.realpath.__code__.co_filename, tempfile.__file__]  # "<frozen posixpath>"


@pytest.mark.parametrize("use", [saved, watched, read_again])
def test_a_time_limit_at_any_point_of_code_about_files_is_raised(use, tmp_path):
    """A TimeoutError is an OSError, and many functions about files, also those of Python, catch one."""
    before = signal.signal(signal.SIGINT, late)
    try:
        use(tmp_path)
        for at in itertools.count(1):
            try:
                interrupt = interrupted(lambda: use(tmp_path), at, folders=FILES)
            except Late:
                continue
            assert interrupt is None, interrupt
            assert at > 40
            return
    finally:
        signal.signal(signal.SIGINT, before)
