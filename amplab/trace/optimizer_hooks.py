"""`observe_steps`: call functions before and after each step of any optimizer in a thread.

torch runs the hooks on all optimizers from one dict for the process, and a thread that steps meanwhile gets an error if
another one changes the dict. So amplab has one hook there before a step and one after it, which call the functions of
their thread. Where the process has other threads they stay once they are registered, and do nothing without a function.

`once_a_step`: a hook that is called once a step, also if each of several classes has a part of it.

`seeing_gradients`: a hook before a step that sees the gradients of this step, also if its closure computes them.

`keeping_failures_of_hooks`: let a program's own hooks after the step of one optimizer raise without an effect on it.

Reference: torch.optim.optimizer.register_optimizer_step_pre_hook.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies.signals import DeferredSignals, is_interrupt
from amplab.trace.as_found import Undo, remove_hook

__all__ = [
    "after_step",
    "before_step",
    "is_amplabs",
    "keeping_failures_of_hooks",
    "observe_steps",
    "once_a_step",
    "seeing_gradients",
]

Given = tuple[tuple[Any, ...], dict[str, Any]]  # the positional and the keyword arguments of a step
Observer = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Given | None]


class _Observers(threading.local):
    """Of one thread, in the order in which they came."""

    def __init__(self) -> None:
        self.before: list[Observer] = []
        self.after: list[Observer] = []


_OBSERVERS = _Observers()
_lock = threading.RLock()
renew_lock_in_forks(sys.modules[__name__], "_lock")


def observe_steps(undo: Undo, *, before: Observer | None = None, after: Observer | None = None) -> None:
    """Call `before` and `after` around each step of any optimizer in this thread, until `undo` ends. Sync: none.

    What `before` returns is what a step pre-hook of torch returns: None, or other arguments of the step.
    """
    undo.add(_remove_hooks_of_one_thread)
    for observer, observers in ((before, _OBSERVERS.before), (after, _OBSERVERS.after)):
        if observer is not None:
            undo.add(partial(_forget, observer, observers))
            observers.append(observer)
    with DeferredSignals(), _lock:
        if before_step not in list(_global_optimizer_pre_hooks.values()):
            register_optimizer_step_pre_hook(before_step)
        if after_step not in list(_global_optimizer_post_hooks.values()):
            register_optimizer_step_post_hook(after_step)


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Call the observers of this thread, and return the arguments of the step; torch calls it before each step."""
    for observer in _called(_OBSERVERS.before, optimizer):
        args, kwargs = observer(optimizer, args, kwargs) or (args, kwargs)
    return args, kwargs


def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the observers of this thread; torch calls it after each step."""
    for observer in _called(_OBSERVERS.after, optimizer):
        observer(optimizer, args, kwargs)


def _called(observers: list[Observer], optimizer: Optimizer) -> tuple[Observer, ...]:
    is_asked = observers and not _has_single_step(optimizer)
    return () if is_asked and _is_part_of_step(optimizer) else tuple(observers)


def once_a_step(hook: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """Return a hook on the steps of an optimizer that is not called for ``super().step()`` within such a step.

    torch calls the hooks around the step of each class of which it has seen an optimizer. An optimizer that steps
    another one is no such case: each of the two has its step.

    Args:
        hook: is registered before or after the steps of the optimizer.
        optimizer: one whose class has a single step gets the hook as it is.

    Sync: none.
    """
    if _has_single_step(optimizer):
        return hook

    @wraps(hook)
    def observe(*given: Any) -> Any:
        return None if _is_part_of_step(optimizer) else hook(*given)

    return observe


def _has_single_step(optimizer: Optimizer) -> bool:
    """Whether only its class has a step, beside that of `Optimizer`, which raises."""
    return sum("step" in vars(kind) for kind in type(optimizer).__mro__) <= 2


_CODE_OF_A_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""Of the function that torch puts around `step`, which calls the hooks."""


def _is_part_of_step(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks run now is called by another step of the same optimizer.

    The stack tells, and not a note, which a step that raises would leave behind.
    """
    frame: FrameType | None = sys._getframe(1)
    is_found = False  # the step whose hooks run
    while frame is not None:
        if frame.f_code is _CODE_OF_A_STEP:
            if is_found and frame.f_locals.get("self") is optimizer:
                return True
            is_found = True
        frame = frame.f_back
    return False


def seeing_gradients(see: Callable[..., object]) -> Observer:
    """Return a step pre-hook that calls `see` when the optimizer is about to use its gradients.

    torch calls the hook before the closure of a step, whose backward computes the gradients. So `see` is then called
    after the first run of the closure. If that raises, it is not called.

    Args:
        see: gets the optimizer, and the positional and keyword arguments of its step.

    Sync: none.
    """

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        seen = partial(see, optimizer, args, kwargs)
        if len(args) > 1 and callable(args[1]):
            return (args[0], _with_first_run(args[1], seen), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _with_first_run(kwargs["closure"], seen)}
        seen()
        return None

    return before


def _with_first_run(closure: Callable[..., Any], seen: Callable[[], object]) -> Callable[..., Any]:
    """Return a closure that calls `seen` after its first run, and is otherwise as the given one."""
    waits, grad_mode = True, torch.is_grad_enabled()  # of the loop: a step may switch it off around its closure

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        loss = closure(*args, **kwargs)
        if waits:
            waits = False
            with torch.set_grad_enabled(grad_mode):
                seen()
        return loss

    return run


def _forget(observer: Observer, observers: list[Observer]) -> None:
    if observer in observers:
        observers.remove(observer)


def _remove_hooks_of_one_thread() -> None:
    """Remove the hooks if no other thread can be in a step, and nobody observes."""
    with _lock:
        if threading.active_count() == 1 and not _OBSERVERS.before and not _OBSERVERS.after:
            remove_hook(before_step, _global_optimizer_pre_hooks)
            remove_hook(after_step, _global_optimizer_post_hooks)


@contextmanager
def keeping_failures_of_hooks(optimizer: Optimizer, failures: list[str]) -> Iterator[None]:
    """Add the tracebacks of what hooks after a step raise to `failures`; the later hooks, such as a session's, run.

    Hooks of amplab, and those on all optimizers, raise as always.
    """
    hooks = optimizer._optimizer_step_post_hooks
    own = {key: hook for key, hook in hooks.items() if not is_amplabs(hook)}
    hooks.update({key: partial(_call, hook, failures) for key, hook in own.items()})
    try:
        yield
    finally:
        hooks.update({key: hook for key, hook in own.items() if key in hooks})  # a hook may remove itself


def _call(hook: Observer, failures: list[str], *given: Any) -> None:
    try:
        hook(*given)
    except Exception as failure:
        if is_interrupt(failure):
            raise
        failures.append("".join(traceback.format_exception(failure)))


def is_amplabs(hook: Any) -> bool:
    """Whether a hook is one of a watch or a session."""
    owner = getattr(hook, "__self__", hook)
    return str(getattr(hook, "__module__", None) or type(owner).__module__).partition(".")[0] == "amplab"
