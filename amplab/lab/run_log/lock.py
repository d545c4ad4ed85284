"""A lock on a run log: while a process holds it the process lives, and the system drops it however the process ends.

A process that writes a log has a shared lock. To see whether there is one, a reader takes an exclusive lock for some
microseconds, or longer if the system takes the processor from it. So what meets an exclusive lock waits for its end.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from amplab.policies.signals import deferring_signals

try:
    import fcntl
except ImportError:  # Windows: no log is held there
    fcntl = None  # type: ignore[assignment]

__all__ = ["hold", "is_held"]

_TRIES = 5
_PAUSE_SECONDS = 0.0002  # before the second try, and twice as much before each further one
_LONGEST_SECONDS = 1.0  # for the end of an exclusive lock


@deferring_signals
def hold(descriptor: int) -> bool:
    """Lock an open log until its descriptor is closed; return False where that is impossible, as on some drives."""
    if fcntl is None:
        return False
    end = time.monotonic() + _LONGEST_SECONDS
    try:
        while not (locks := _locks(descriptor, fcntl.LOCK_SH)) and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
    except OSError:
        return False
    return locks


@deferring_signals
def is_held(log: Path, *, until: float = math.inf) -> bool:
    """Return whether a process holds a log.

    Args:
        log: a file.
        until: when to stop waiting for the end of an exclusive lock, by `time.monotonic`, for a reader of many logs.

    Raises:
        OSError: the log cannot be read.
    """
    if fcntl is None:
        return False
    descriptor = os.open(log, os.O_RDONLY)
    try:
        return _is_held(descriptor, min(until, time.monotonic() + _LONGEST_SECONDS))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_held(descriptor: int, end: float) -> bool:
    shared = 0  # how often only a shared lock was possible: the lock of a writer, or of another reader at this place
    while not _locks(descriptor, fcntl.LOCK_EX):
        if _locks(descriptor, fcntl.LOCK_SH):
            shared += 1
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if shared == _TRIES or time.monotonic() >= end:
            return True
        time.sleep(_PAUSE_SECONDS * 2**shared)
    return False


def _locks(descriptor: int, kind: int) -> bool:
    """Lock a file; return False if others hold it. Raises OSError: the drive has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
