"""After an interrupt anywhere in a watched step, the log has every finished step once, and the loop goes on."""

import contextlib
import inspect
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from interrupts import PACKAGE, interrupted, interrupted_everywhere
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import amplab
from amplab import amp
from amplab.lab import load_run, watch
from amplab.lab.run_log import RunLog
from amplab.lab.step_rerun import StepRerun
from amplab.trace import optimizer_hooks

# A generator that was interrupted can meet the interrupt again when it is deleted.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FOLDERS = [f"{PACKAGE}/lab", f"{PACKAGE}/trace/optimizer_hooks.py"]
SCALERS = {
    "none": lambda: None,
    "closure": lambda: None,  # the same, and the step calls it
    "amplab": lambda: amplab.GradScaler("cpu"),
    "torch": lambda: torch.amp.GradScaler("cpu"),
}


class Loop:
    """A watched loop of two steps, then one to interrupt, then two more; `finished` counts the optimizer's steps."""

    def __init__(self, face, log):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.is_apex, self.has_closure = face == "apex", face == "closure"
        if self.is_apex:
            amp.initialize(self.model, self.optimizer, opt_level="O1", verbosity=0)
        self.scaler = None if self.is_apex else SCALERS[face]()
        self.watch = watch(self.model, self.optimizer, scaler=self.scaler, log=log, every=3)
        self.finished = 0
        self.optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.finished += 1

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.watch.loss(self.model(torch.ones(4, 2)).square().mean())
        loss.backward()
        return loss

    def step(self):
        if self.has_closure:
            self.optimizer.step(self.backward)
            return
        self.optimizer.zero_grad()
        loss = self.watch.loss(self.model(torch.ones(4, 2)).square().mean())
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        with amp.scale_loss(loss, self.optimizer) if self.is_apex else nullcontext(loss) as scaled:
            scaled.backward()
        self.optimizer.step()

    def recorded(self, interrupt):
        """The numbers of the steps, each once and in order, in memory and in the log."""
        steps = [record.step for record in self.watch.history.records()]
        assert steps == list(range(len(steps))), interrupt
        assert [record.step for record in load_run(self.watch.log_path).history.records()] == steps, interrupt
        return steps

    def run(self, at, folders=FOLDERS):
        """Return what was interrupted."""
        with self.watch:
            self.step()
            self.step()
            interrupt = interrupted(self.step, at, folders=folders)
            if self.scaler is not None and self.scaler._per_optimizer_states:
                self.scaler.update()  # the loop was interrupted before it, or in it
            self.step()
            self.step()
        return interrupt


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("face", [*SCALERS, "apex"])
def test_a_finished_step_is_in_the_log_once(face, every, tmp_path):
    tried, lost = 0, []
    for at in itertools.count(1, every):
        loop = Loop(face, tmp_path / f"{at}.jsonl")
        interrupt = loop.run(at)
        amp.reset()
        steps = loop.recorded(interrupt)
        if interrupt is None:
            assert len(steps) == 5
            break
        tried += 1
        assert loop.finished - 1 <= len(steps) <= loop.finished, interrupt
        if len(steps) < loop.finished:
            lost.append(str(interrupt))
    assert tried > 40 / every
    assert len(lost) <= tried / 16, lost  # only a step whose outcome was not told yet


SEE_A_STEP = "_AmplabProbe._see_call", "_Calls.see", "observe", "HookedOptimizer._after_step"
"""Functions that the optimizer calls first after its step: before one of them, nothing tells that it has stepped."""


@torch.no_grad()
def loss_of(model):
    return model(torch.ones(4, 2)).square().mean().item()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("goes_on", ["at once", "after update"])
