"""Where built kernels are kept: one folder per key, in which all libraries of a build appear together or not at all.

``<root>/<key>/built/amplab_kernels_<part>.so``. The roots, in order: the user's cache folder and, where that cannot be
written, a folder of the user's own under the system's temporary one. Nothing is written to look something up.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: builders may do the same work twice, and the last one's result stays
    fcntl = None

__all__ = ["building", "discard", "find", "publish", "writable_folder"]

_BUILT = "built"
_SUFFIX = ".pyd" if sys.platform == "win32" else ".so"


def find(key: str) -> tuple[Path, ...]:
    """The libraries that were built for ``key``; none where it was not built."""
    for root in _roots():
        if libraries := tuple(sorted((root / key / _BUILT).glob("*" + _SUFFIX))):
            return libraries
    return ()


def writable_folder(key: str) -> Path | None:
    """The folder of ``key`` in the first root that can be written, made if need be; None where no root can."""
    for root in _roots():
        folder = root / key
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Let one builder at a time into ``folder``.

    The operating system releases the lock when its holder dies, however it dies. The lock saves work and no more:
    every builder compiles in a folder of its own, so where there is no flock all is still right.
    """
    with open(folder / "building", "a") as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def publish(finished: Path, folder: Path) -> None:
    """Move a folder of finished libraries to its place in one step, so that nobody ever sees a part of them."""
    try:
        finished.replace(folder / _BUILT)
    except OSError:  # where there are no locks, another builder may have come first: its libraries are the same
        if not (folder / _BUILT).is_dir():
            raise


def discard(libraries: Sequence[Path]) -> None:
    """Remove libraries that do not load, so that they are built again; what may not be removed stays."""
    for folder in {library.parent for library in libraries}:
        shutil.rmtree(folder, ignore_errors=True)


def _roots() -> list[Path]:
    roots = [Path(tempfile.gettempdir()) / f"amplab-kernels-{_user()}"]
    if not _is_own(roots[0]):
        roots = []
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        if os.environ.get(variable):
            return [Path(os.environ[variable]) / "amplab" / "kernels", *roots]
    try:
        return [Path.home() / ".cache" / "amplab" / "kernels", *roots]
    except RuntimeError:  # no home
        return roots


def _user() -> str:
    return str(os.getuid()) if os.name == "posix" else os.environ.get("USERNAME", "user")


def _is_own(root: Path) -> bool:
    """Whether a folder in a place that everybody can write is ours, so that no stranger's code is loaded from it."""
    if os.name != "posix":
        return True
    try:
        status = root.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
