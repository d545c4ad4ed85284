"""Which exercises a person has solved: one small JSON file, written by the kernels that `amplab lab` starts.

The environment variable AMPLAB_PROGRESS names the file. Without it nothing is recorded. Standard library only, so that
`amplab lab --list` does not wait for torch.
"""

import json
import os
import re
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import date
from pathlib import Path

from amplab.lessons.locked_folder import locked

__all__ = ["PROGRESS", "read_progress", "record_right"]

PROGRESS = "AMPLAB_PROGRESS"
"""Environment variable of a kernel: the file of the progress."""

_LEFT_OVER_SECONDS = 60.0  # a write takes milliseconds


def record_right(name: str) -> None:
    """Note that the exercise `name` is solved, with the day; without AMPLAB_PROGRESS, do nothing.

    A file that cannot be written is a warning: the verdict on the answer is correct all the same. So is a damaged file,
    which is kept beside the new one as ``….damaged``. A link stays, and its target is written.
    """
    named = os.environ.get(PROGRESS)
    if not named:
        return
    path = Path(os.path.realpath(named))
    if name in read_progress(path):
        return
    try:
        with locked(path.parent):  # of two kernels at once, one would lose what the other adds
            _remove_left_over(path)
            solved = {**_solved_so_far(path), name: date.today().isoformat()}
            _replace(path, json.dumps(solved, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        warnings.warn(f"{path}: {error.strerror or error}; the exercise is not noted as solved.", stacklevel=2)


def read_progress(path: Path) -> dict[str, str]:
    """Return the solved exercises and the day of each; a file that is missing or unreadable has none."""
    try:
        return _read(path)
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> dict[str, str]:
    """Return the solved exercises; raise OSError without a file, ValueError for one that does not hold them."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("expected a regular file")  # a pipe would wait for a writer, and a device may have no end
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        read = None
    if not isinstance(read, dict):
        raise ValueError("expected a dict")
    return {str(name): str(day) for name, day in read.items()}


def _solved_so_far(path: Path) -> dict[str, str]:
    """Return the solved exercises of a file that is about to be replaced; set a damaged one aside."""
    try:
        return _read(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        os.replace(path, aside)
        warnings.warn(f"{path} is damaged; it is kept as {aside.name}, and a new one begins.", stacklevel=3)
        return {}


def _replace(path: Path, text: str) -> None:
    """Write a new file beside `path` and rename it, so that no reader sees half of it."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _remove_left_over(path: Path) -> None:
    """Remove what `_replace` has left in processes that were killed; its names are those that `tempfile` makes."""
    made = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}")
    for file in path.parent.iterdir():
        if made.fullmatch(file.name):
            with suppress(OSError):  # another process has removed it
                if time.time() - file.lstat().st_mtime > _LEFT_OVER_SECONDS:
                    file.unlink()
