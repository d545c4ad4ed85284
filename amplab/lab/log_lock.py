"""A lock on a run log: while a process holds it the process lives, and the system drops it however the process ends.

A process that writes a log has a shared lock. To see whether there is one, a reader takes an exclusive lock for some
microseconds; who meets it tries again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no log is held there
    fcntl = None  # type: ignore[assignment]

__all__ = ["hold", "is_held"]

_TRIES = 5
_PAUSE_SECONDS = 0.0002  # before the second try, and twice as much before each further one


def hold(descriptor: int) -> bool:
    """Lock an open log until its descriptor is closed; return False where that is impossible, as on some drives."""
    if fcntl is None:
        return False
    try:
        return _locks(descriptor, fcntl.LOCK_SH)
    except OSError:
        return False


def is_held(log: Path) -> bool:
    """Return whether a process holds a log. Raises OSError: the log cannot be read."""
    if fcntl is None:
        return False
    descriptor = os.open(log, os.O_RDONLY)
    try:
        return not _locks(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _locks(descriptor: int, kind: int) -> bool:
    """Lock a file; return False if others hold it all the time. Raises OSError: the drive has no locks."""
    for tried in range(_TRIES):
        if tried:
            time.sleep(_PAUSE_SECONDS * 2 ** (tried - 1))
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
    return False