@pytest.mark.parametrize("face", ["amplab", "apex"])
def test_a_step_that_has_changed_the_weights_is_recorded_with_its_loss(face, goes_on, every, tmp_path):
    """An interrupt in the scaler, in the session, or in the hooks that see the step, takes no record."""
    for at in itertools.count(1, every):
        torch.manual_seed(0)
        loop, made, interrupt = Loop(face, tmp_path / f"{at}.jsonl"), [], None
        with loop.watch:
            for number in range(5):
                before, loss = loop.model.weight.detach().clone(), loss_of(loop.model)
                if number == 2:
                    interrupt = interrupted(loop.step, at, folders=[*FOLDERS, f"{PACKAGE}/amp"])
                    if loop.scaler is not None and goes_on == "after update":
                        with contextlib.suppress(AssertionError):  # before its step
                            loop.scaler.update()
                else:
                    loop.step()
                if not torch.equal(before, loop.model.weight):
                    made.append(pytest.approx(loss, rel=1e-2))
        amp.reset()
        loop.recorded(interrupt)
        taken = [record.loss for record in load_run(loop.watch.log_path).history.records() if not record.skipped]
        if interrupt is None:
            assert taken == made
            assert len(made) >= 3
            break
        if not interrupt.where.endswith(SEE_A_STEP):
            assert taken == made, interrupt


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_flush_that_was_interrupted_is_done_again(every, tmp_path):
    for at in itertools.count(1, every):
        loop = Loop("none", tmp_path / f"{at}.jsonl")
        with loop.watch:
            loop.step()
            loop.step()
            interrupt = interrupted(loop.watch._store.flush, at, folders=FOLDERS)
            loop.step()
        assert [record.step for record in load_run(loop.watch.log_path).history.records()] == [0, 1, 2], interrupt
        if interrupt is None:
            break


def test_no_hook_of_a_watch_stays_on():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def watched():
        with amplab.watch(model, optimizer, every=2):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()

    files = [PACKAGE, inspect.getfile(nn.Module), inspect.getfile(torch.optim.Optimizer)]
    names = ["need", "remove_hook", "register_step_pre_hook", "register_forward_hook", "register_forward_pre_hook"]
    watched()
    for interrupt in interrupted_everywhere(watched, every=2, folders=files, functions=names):
        left = model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_pre_hooks
        assert not any(left), interrupt


def test_a_step_that_runs_again_and_is_interrupted_leaves_the_model_and_the_random_state():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    again = StepRerun(model, step=lambda x: model(x).sum(), loss=None, scaler=None)
    again.remember(torch.ones(3, 2))
    model(torch.ones(3, 2))
    buffers = [each.clone() for each in model.buffers()]
    random = torch.get_rng_state()
    files = [f"{PACKAGE}/lab/step_rerun.py", f"{PACKAGE}/trace/as_found.py"]
    for interrupt in interrupted_everywhere(lambda: again.first_nonfinite(1.0), every=23, folders=files):
        assert not again.at_work, interrupt
        assert not model._forward_pre_hooks, interrupt
        assert all(map(torch.equal, model.buffers(), buffers)), interrupt
        assert torch.equal(torch.get_rng_state(), random), interrupt


def left_by(model, optimizer):
    """What a watch may leave on, by name."""
    found = {
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "function modes": _get_current_function_mode_stack(),
        "flags": [name for name, on in vars(_python_dispatch).items() if name.startswith("_is_in_") and on],
        "observers of steps": optimizer_hooks._OBSERVERS.before or optimizer_hooks._OBSERVERS.after,
        "hooks of gradients": [each for each in model.parameters() if each._post_accumulate_grad_hooks],
        "hooks of modules": [each for each in model.modules() if each._forward_hooks or each._forward_pre_hooks],
        "hooks of the optimizer": optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks,
        "grad mode": not torch.is_grad_enabled(),
    }
    return [name for name, on in found.items() if on]


