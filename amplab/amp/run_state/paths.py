"""The path of a file that a user gives, wherever amplab takes one: what ``~`` means, and which paths are refused.

``~`` and ``~user`` at its start are home folders, as in a shell; ``./~`` is a file of that name. Names that no file can
have are refused in words, since the errors of the system name neither the argument nor a remedy.
"""

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from amplab.policies.signals import deferring_signals

__all__ = ["given_path", "short_name", "special_kind", "target_of"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_REFUSED = {
    errno.ENAMETOOLONG: "a name in it, or the whole path, is too long for this system; give a shorter one, of at most "
    "255 bytes for each name",
    errno.ELOOP: "it is a link that leads back to itself; remove the link, or give another path",
}
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


@deferring_signals
def given_path(path: Any, argument: str = "path") -> Path:
    """Return a path that a user gave, with ``~`` expanded.

    Args:
        path: a str or a PathLike of str.
        argument: its name in the messages.

    Raises:
        TypeError: something else than a path.
        ValueError: an empty path, an address such as s3://, a path with a NUL character, or with ``~`` and a user that
            does not exist; HOME is a relative path.
        OSError: a name that is too long, or a link that leads back to itself.

    >>> given_path("runs/one.jsonl").as_posix()
    'runs/one.jsonl'
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{argument}={path!r}: expected the path of a file, as a str or a pathlib.Path.")
    if not text:
        raise ValueError(f"{argument}='': an empty path; expected a file or a folder. The working folder is '.'.")
    if "\0" in text:
        raise ValueError(f"{argument}={text!r}: no path has a NUL character; remove it.")
    if _ADDRESS.match(text):  # would be a folder of the name "s3:"
        raise ValueError(f"{argument}={text!r}: expected a local path, not an address; copy the file to or from there.")
    home = os.path.expanduser(text)
    if home == text and text.startswith("~") and "/" in text:
        user, _, rest = text.partition("/")
        raise ValueError(
            f"{argument}={text!r}: this system has no home folder of {user[1:] or 'this user'}; expected ~/{rest}, or "
            f"./{text} for a folder whose name begins with ~."
        )
    if home != text and not os.path.isabs(home):
        raise ValueError(
            f"{argument}={text!r}: HOME={os.environ.get('HOME')} is a relative path; set HOME to an absolute one, or "
            "give a path without ~."
        )
    try:
        os.stat(home)
    except OSError as error:
        if error.errno in _REFUSED:
            raise OSError(f"{argument}={_shortened(home)}: {_REFUSED[error.errno]}.") from None
    found = Path(home)
    return found.absolute() if str(found).startswith("~") else found  # whoever takes it as given must not expand it


@deferring_signals
def target_of(path: Path) -> Path:
    """Return the absolute path of a file; of a link, the path of its target, which need not exist.

    Raises:
        OSError: a link that leads back to itself.
    """
    target = os.path.realpath(path)
    if os.path.islink(target):
        raise OSError(f"{path}: {_REFUSED[errno.ELOOP]}.")
    return Path(target)


@deferring_signals
def special_kind(path: Path) -> str:
    """Return what is at a path in place of a regular file, such as "a named pipe"; "" for a file, or for nothing.

    Reading a pipe waits for a writer, and a device may have no end.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "")


def short_name(name: str, longest: int = 230) -> str:
    """Return a file name, or what stands for it where a name that is made of it would exceed the 255 bytes of a name.

    Args:
        name: of a file.
        longest: bytes; names up to this length are returned as they are.
    """
    encoded = os.fsencode(name)
    return name if len(encoded) <= longest else f"{name[:40]}~{hashlib.sha256(encoded).hexdigest()[:16]}"


def _shortened(path: str, most: int = 120) -> str:
    return repr(path if len(path) <= most else f"{path[: most // 2]}…{path[-most // 2 :]}")
