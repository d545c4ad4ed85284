"""An interrupt at any point of a tool, amplab's and torch's: nothing stays on, and the next call says the same."""

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from operator import setitem
from pathlib import Path

import pytest
import torch
from interrupts import PACKAGE, interrupted, interrupted_everywhere
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import amplab
from amplab.diagnose.reruns import headroom
from amplab.policies import CastingEngine, casts_enabled, cpu_half_mode, thread_engines
from amplab.policies.casting.plan import torch_nesting
from amplab.trace import optimizer_hooks
from amplab.trace.as_found import Undo, leaves_as_found
from amplab.trace.dispatch_mode import DispatchMode
from amplab.trace.engines import compiled_functions_eagerly
from amplab.trace.kept_tensors import KeptTensors
from amplab.trace.modules import ModuleStack
from amplab.trace.weight_casts import WeightCasts

X, TARGET = torch.ones(4, 8), torch.tensor([0, 1, 2, 0])

BLOCKS = (contextlib, _python_dispatch, modules, torch.autograd.grad_mode, torch.autograd.graph, torch.overrides)
BLOCKS += (torch.utils.hooks, torch.utils._contextlib, torch.amp.autocast_mode, torch._tensor)
"""Modules with the code of `with` statements and hooks, in which an interrupt leaves on what is not amplab's."""
EVERYWHERE = (PACKAGE, *(each.__file__ for each in BLOCKS))


def hooks_of(owner):
    """The hooks of a module, a parameter or an optimizer."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    names += ("_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    names += ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_post_accumulate_grad_hooks")
    return [hook for name in names for hook in (getattr(owner, name, None) or {}).values()]


def state_of_torch():
    """What is the same before and after a tool, by name."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
    flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in")}
    return flags | {
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "function modes": _get_current_function_mode_stack(),
        "function modes are called": torch._C._get_torch_function_state(),
        "hooks of all modules": len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks),
        "observers of steps": [*optimizer_hooks._OBSERVERS.before, *optimizer_hooks._OBSERVERS.after],
        "saved tensors": pair,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "ipu")],
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": torch_nesting(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random state": torch.get_rng_state().tolist(),
        "garbage collection": gc.isenabled(),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "engines": thread_engines(),
        "casts": casts_enabled(),
        "half": cpu_half_mode(),
        "dispatch keys": dispatch_keys(),
        "filters of warnings": list(warnings.filters),
        "dtype of a product": (X @ X.T).dtype,
    }


def dispatch_keys():
    """The dispatch keys that this thread adds to those of every op's tensors, and takes from them."""
    return str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())


