"""Rules about a step that raises an exception: findings from the error messages that mixed precision can cause."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import amplab
from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding, Place
from amplab.diagnose.remedies.users_code import with_smaller_number
from amplab.trace import CodeLine

__all__ = ["Raised", "finding_of_error"]

_KNOWN = (
    (re.compile(r"cannot be converted to type (at::Half|c10::Half).* without overflow"), "constant-overflows-half"),
    (re.compile(r"binary_cross_entropy"), "bce-after-sigmoid"),
    (re.compile(r"\.step\(\).*scale_loss"), "stepped-with-scaled-gradients"),
    (
        re.compile(r"torch\.utils\.checkpoint: .*(have different metadata|different number of tensors)"),
        "recomputed-without-casts",
    ),
    (re.compile(r"unscale_\(\) has already been called"), "unscaled-twice"),
)
"""Part of the message of an error -> the finding."""


class Raised:
    """A function and the exception it raised, to distinguish an error of the step from one of the tool that calls it.

    >>> step = Raised(lambda: int("a"))
    >>> try:
    ...     step()
    ... except ValueError as error:
    ...     print(error is step.error)
    True
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        self.__wrapped__ = function  # by which `inspect.unwrap` finds it

    def __call__(self) -> Any:
        """Call it."""
        try:
            return self.__wrapped__()
        except Exception as error:
            self.error = error
            raise


def finding_of_error(error: Exception, model: nn.Module | None = None, called: str = "step()") -> Finding:
    """Return the finding for an error that a step raised, with the line of the user's code, the op and the module.

    Args:
        error: what was raised.
        model: the model of the step.
        called: the call that raised it, as code.

    >>> finding_of_error(RuntimeError("value cannot be converted to type at::Half without overflow")).name
    'constant-overflows-half'
    """
    message = " ".join(str(error).split())
    frame, line = _users_frame(error)
    place: Place = {"line": "" if line is None else str(line), "op": _op_in(line), "module": _module_of(frame, model)}
    for pattern, name in _KNOWN:
        if pattern.search(message):
            code = with_smaller_number(line, place["op"])
            return finding(name, "raised", **place, message=message[:300], code=code)
    return finding("step-raised", **place, error=type(error).__name__, message=message[:300], called=called)


def _users_frame(error: Exception) -> tuple[FrameType | None, CodeLine | None]:
    """The innermost frame of the user's code that the error came through, and its line."""
    found: tuple[FrameType | None, CodeLine | None] = (None, None)
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen ", *_LIBRARIES)):
            found = frame, CodeLine(file, number)
    return found


_LIBRARIES = tuple(f"{Path(each).parent}/" for each in (torch.__file__, amplab.__file__) if each)


def _op_in(line: CodeLine | None) -> str:
    """The op in a line that writes a number into a tensor; empty for none."""
    named = re.search(r"\b(masked_fill|fill|where|full_like|full|clamp)_?\(", line.source if line else "")
    return named[1] if named else ""


def _module_of(frame: FrameType | None, model: nn.Module | None) -> str:
    """The path of the module whose method a frame runs; of the model itself its class."""
    owner = None if frame is None else next(iter(frame.f_locals.values()), None)
    if model is None or not isinstance(owner, nn.Module):
        return ""
    paths = (path or type(model).__name__ for path, module in model.named_modules() if module is owner)
    return next(paths, "")
