"""Scopes end with their block or call, however it ends: by leaving, by an exception, by an interrupt in any line."""

import contextlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import amplab
from amplab.policies import (
    CastingEngine,
    PrecisionPolicy,
    apply_policy,
    casting_state,
    casts_enabled,
    disable_casts,
    module_rule_at_work,
    thread_engines,
)
from amplab.policies.casting.thread_scopes import casts_outside_step, is_running, suspend_casts

X = torch.ones(2, 2)
BFLOAT16 = PrecisionPolicy(compute_dtype=torch.bfloat16)
PACKAGE = str(Path(amplab.__file__).parent)


def dtype():
    return (X @ X).dtype


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert thread_engines() == ()
    assert casts_enabled()
    assert _get_current_function_mode_stack() == []


def own_frame():
    return sys._getframe()


def test_a_caller_runs_and_a_call_that_returned_does_not():
    assert is_running(sys._getframe())
    assert all(map(is_running, [sys._getframe(), sys._getframe(1)]))
    assert not is_running(own_frame())


def test_a_call_that_raised_does_not_run_while_its_traceback_is_kept():
    def fails():
        frames.append(sys._getframe())
        raise ValueError("no")

    frames = []
    with pytest.raises(ValueError, match="no") as kept:
        fails()
    assert kept.traceback
    assert not is_running(frames[0])


class Interrupted(nn.Module):
    """A forward that an interrupt ends: torch then runs no hook."""

    def forward(self, x):
        self.inside = (x @ x).dtype
        raise KeyboardInterrupt


@pytest.mark.parametrize("rules", [{}, {"": "float32"}], ids=["policy", "module rule"])
def test_an_interrupted_forward_ends_its_policy_before_the_next_op(rules):
    model = Interrupted()
    apply_policy(PrecisionPolicy(module_rules=rules), model)
    with pytest.raises(KeyboardInterrupt) as kept:
        model(X)
    assert kept.traceback
    assert model.inside is (torch.float32 if rules else torch.float16)
    assert dtype() is torch.float32
    assert torch.softmax(X.half(), 0).dtype is torch.float16
    assert module_rule_at_work() == ""


def test_an_interrupted_forward_inside_a_region_leaves_the_region_on():
    model = Interrupted()
    apply_policy(BFLOAT16, model)
    with CastingEngine().active():
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert dtype() is torch.float16


def test_a_forward_that_raises_in_another_forward_of_the_same_module_ends_alone():
    class Recursive(nn.Module):
        def forward(self, x, depth=0):
            if depth == 2:
                raise ZeroDivisionError
            if depth == 1:
                with contextlib.suppress(ZeroDivisionError):
                    self(x, 2)
                return x @ x
            inner = self(x, 1)
            return inner, x @ x

    model = Recursive()
    apply_policy(BFLOAT16, model)
    assert [out.dtype for out in model(X)] == [torch.bfloat16, torch.bfloat16]
    assert dtype() is torch.float32


def test_scopes_that_an_exit_stack_enters_last_until_it_closes():
    def enter(stack):
        stack.enter_context(CastingEngine().active())
        stack.enter_context(disable_casts())

    with contextlib.ExitStack() as stack:
        enter(stack)
        assert thread_engines()
        assert not casts_enabled()
        assert dtype() is torch.float32
        stack.enter_context(casting_state().active())
        assert not casts_enabled()


def test_a_hook_on_a_step_that_casts_nothing_can_cast():
    def step(*, asks):
        suspend_casts(sys._getframe())
        with casts_outside_step():
            inside = dtype(), casts_enabled()
            with disable_casts():
                assert not casts_enabled()
        return inside if asks == "inside" else dtype()

    with CastingEngine().active():
        assert step(asks="inside") == (torch.float16, True)
        assert step(asks="after") is torch.float32
        with disable_casts():
            assert step(asks="inside") == (torch.float32, False)
        assert dtype() is torch.float16


def test_a_scope_in_a_generator_lasts_while_the_generator_is_suspended():
    @contextlib.contextmanager
    def region():
        with CastingEngine().active(), disable_casts():
            yield

    with region():
        assert thread_engines()
        assert dtype() is torch.float32
        assert not casts_enabled()


def test_a_generator_that_another_thread_closes_leaves_this_thread_at_its_next_call():
    def region():
        with CastingEngine().active():
            yield

    suspended = region()
    next(suspended)
    assert dtype() is torch.float16
    thread = threading.Thread(target=suspended.close)
    thread.start()
    thread.join()
    assert thread_engines() == ()
