"""Where built kernels are kept: one folder per key, in which all libraries of a build appear together or not at all.

``<root>/<key>/built/amplab_kernels_<part>.so``. There are two roots: ``amplab/kernels`` in the user's cache folder,
and ``amplab-kernels-<uid>`` in the system's temporary folder where the first cannot be used.

A library is code that runs as the user. So a library is loaded, and a folder is built in, only if no other user can
change it or any folder above it (`distrust`), and only if it is whole: loading one that has lost its end would kill the
process, so ``sha256`` beside the libraries holds their digests. Looking a build up writes nothing.
"""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
    import grp
    import pwd

    _POSIX = True
except ImportError:  # Windows: two builders may do the same work; the result of the last one stays
    _POSIX = False

__all__ = ["BUILT", "building", "discard", "distrust", "find", "no_folder", "publish", "refusals", "writable_folder"]

BUILT = "built"
_DIGESTS = "sha256"
_SUFFIX = ".pyd" if sys.platform == "win32" else ".so"
# Who owns the files of the system's root as seen from inside a user namespace, as in a rootless container.
_UNMAPPED = 65534


class _Root(NamedTuple):
    """A folder of builds, and how many of its last path components amplab makes."""

    folder: Path
    own: int


def find(key: str) -> tuple[Path, ...]:
    """Return the libraries for ``key``, links resolved, if they are whole and can be trusted; else an empty tuple."""
    for root in _roots():
        libraries = _libraries(root, key)
        if libraries and not any(_distrusted(each, root.own + 3) for each in libraries) and _are_whole(libraries):
            return libraries
    return ()


def refusals(key: str) -> tuple[str, ...]:
    """Return, for each cache root, why `find` rejects its libraries for ``key``, and what to do."""
    reasons = []
    for root in _roots():
        found = (_distrusted(library, root.own + 3) for library in _libraries(root, key))
        reasons += [reason for reason in found if reason is not None][:1]
    return tuple(reasons)


def writable_folder(key: str) -> Path | None:
    """Return the folder of ``key`` in the first root that can be written and trusted, made if necessary, or None."""
    for root in _roots():
        folder = root.folder / key
        try:
            if _distrusted(_existing(folder), 0) is not None:
                continue
            _make_private(folder)
            folder = folder.resolve()
        except OSError:
            continue
        # Checked again now that it is there: another user may have made it in the meantime.
        if os.access(folder, os.W_OK | os.X_OK) and _distrusted(folder, root.own + 1) is None:
            return folder
    return None


def no_folder(key: str) -> str:
    """Return why `writable_folder` returned None, root by root. Call it only after that."""
    reasons = (_distrusted(_existing(root.folder / key), 0) or f"{root.folder} cannot be written" for root in _roots())
    return f"there is no folder to keep the kernels in: {'; '.join(reasons)}"


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Lock ``folder``, so that one builder at a time works in it.

    The operating system releases the lock when the builder ends, even if it is killed. The lock only saves work: every
    builder compiles in its own folder, so a file system without locks is safe as well.
    """
    with open(folder / "building", "a") as file:
        if _POSIX:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def publish(finished: Path, folder: Path) -> None:
    """Move a folder of finished libraries to its place in one step, so that no process sees only some of them."""
    (finished / _DIGESTS).write_text(_digests(sorted(finished.glob("*" + _SUFFIX))))
    try:
        finished.replace(folder / BUILT)
    except OSError:  # without locks, another builder may have finished first: its libraries are the same
        if not (folder / BUILT).is_dir():
            raise


def discard(libraries: Sequence[Path]) -> None:
    """Remove libraries that do not load, so that they are built again; those that cannot be removed stay."""
    for folder in {library.parent for library in libraries}:
        shutil.rmtree(folder, ignore_errors=True)


def distrust(status: os.stat_result, uid: int, private_group: int | None, *, own: bool) -> str | None:
    """Return how a user other than ``uid`` and root could change a file or folder; None if nobody could.

    Args:
        status: the result of ``os.stat``.
        uid: the user who loads the library.
        private_group: a group with no other member than that user; None if there is none.
        own: True for what amplab makes; False for the folders above, which may be sticky, such as ``/tmp``, or belong
            to the unmapped root of a container.

    >>> distrust(os.stat_result((0o100644, 0, 0, 1, 1001, 1001, 0, 0, 0, 0)), 1000, None, own=True)
    'belongs to user 1001'
    """
    if status.st_uid not in ((uid, 0) if own else (uid, 0, _UNMAPPED)):
        return f"belongs to user {status.st_uid}"
    by_others = bool(status.st_mode & stat.S_IWOTH)
    by_group = bool(status.st_mode & stat.S_IWGRP) and status.st_gid != private_group
    sticky = not own and stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if (by_others or by_group) and not sticky:
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _distrusted(path: Path, own: int) -> str | None:
    """Return which of ``path`` and the folders above it another user could change, and what to do; None if none.

    Args:
        path: exists.
        own: how many of the last components of ``path`` amplab makes.
    """
    if not _POSIX:
        return None
    uid, real = os.getuid(), path.resolve()
    private_group = _private_group(uid)
    for level, part in enumerate((real, *real.parents)):
        try:
            reason = distrust(part.stat(), uid, private_group, own=level < own)
        except OSError as error:
            reason = f"cannot be checked: {error.strerror}"
        if reason is not None:
            # Folders above those that amplab makes may hold anything: never advise to remove them.
            remedies = [f"run chmod go-w {part}"] if "mode" in reason else []
            remedies += ["remove it"] if level < own else []
            remedies.append("set XDG_CACHE_HOME to a folder that only you can write")
            return f"{part} {reason}; {', or '.join(remedies)}"
    return None


def _private_group(uid: int) -> int | None:
    """Return the user's primary group if it has the user's name and no other member, as with a umask of 002."""
    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    return group.gr_gid if group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name} else None


def _libraries(root: _Root, key: str) -> tuple[Path, ...]:
    return tuple(path.resolve() for path in sorted((root.folder / key / BUILT).glob("*" + _SUFFIX)))


def _are_whole(libraries: Sequence[Path]) -> bool:
    digests = libraries[0].with_name(_DIGESTS)
    are_files = all(path.is_file() for path in (*libraries, digests))  # reading a pipe would wait for a writer
    return are_files and digests.read_text("utf-8", "replace") == _digests(libraries)


def _digests(libraries: Sequence[Path]) -> str:
    """Return the digest and the name of each library, a line for each."""
    return "".join(f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in libraries)


def _existing(folder: Path) -> Path:
    """Return the nearest of ``folder`` and the folders above it that exists."""
    return next(part for part in (folder, *folder.parents) if part.exists())


def _make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user only, regardless of the umask."""
    for part in reversed((folder, *folder.parents)):
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)


def _roots() -> list[_Root]:
    """Return the folder in the user's cache, and the one in the temporary folder, as far as there are these."""
    roots = [] if (own := _user_cache()) is None else [_Root(own / "amplab" / "kernels", own=2)]
    with suppress(FileNotFoundError):  # no temporary folder that can be written
        roots.append(_Root(Path(tempfile.gettempdir()).absolute() / f"amplab-kernels-{_user()}", own=1))
    return roots


def _user_cache() -> Path | None:
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        value = os.environ.get(variable, "")
        if os.path.isabs(value):  # a relative one is invalid (XDG Base Directory Specification)
            return Path(value)
    with suppress(RuntimeError):  # no home
        if (home := Path.home()).is_absolute():
            return home / ".cache"
    return None


def _user() -> str:
    return str(os.getuid()) if _POSIX else os.environ.get("USERNAME", "user")
