"""The running line of the user's code: the innermost frame outside torch, amplab and the standard library.

The search stops at `step.py`, which calls the user's code: frames above it are not part of the step. Whether a file is
the user's is decided once for each file.
"""

import linecache
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import amplab

__all__ = ["CodeLine", "call_of_user_line", "user_line"]

_LIBRARIES = tuple(f"{Path(str(module.__file__)).parent}/" for module in (torch, amplab))
_MODELS = tuple(
    f"{Path(str(amplab.__file__)).parent}/{name}" for name in ("lab/models", "lab/tasks", "lessons/lesson_")
)
"""The models of the lab and of the lessons, whose code is shown as a person's own is."""

_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = ("site-packages", "dist-packages")
_WRAPPERS = frozenset(("decorate_context", "inner", "wrapper"))  # of torch's decorators
_CALLER = str(Path(__file__).with_name("step.py"))


class CodeLine(NamedTuple):
    """A line of code.

    Args:
        file: the name that the interpreter uses; a notebook cell has a file name of its own.
        number: from 1.
    """

    file: str
    number: int

    @property
    def source(self) -> str:
        """The line without indentation; empty if its file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        """Return `model.py:12`; for a file outside the working folder, its last two parts."""
        return f"{_short(self.file)}:{self.number}"


def user_line() -> CodeLine | None:
    """Return the line of the user's code that this thread is running; None if there is none. Sync: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _CALLER:
            return None
        if _is_users(file):
            return CodeLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def call_of_user_line() -> str:
    """Return the library's function that the user's line called, such as `clip_grad_norm_`; empty for a method in C++.

    Sync: none.
    """
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        name, is_torchs = frame.f_code.co_name, frame.f_code.co_filename.startswith(_LIBRARIES[0])
        called = name if is_torchs and not name.startswith("_") and name not in _WRAPPERS else called
        frame = frame.f_back
    return called


@cache
def _is_users(file: str) -> bool:
    if file.startswith(_MODELS):
        return True
    if file.startswith(("<frozen ", *_LIBRARIES)):
        return False
    return not file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


@cache
def _short(file: str) -> str:
    path = Path(file)
    if file.startswith("<"):
        return file
    if path.parent.name.startswith("ipykernel_"):
        return "cell"
    with suppress(OSError):  # the working folder was deleted
        if path.parent == Path.cwd():
            return path.name
    return "/".join(path.parts[-2:])