@pytest.mark.parametrize(
    ("face", "every"), [("torch", 4001), *(pytest.param(face, 97, marks=pytest.mark.long) for face in SCALERS)]
)
def test_nothing_of_a_look_stays_on_and_no_look_fails(face, every):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = []

    def watched():
        scaler = SCALERS[face]()
        with amplab.watch(model, optimizer, scaler=scaler) as w:
            watches[:] = [w]
            for batch in w.batches([torch.ones(3, 2)] * 2):
                optimizer.zero_grad()
                loss = w.loss(model(batch).sum())
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()

    rooms = [f"{PACKAGE}/lab/step_look.py", f"{PACKAGE}/trace", f"{PACKAGE}/diagnose/train_step"]
    torchs = [each.__file__ for each in (contextlib, _python_dispatch, torch.utils.hooks)]
    watched()
    for interrupt in interrupted_everywhere(watched, every=every, folders=[*rooms, *torchs], most=10**6):
        assert left_by(model, optimizer) == [], interrupt
        assert not any("failed" in each for each in watches[0].failures), interrupt


def test_an_interrupt_where_the_end_of_a_block_begins_stops_nothing_of_it():
    """Nothing of `__exit__` runs then."""
    model = nn.Linear(2, 1)
    optimizer, watches = torch.optim.SGD(model.parameters(), lr=0.1), []

    def watched():
        with amplab.watch(model, optimizer) as w:
            watches.append(w)
            for _ in w.batches([1]):
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()

    interrupt = interrupted(watched, 1, folders=[f"{PACKAGE}/lab/watch.py"], functions=["_leave"])
    assert interrupt.escaped
    assert left_by(model, optimizer) == []
    (w,) = watches
    assert [record.step for record in w.history.records()] == [0]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_in_the_last_operator_of_a_block_leaves_nothing_on():
    """CPython handles it where `__exit__` begins, since an operator is no call."""
    model, big = nn.Linear(2, 1), torch.ones(1200, 1200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def watched():
        with amplab.watch(model, optimizer):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            _ = big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big @ big
        time.sleep(10)

    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        watched()
    assert left_by(model, optimizer) == []


def test_a_watch_goes_on_while_a_debugger_looks_at_it():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = amplab.watch(model, optimizer)
    inspect.getmembers(w)
    with w:
        for _ in range(2):
            inspect.getmembers(w)
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert len(w.history) == 2
    assert left_by(model, optimizer) == []


def test_a_watch_in_an_exit_stack_ends_with_it():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(amplab.watch(model, optimizer))
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert left_by(model, optimizer) == []


@pytest.mark.parametrize("face", ["amplab", "torch"])
def test_no_probe_loses_a_step_that_is_over(face, tmp_path):
    """These report a step later than the optimizer's hook runs; one whose hook is interrupted may be missing."""
    for at in itertools.count(1):
        loop = Loop(face, tmp_path / f"{at}.jsonl")
        interrupt = loop.run(at, folders=[f"{PACKAGE}/lab/scale_probe.py"])
        steps = loop.recorded(interrupt)
        if interrupt is None:
            assert len(steps) == 5
            break
        is_of_hook = any(name in interrupt.where for name in ("_see_call", "_Calls.see", "hear"))
        assert loop.finished - is_of_hook <= len(steps) <= loop.finished, interrupt


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_while_a_log_is_begun_leaves_one_file(tmp_path, monkeypatch):
    begin = RunLog.__init__

    def interrupted_begin(*given, **options):
        signal.raise_signal(signal.SIGINT)
        begin(*given, **options)
        signal.raise_signal(signal.SIGINT)

    loop = Loop("none", tmp_path)
    monkeypatch.setattr(RunLog, "__init__", interrupted_begin)
    with loop.watch:
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        loop.step()
    (file,) = tmp_path.iterdir()
    assert [record.step for record in load_run(file).history.records()] == [0, 1]


def test_a_tool_that_steps_the_scaler_in_a_watch_adds_no_record():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=8.0), torch.ones(4, 2)

    def train():
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with amplab.watch(model, optimizer, scaler=scaler) as w:
        train()
        for _ in range(2):
            amplab.doctor(
                model, x, loss=lambda y: y.square().mean(), train_step=train, optimizer=optimizer, scaler=scaler
            )
        train()
    assert len(w.history) == 2


