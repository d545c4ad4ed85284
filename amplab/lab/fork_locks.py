"""Locks that no other thread has in a forked process: they are held over each fork.

A fork copies the thread that calls it alone. A lock that another thread has at that moment would stay taken for ever in
the new process.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from enum import IntEnum
from functools import partial

from amplab.policies.signals import DeferredSignals

__all__ = ["LockOrder", "hold_over_forks"]


class LockOrder(IntEnum):
    """Who has a lock takes only later ones, also the thread that forks: otherwise two threads wait for each other."""

    WORKER = 0
    HISTORY = 1


_locks: dict[int, tuple[LockOrder, weakref.ref[threading.RLock]]] = {}
_held: list[threading.RLock] = []  # by the thread that forks


def hold_over_forks(lock: threading.RLock, order: LockOrder) -> None:
    """Hold an RLock over each fork from now on."""
    key = id(lock)
    _locks[key] = order, weakref.ref(lock, partial(_locks.pop, key))  # in Python code an interrupt would get lost


def _hold_all() -> None:
    present = list(_locks.values())  # at once: other threads may add some
    locks = [(order, id(lock), lock) for order, reference in present if (lock := reference()) is not None]
    with DeferredSignals():  # a lock that is not listed would stay taken
        for *_, lock in sorted(locks, key=lambda each: each[:2]):
            lock.acquire()
            _held.append(lock)


def _release_all() -> None:
    while _held:
        with suppress(RuntimeError):
            _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
