"""What a step that raises says about itself: a finding from the message, for the errors that mixed precision knows."""

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
from amplab.diagnose.finding import Finding
from amplab.trace import CodeLine

__all__ = ["Raised", "finding_of_error"]

_WITHOUT_OVERFLOW = re.compile(r"value cannot be converted to type (at::Half|c10::Half).* without overflow")
_KNOWN = (
    (
        _WITHOUT_OVERFLOW,
        "constant-overflows-half",
        "A number in the code is larger than 65504, half's largest, and is written into a half tensor.",
        "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
    ),
    (
        re.compile(r"binary_cross_entropy"),
        "bce-after-sigmoid",
        "Probabilities in half round to 0 and 1, where the loss is clamped and has no gradient.",
        "loss = F.binary_cross_entropy_with_logits(logits, target)  # and no sigmoid before it",
    ),
    (
        re.compile(r"inside of the block of scale_loss"),
        "stepped-with-scaled-gradients",
        "The gradients are unscaled at the end of the block of scale_loss; in it they are loss_scale times too large.",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()\noptimizer.step()",
    ),
    (
        re.compile(r"torch\.utils\.checkpoint: .*(have different metadata|different number of tensors)"),
        "recomputed-without-casts",
        "torch.utils.checkpoint runs the block again in backward, where amplab's casts are over: in other dtypes.",
        "hidden = amplab.checkpoint(block, hidden, use_reentrant=False)  # for torch.utils.checkpoint.checkpoint",
    ),
    (
        re.compile(r"unscale_\(\) has already been called"),
        "unscaled-twice",
        "unscale_ was called twice for one optimizer between two updates.",
        "scaler.unscale_(optimizer)  # once, after the last backward and before clipping",
    ),
)


class Raised:
    """A function, with what it raised: to tell the step's own error from one about the way it was called.

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
    """Return the finding for an error that a step raised, with the user's line, its op and its module of `model`.

    Args:
        error: what was raised.
        model: the model that was at work.
        called: the call that raised it, as code.

    >>> finding_of_error(RuntimeError("value cannot be converted to type at::Half without overflow")).name
    'constant-overflows-half'
    """
    message = " ".join(str(error).split())
    frame, line = _users_frame(error)
    place = {"line": "" if line is None else str(line), "op": _op_in(line), "module": _module_of(frame, model)}
    for pattern, name, cause, remedy in _KNOWN:
        if pattern.search(message):
            return Finding(name, "error", f"The step raised: {message[:300]}", cause, remedy, **place)
    return Finding(
        "step-raised",
        "error",
        f"The step raised {type(error).__name__}: {message[:300]}",
        "It cannot be looked at before it runs.",
        f"{called}  # shows the traceback",
        **place,
    )


def _users_frame(error: Exception) -> tuple[FrameType | None, CodeLine | None]:
    """The innermost frame of the user's code that the error came through, and its line."""
    found: tuple[FrameType | None, CodeLine | None] = (None, None)
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen ", *_LIBRARIES)):
            found = frame, CodeLine(file, number)
    return found


_LIBRARIES = tuple(f"{Path(module.__file__).parent}/" for module in (torch, amplab))


def _op_in(line: CodeLine | None) -> str:
    """The op that a line names, of those which write a number into a tensor; empty for none."""
    named = re.search(r"\b(masked_fill|fill|where|full_like|full|clamp)_?\(", line.source if line else "")
    return named[1] if named else ""


def _module_of(frame: FrameType | None, model: nn.Module | None) -> str:
    """The path of the module whose method a frame runs; of the model itself its class."""
    owner = None if frame is None else next(iter(frame.f_locals.values()), None)
    if model is None or not isinstance(owner, nn.Module):
        return ""
    paths = (path or type(model).__name__ for path, module in model.named_modules() if module is owner)
    return next(paths, "")
