"""A debugger that raises where a `with` block of amplab ends: function modes see the next op, and amplab casts it.

Signals cannot come there, but what a trace function raises can. Then `__exit__` is not called.
"""

import dis
import sys
import types

import pytest
import torch
from interrupts import interrupted, interrupted_everywhere
from torch import nn
from torch.nn import functional as F

import amplab
from amplab import amp
from amplab.diagnose.reruns import headroom, probe
from amplab.optimizers import FusedAdam
from amplab.policies.casting.function_modes import without_function_modes

# Python swallows what a finalizer raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = torch.ones(4, 8)
TARGET = torch.tensor([0, 1, 2, 0])
LIBRARY = types.SimpleNamespace(double=lambda x: x * 2)


@pytest.fixture(autouse=True)
def _ends_clean():
    yield
    amp.reset()
    torch.set_grad_enabled(True)


def session(**options):
    """A model and its optimizer under a session whose gradients are unscaled."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    backward(model, optimizer)
    return model, optimizer


def backward(model, optimizer):
    torch.set_grad_enabled(True)  # torch's own blocks leave it off
    with amp.scale_loss(F.cross_entropy(model(X).float(), TARGET), optimizer) as scaled_loss:
        scaled_loss.backward()


def clipping(**options):
    _, optimizer = session(**options)
    return lambda: amp.clip_grad_norm_(optimizer, 1.0)


def combined_gradients():
    _, optimizer = session(opt_level="O1", combine_grad=True)
    return lambda: amp.combined_grads(optimizer)


def masters():
    _, optimizer = session(opt_level="O2")
    return lambda: list(amp.master_params(optimizer))


def step(**options):
    model, optimizer = session(**options)

    def step():
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def registered_function():
    amp.register_half_function(LIBRARY, "double")
    session(opt_level="O1")
    return lambda: LIBRARY.double(X)


def scaler_step():
    model = nn.Linear(8, 3)
    optimizer, scaler = FusedAdam(model.parameters()), amp.GradScaler("cpu", num_losses=2)

    def step():
        torch.set_grad_enabled(True)
        with amplab.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(X).float(), TARGET)
        with scaler.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def tool(tool):
    model, _ = session(opt_level="O1")

    def call():
        torch.set_grad_enabled(True)
        tool(model, lambda: F.cross_entropy(model(X).float(), TARGET))

    return call


CALLS = {
    "clip_grad_norm_": lambda: clipping(opt_level="O1"),
    "clip_grad_norm_ combined": lambda: clipping(opt_level="O1", combine_grad=True),
    "clip_grad_norm_ O2": lambda: clipping(opt_level="O2"),
    "combined_grads": combined_gradients,
    "master_params": masters,
    "step O1": lambda: step(opt_level="O1"),
    "step O2": lambda: step(opt_level="O2"),
    "step O1 combined": lambda: step(opt_level="O1", combine_grad=True),
    "registered function": registered_function,
    "GradScaler, FusedAdam": scaler_step,
    "headroom": lambda: tool(headroom),
    "probe": lambda: tool(probe),
}


@pytest.mark.parametrize("name", CALLS)
def test_function_modes_see_the_next_op(name):
    call, number = CALLS[name](), 0
    call()
    is_cast = (X @ X.T).dtype is torch.float16
    every = 4 if name in ("headroom", "probe") else 1
    for interrupt in interrupted_everywhere(call, every=every, ends=True):
        number += 1
        assert torch._C._is_torch_function_enabled(), interrupt
        assert ((X @ X.T).dtype is torch.float16) is is_cast, interrupt
    assert number > 0 or name == "master_params"


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("clip", "combined", "master", "reg"))])
def test_after_an_interrupt_at_any_point_too(name):
    call = CALLS[name]()
    call()
    for interrupt in interrupted_everywhere(call):
        assert torch._C._is_torch_function_enabled(), interrupt


def block():
    with without_function_modes():
        X + 1


def returning_block():
    for _ in range(2):
        with without_function_modes():
            try:
                X + 1
                return
            except ValueError:
                continue


@pytest.mark.parametrize("function", [block, returning_block])
def test_the_block_ends_wherever_a_trace_function_raises(function):
    """Also while the error is kept, with its traceback, as a notebook keeps it."""
    instructions = [each.offset for each in dis.get_instructions(function)]
    for at in range(1, len(instructions) + 1):
        seen = []

        def raise_there(frame, event, _arg, seen=seen, at=at):
            if frame.f_code is function.__code__:
                frame.f_trace_opcodes = True
                seen.append(frame.f_lasti)
                if len(seen) == at:
                    raise KeyboardInterrupt
            return raise_there

        before, error = sys.gettrace(), None
        sys.settrace(raise_there)
        try:
            function()
        except KeyboardInterrupt as kept:
            error = kept
        finally:
            sys.settrace(before)
        assert torch._C._is_torch_function_enabled(), (at, error)


def test_what_the_user_has_disabled_stays_so():
    with torch._C.DisableTorchFunction():
        for at in (1, 2):
            interrupted(block, at, folders=[__file__], ends=True)
            assert torch._C._is_torch_function_all_disabled()
        block()
        assert torch._C._is_torch_function_all_disabled()
    assert torch._C._is_torch_function_enabled()