class Subject:
    """A model, its optimizer and scaler, and the tools that look at them."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = amplab.GradScaler("cpu", init_scale=8.0)
        self.before, self.torch = self.state(), state_of_torch()

    def loss(self, output):
        return F.cross_entropy(output.float(), TARGET)

    def xray(self):
        return amplab.xray(self.model, X, loss=self.loss, opt_level="O1")

    def xray_with_statistics(self):
        return amplab.xray(self.model, X, loss=self.loss, opt_level="O2", stats=True)

    def xray_in_a_region(self):  # which `check` enters: its own end is torch's
        return amplab.xray(self.model, X, loss=self.loss)

    def gradient_range(self):
        return amplab.gradient_range(self.model, X, loss=self.loss)

    def first_nonfinite(self):
        return amplab.first_nonfinite(self.model, X * 1e20, loss=self.loss, opt_level="O1")

    def headroom(self):
        return headroom(self.model, lambda: self.loss(self.model(X)))

    def doctor(self):
        return amplab.doctor(self.model, X, loss=self.loss, opt_level="O1")

    def train(self):
        self.optimizer.zero_grad()
        with amplab.autocast("cpu", torch.float16):
            loss = self.loss(self.model(X))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def doctor_of_a_loop(self):
        return amplab.doctor(self.model, train_step=self.train, optimizer=self.optimizer, scaler=self.scaler)

    def twin(self):
        return amplab.twin(self.model, X, loss=self.loss, steps=1)

    def ladder(self):
        rungs = {"O2": "O2", "fp32": "fp32"}
        report = amplab.ladder(self.model, X, loss=self.loss, steps=8, rungs=rungs, tell=lambda _: None)
        return report.recommended.name  # the report has times

    def followed(self):
        with amplab.diagnose.followed_step(self.model[0], X) as step:
            step.loss(self.model[0](X).sum())
        return step

    def watched(self):
        with amplab.watch(self.model, self.optimizer, loss=self.loss) as watch:
            for batch in watch.batches([X]):
                watch.loss(self.loss(self.model(batch))).backward()
                self.optimizer.step()

    def state(self):
        owners = [*self.model.modules(), *self.model.parameters(), self.optimizer]
        return {
            **{name: value.tolist() for name, value in self.model.state_dict().items()},
            "hooks": [hooks_of(each) for each in owners],
            "gradients": [param.grad for param in self.model.parameters()],
            "training": [each.training for each in self.model.modules()],
            "optimizer": len(self.optimizer.state),
            "scale": self.scaler.get_scale(),
        }

    def changed(self):
        """Name what is not as before."""
        if dispatch_keys() != self.torch["dispatch keys"]:
            return ["dispatch keys"]  # no op runs
        now = self.state(), state_of_torch()
        return [name for before, after in zip((self.before, self.torch), now, strict=True) for name in before
                if before[name] != after[name]]  # fmt: skip


TOOLS = {
    "xray": 197,
    "xray_with_statistics": 197,
    "xray_in_a_region": 197,
    "gradient_range": 13,
    "first_nonfinite": 797,
    "headroom": 13,
    "doctor": 797,
    "doctor_of_a_loop": 797,
    "twin": 797,
    "ladder": 1597,
}
"""The tools, each with the distance of the points that CI interrupts."""

SETS_UP_OR_ENDS = {
    "__enter__",
    "__exit__",
    "__init__",
    "_begin",
    "_end",
    "_end_following",
    "_leave",
    "add",
    "callback",
    "close",
    "enter",
    "following",
    "leave",
    "recording",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_post_accumulate_grad_hook",
    "remove",
    "restore",
    "run",
    "untouched",
}
"""Functions that set something up or end it: that is where an interrupt can leave something on."""


def check(tool, every, functions):
    """Interrupt a tool at every n-th point; nothing is on, and the next call says what the first one said."""
    region = partial(torch.autocast, "cpu", torch.bfloat16) if tool == "xray_in_a_region" else nullcontext

    def call(subject):
        with region():
            return str(getattr(subject, tool)())

    said = call(Subject())  # imports, and builds what is kept
    for at in range(1 + every // 2, 2_000_000, every):
        subject = Subject()
        with region():
            interrupt = interrupted(getattr(subject, tool), at, folders=EVERYWHERE, functions=functions)
        assert subject.changed() == [], interrupt
        if interrupt is None:
            return
        assert call(subject) == said, interrupt


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "every"), TOOLS.items())
def test_an_interrupted_tool_leaves_nothing_on(tool, every):
    check(tool, every, SETS_UP_OR_ENDS)


def test_an_interrupt_in_which_torch_loses_a_mode_stays_a_keyboard_interrupt():
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5), nn.LogSoftmax(-1))

    def look():
        amplab.xray(model, (X, TARGET), loss=nn.NLLLoss())

    handlers = ["_pop_mode", "_push_mode", "_pop_mode_temporarily"]
    for interrupt in interrupted_everywhere(look, folders=[torch.overrides.__file__], functions=handlers):
        assert interrupt.escaped, interrupt


def test_hooks_are_removed_whatever_the_interrupt_of_their_registration_has_lost():
    """Before, a hook stayed whose registration was interrupted before the line that stored its handle."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(lambda *_: None)
    before = [len(hooks_of(each)) for each in model.modules()]

    def followed():
        with ModuleStack(model).following():
            model(torch.ones(1, 2))

    registers = ["following", "register_forward_hook", "register_forward_pre_hook"]
    for interrupt in interrupted_everywhere(followed, folders=[PACKAGE, modules.__file__], functions=registers):
        assert [len(hooks_of(each)) for each in model.modules()] == before, interrupt


def test_a_change_is_undone_whenever_the_interrupt_comes():
    on = []

    @leaves_as_found
    def changing():
        with Undo() as undo:
            for number in range(2):
                undo.add(on.clear)
                on.append(number)

    for interrupt in interrupted_everywhere(
        changing, folders=[PACKAGE, __file__], functions=["changing", *SETS_UP_OR_ENDS]
    ):
        assert on == [], interrupt


def test_no_interrupt_is_lost_while_an_engine_is_freed():
    """Before, one of ten interrupts of `xray` was: Python discards one in a callback that is written in Python."""

    def used():
        with CastingEngine().active():
            X @ X.T
        gc.collect()  # an engine and its plans refer to each other

    for interrupt in interrupted_everywhere(used, folders=[weakref.__file__], functions=["remove"]):
        assert interrupt.escaped, interrupt


