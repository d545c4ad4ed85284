"""What the code of a step may wait for: a step that runs again could wait for it forever."""

from __future__ import annotations

import multiprocessing.queues
import os
import queue
import socket
import stat
import subprocess
import threading
from collections.abc import Iterable
from io import IOBase
from multiprocessing.connection import Connection
from multiprocessing.synchronize import SemLock
from typing import Any

from amplab.lab.own_code import Followed

__all__ = ["awaited_by"]

_Lock = type(threading.Lock())
_RLock = type(threading.RLock())
_AWAITED = (
    queue.Queue, queue.SimpleQueue, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue, Connection,
    threading.Semaphore, threading.Condition, threading.Barrier, SemLock, socket.socket, subprocess.Popen,
)  # fmt: skip


def awaited_by(values: Iterable[Any]) -> str:
    """Return the class of something that gives a step what the next one does not get: the code may wait for it.

    In a step that runs again it could wait forever, since what fills it or lets it go does so once for each step. An
    iterator would give the next step what comes after. Returns "" if there is none.

    Args:
        values: As for `own_code.Followed`.

    Sync: none.
    """
    step = Followed(values)
    waits = any("wait" in each.__code__.co_names for each in step.functions)
    return next((type(each).__name__ for each in step.seen.values() if _is_awaited(each, waits=waits)), "")


def _is_awaited(value: Any, *, waits: bool) -> bool:
    if isinstance(value, threading.Event):
        return waits and not value.is_set()
    if isinstance(value, _RLock):  # the thread that holds it may take it again
        if is_free := value.acquire(blocking=False):
            value.release()
        return not is_free
    if isinstance(value, IOBase):
        return _is_pipe(value)
    if hasattr(type(value), "__next__"):
        return True
    return isinstance(value, _AWAITED) or (isinstance(value, _Lock) and value.locked())


def _is_pipe(file: IOBase) -> bool:
    """Whether another process gives a file what is read from it."""
    try:
        mode = os.fstat(file.fileno()).st_mode
        return file.readable() and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
    except (OSError, ValueError):  # one in memory, or closed
        return False
