"""Turns of the threads that draw random numbers: torch, Python and NumPy have one generator each for all threads.

    drawing_alone    of a function that seeds the generators, or restores them, and computes in between
    leaving_turn     of a function that waits for another thread, which may need the turn

Code of one's own that runs in a turn, as what makes a model or measures a score, may train another experiment and wait
for it. The turn is left meanwhile, and taken again before the code goes on: what waits draws nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies.signals import DeferredSignals

__all__ = ["drawing_alone", "leaving_turn"]

P = ParamSpec("P")
R = TypeVar("R")

_turn = threading.RLock()
renew_lock_in_forks(sys.modules[__name__], "_turn")


def drawing_alone(function: Callable[P, R]) -> Callable[P, R]:
    """Let calls of several threads take turns, so that each run has the random numbers that its config and seed say."""

    @functools.wraps(function)
    def in_turn(*args: P.args, **named: P.kwargs) -> R:
        if _is_mine(_turn):
            return function(*args, **named)
        with _turn:
            return function(*args, **named)

    return in_turn


def leaving_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Let other threads take the turn during a call, if it is that of the present thread."""

    @functools.wraps(function)
    def waiting(*args: P.args, **named: P.kwargs) -> R:
        turn = _turn
        if not _is_mine(turn):
            return function(*args, **named)
        signals = DeferredSignals()  # the turn is taken again before Ctrl-C ends the code that it belongs to
        try:
            try:
                turn.release()
                signals.admit()
                return function(*args, **named)
            finally:
                signals.waits = True
        finally:
            signals.waits = True  # also if Ctrl-C came in the line above
            turn.acquire()
            signals.end()

    return waiting


def _is_mine(turn: threading.RLock) -> bool:
    """Return whether the present thread has a lock: as the lock knows it, a flag may be wrong after Ctrl-C."""
    try:
        threading.Condition(turn).notify(0)  # notifies nobody, and raises unless this thread has the lock
    except RuntimeError:
        return False
    return True