def test_no_interrupt_is_lost_while_a_storage_is_counted(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: printed.append(report.exc_type))
    model = nn.Linear(8, 8)

    def followed():
        with KeptTensors(model).following(lambda: "", WeightCasts()):
            model(X).relu().sum().backward()

    for interrupt in interrupted_everywhere(followed, folders=[f"{PACKAGE}/trace/kept_tensors.py"]):
        assert interrupt.escaped, interrupt
        assert printed == [], interrupt


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_a_change_is_undone_however_many_signals_come_meanwhile():
    """Before, 100 of them left the rest of the model changed."""
    on, handler = [True], signal.getsignal(signal.SIGINT)

    def turn_off():
        for _ in range(200):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.0)
        on.clear()

    @leaves_as_found
    def changing():
        with Undo() as undo:
            undo.add(turn_off)
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        changing()
    assert on == []
    assert signal.getsignal(signal.SIGINT) is handler


class Passing(DispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def inference_mode_under_a_dispatch_mode():
    with Passing(), torch.inference_mode(False):
        X @ X.T


def block_that_replaces_the_filters_of_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")


@pytest.mark.parametrize(
    ("block", "file"),
    [
        (inference_mode_under_a_dispatch_mode, torch.autograd.grad_mode.__file__),
        (block_that_replaces_the_filters_of_warnings, warnings.__file__),
    ],
)
def test_a_block_ends_whose_own_code_is_interrupted(block, file):
    """Before, torch.inference_mode turned keys of dispatch modes on when the traceback was freed: each op failed."""
    before = state_of_torch()
    for interrupt in interrupted_everywhere(
        leaves_as_found(block), folders=[file], functions=["__enter__", "__exit__"]
    ):
        assert state_of_torch() == before, interrupt


@pytest.mark.parametrize("key", [torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot])
def test_a_key_of_dispatch_modes_that_an_error_has_left_is_removed(key):
    before = state_of_torch()

    @leaves_as_found
    def leaves_a_key():
        with Undo() as undo:
            undo.add(lambda: X @ X.T)
            torch._C._dispatch_tls_set_dispatch_key_included(key, True)
            torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutocastCPU, False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leaves_a_key()
    assert state_of_torch() == before


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="sends SIGALRM")
@pytest.mark.parametrize("again", ["0", "0.0002", "0.002"])
@pytest.mark.parametrize("tool", ["first_nonfinite", "xray", "doctor"])
def test_a_tool_leaves_nothing_on_after_signals_at_random_times(tool, again):
    script = Path(__file__).with_name("signalled_tools.py")
    command = [sys.executable, str(script), tool, "60", "1", again]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    interrupts, discarded, *changed = done.stdout.splitlines()
    assert int(interrupts) > 50
    assert int(discarded) == 0
    assert changed == []


def test_what_an_inner_block_has_left_is_undone_before_the_outer_block():
    """An interrupt where the end of the inner block begins: its functions restore what it found, so they come first."""

    class Skipped(Undo):
        def __exit__(self, *_error):
            raise KeyboardInterrupt

    values = ["as it was"]

    @leaves_as_found
    def tool():
        with Undo() as outer:
            outer.add(partial(setitem, values, 0, "as it was"))
            values[0] = "of the outer block"
            with Skipped() as inner:
                inner.add(partial(setitem, values, 0, "of the outer block"))
                values[0] = "of the inner block"

    with pytest.raises(KeyboardInterrupt):
        tool()
    assert values == ["as it was"]


def test_functions_are_compiled_again_after_a_tool_that_was_interrupted():
    from torch._dynamo import decorators, eval_frame

    def eagerly():
        with compiled_functions_eagerly():
            assert eval_frame._stance.stance == "force_eager"

    files = inspect.getfile(decorators), contextlib.__file__, eval_frame.__file__, f"{PACKAGE}/trace"
    for interrupt in interrupted_everywhere(leaves_as_found(eagerly), folders=files):
        assert eval_frame._stance.stance == "default", interrupt


class TurnsGradOff(nn.Module):
    """A model whose forward turns grad mode off and fails before it turns that on again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        torch.set_grad_enabled(False)
        raise ValueError("a batch that this model does not take")


def test_a_model_that_turns_grad_mode_off_and_fails():
    model = TurnsGradOff()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({}, {"train_step": lambda: model(X), "optimizer": optimizer}):
        with contextlib.suppress(ValueError):
            amplab.doctor(model, X, loss=lambda y: y.sum(), **options)
        assert torch.is_grad_enabled()


def test_a_step_that_resets_amp_and_raises_leaves_no_casting_mode():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amplab.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step(_batch):
        amplab.amp.reset()
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        amplab.xray(model, torch.ones(2, 8), step=step)
    assert _get_current_function_mode_stack() == []
