"""`observe_steps`: call functions before and after each step of any optimizer in a thread.

torch runs the hooks on all optimizers from one dict for the process, and a thread that steps meanwhile gets an error if
another one changes the dict. So amplab has one hook there before a step and one after it, which call the functions of
their thread. Where the process has other threads they stay once they are registered, and do nothing without a function.

Reference: torch.optim.optimizer.register_optimizer_step_pre_hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amplab.policies.signals import DeferredSignals
from amplab.trace.as_found import Undo, remove_hook

__all__ = ["after_step", "before_step", "observe_steps"]

Observer = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], object]


class _Observers(threading.local):
    """Of one thread, in the order in which they came."""

    def __init__(self) -> None:
        self.before: list[Observer] = []
        self.after: list[Observer] = []


_OBSERVERS = _Observers()
_lock = threading.RLock()


def observe_steps(undo: Undo, *, before: Observer | None = None, after: Observer | None = None) -> None:
    """Call `before` and `after` around each step of any optimizer in this thread, until `undo` ends. Sync: none."""
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


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the observers of this thread; torch calls it before each step."""
    for observer in tuple(_OBSERVERS.before):
        observer(optimizer, args, kwargs)


def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the observers of this thread; torch calls it after each step."""
    for observer in tuple(_OBSERVERS.after):
        observer(optimizer, args, kwargs)


def _forget(observer: Observer, observers: list[Observer]) -> None:
    if observer in observers:
        observers.remove(observer)


def _remove_hooks_of_one_thread() -> None:
    """Remove the hooks if no other thread can be in a step, and nobody observes."""
    with _lock:
        if threading.active_count() == 1 and not _OBSERVERS.before and not _OBSERVERS.after:
            remove_hook(before_step, _global_optimizer_pre_hooks)
            remove_hook(after_step, _global_optimizer_post_hooks)
