"""What a forked process begins anew: locks that another thread may have at the fork, and what that thread was doing.

A fork copies the thread that calls it alone. A lock that another thread has at that moment would stay taken for ever in
the new process. These locks are not held over the fork, as those of ``amplab.lab.fork_locks`` are, because they may be
taken for minutes, or because what they guard is right at every moment.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

__all__ = ["renew_in_forks", "renew_lock_in_forks"]

T = TypeVar("T")

_numbers = itertools.count()
_renewals: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}


def renew_in_forks(owner: T, renew: Callable[[T], object]) -> None:
    """Call `renew(owner)` in each process that is forked while `owner`, an object, a class or a module, is alive."""
    number = next(_numbers)
    _renewals[number] = weakref.ref(owner, partial(_renewals.pop, number)), renew


def renew_lock_in_forks(owner: object, name: str) -> None:
    """Let the attribute `name` of `owner` be a new RLock in each forked process.

    A ``with`` block of the thread that forks ends as it would have: it releases the lock that it has taken.
    """
    renew_in_forks(owner, partial(_renew_lock, name=name))


def _renew_lock(owner: object, *, name: str) -> None:
    setattr(owner, name, threading.RLock())


def _renew_all() -> None:
    for reference, renew in list(_renewals.values()):
        if (owner := reference()) is not None:
            renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