def test_a_watch_whose_block_has_not_begun_has_no_hook():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unused = amplab.watch(model, optimizer, step=lambda x: model(x).sum())
    assert left_by(model, optimizer) == []
    for interrupt in interrupted_everywhere(unused.__enter__, folders=[f"{PACKAGE}/lab/{name}" for name in BEGINNING]):
        assert left_by(model, optimizer) == [], interrupt
    unused.__exit__(None, None, None)
    assert left_by(model, optimizer) == []


BEGINNING = "watch.py", "step_rerun.py", "step_look.py", "idle_optimizers.py"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_while_gradients_are_measured_leaves_grad_mode_on():
    loop = Loop("none", None)

    def measured(take=loop.watch._measure.take):
        with torch.no_grad():
            signal.raise_signal(signal.SIGINT)
            assert not torch.is_grad_enabled()
            take()

    loop.watch._measure.take = measured
    with loop.watch:
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_watch_whose_generator_another_thread_closes_leaves_no_mode(has_batches):
    """The garbage collector may close a generator in any thread."""
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(w):
        optimizer.zero_grad()
        w.loss(model(x).square().mean()).backward()
        optimizer.step()

    def train():
        with amplab.watch(model, optimizer) as w:
            for _ in w.batches([x] * 3) if has_batches else range(3):
                step(w)
                yield w

    steps = train()
    w = next(steps)
    looks = _get_current_dispatch_mode_stack()
    assert looks
    closer = threading.Thread(target=steps.close)
    closer.start()
    closer.join()
    assert {*left_by(model, optimizer)} <= {"dispatch modes", "function modes", "flags"}  # of its own thread
    rows = len(w.history)
    step(w)
    assert len(w.history) == rows
    assert all(mode.has_ended for mode in _get_current_dispatch_mode_stack())
    with amplab.watch(model, optimizer) as another:
        assert not {*map(id, looks)} & {*map(id, _get_current_dispatch_mode_stack())}
        step(another)
    assert left_by(model, optimizer) == []
    assert (len(another.history), another.failures) == (1, ())


@pytest.mark.parametrize("has_batches", [False, True])
def test_optimizers_that_step_in_a_backward_leave_no_mode_on(has_batches):
    """After a hook autograd restores the modes with which the backward began."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for each, optimizer in optimizers.items():
        each.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    with amplab.watch(model, list(optimizers.values())) as w:
        for place, _ in enumerate(w.batches(range(4)) if has_batches else range(4)):
            w.loss(model(x).square().mean()).backward()
            if place:
                assert all(mode.has_ended for mode in _get_current_dispatch_mode_stack())
    assert len(w.history) == 4
    assert w.failures == ()
    assert _get_current_dispatch_mode_stack() == []


@pytest.fixture
def limited():
    def limit(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, limit)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGUSR1")
@pytest.mark.parametrize("name", ["DeferredSignals", "shorten", "is_interrupt", "end_blocks_of"])
def test_a_second_signal_where_a_watch_ends_stops_nothing_of_its_end(name, limited, tmp_path, monkeypatch):
    module = sys.modules["amplab.lab.watch"]
    function, to_come = getattr(module, name), []

    def interrupted_call(*given, **options):
        if to_come:
            to_come.pop()
            signal.raise_signal(signal.SIGUSR1)
        return function(*given, **options)

    monkeypatch.setattr(module, name, interrupted_call)
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with amplab.watch(model, optimizer, log=tmp_path / "run.jsonl") as w:
            for _ in w.batches([x] * 3):
                optimizer.zero_grad()
                w.loss(model(x).square().mean()).backward()
                optimizer.step()
                to_come.append(True)
                signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(TimeoutError):
        train()
    assert not to_come
    assert left_by(model, optimizer) == []
    assert len(load_run(tmp_path / "run.jsonl").history) == 1


def test_a_variable_of_an_interrupted_loop_is_freed_when_it_is_deleted():
    model = nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader([1])
    is_freed = weakref.ref(loader)
    with pytest.raises(KeyboardInterrupt), amplab.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        raise KeyboardInterrupt
    del loader
    assert is_freed() is None
