"""What a step that raises says about itself: a finding from the message, for the errors that mixed precision knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from amplab.diagnose.finding import Finding

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
        self._function = function

    def __call__(self) -> Any:
        """Call it."""
        try:
            return self._function()
        except Exception as error:
            self.error = error
            raise


def finding_of_error(error: Exception) -> Finding:
    """Return the finding for an error that a step raised.

    >>> finding_of_error(RuntimeError("value cannot be converted to type at::Half without overflow")).name
    'constant-overflows-half'
    """
    message = " ".join(str(error).split())
    for pattern, name, cause, remedy in _KNOWN:
        if pattern.search(message):
            return Finding(name, "error", f"The step raised: {message[:300]}", cause, remedy)
    return Finding(
        "step-raised",
        "error",
        f"The step raised {type(error).__name__}: {message[:300]}",
        "It cannot be looked at before it runs.",
        "loss_fn()  # shows the traceback",
    )
