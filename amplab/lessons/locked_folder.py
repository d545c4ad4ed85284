"""`locked`: of several processes that change the files of a folder, one at a time. Standard library only."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked"]

_SECONDS = 3.0  # of the other process, which writes small files


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let other processes wait that lock `folder`, which must exist, until the block ends.

    Without effect on Windows and on drives that have no such lock.

    Raises:
        OSError: another program, of whoever can read the folder, has locked it for 3 seconds.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _SECONDS
        while not _is_locked_now(handle):
            if time.monotonic() > end:
                raise OSError(errno.EBUSY, "another program has locked the folder")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _is_locked_now(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a drive without such locks, as some of NFS: go on without one
        return True
    return True
