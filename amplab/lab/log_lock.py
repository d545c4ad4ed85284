"""A lock on a run log: while a process holds it the process lives, and the system drops it however the process ends."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no log is held there
    fcntl = None  # type: ignore[assignment]

__all__ = ["hold", "is_held"]


def hold(descriptor: int) -> bool:
    """Lock an open log until its descriptor is closed; return False where that is impossible, as on some drives."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_held(log: Path) -> bool:
    """Return whether a process holds a log. Raises OSError: the log cannot be read."""
    if fcntl is None:
        return False
    descriptor = os.open(log, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
