"""Write a file whole or not at all.

    write to a new file in the same folder -> fsync it -> rename it over the old one -> fsync the folder

At any moment ``path`` is the old file or the new one, complete, even when the process is killed or the power fails.
"""

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_atomically"]


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a new file, and put it in the place of ``path`` once it is safe on the disk.

    A write that fails leaves ``path`` as it was and nothing beside it. One that is killed leaves ``path`` as it was
    and a hidden file ``.NAME.….partial`` beside it, which nobody needs.

    Args:
        path: what to write; need not exist, its folder must.
        write: gets the file, open for writing bytes.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: ``path`` is there and no regular file, the disk is full, the folder is read-only, …
    """
    path = path.resolve()  # of a link, what it leads to
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is no regular file, and would be replaced by one; name a file.")
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder to write {path.name} in; make it first.")
    partial = folder / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            partial.chmod(stat.S_IMODE(path.stat().st_mode))  # a private file stays one
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    """Make the rename itself last; Windows opens no folders, and needs none of this."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
