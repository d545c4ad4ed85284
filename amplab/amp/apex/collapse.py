"""LossScaleCollapse: the loss scale has backed off again and again, and no smaller one would help.

A skip is beyond help where the loss was not finite before it was scaled, or where the scale was at or below 1. After
`SKIPS_BEFORE_COLLAPSE` of them in a row the run is told, instead of skipping for ever.
"""

import warnings
from typing import Literal, get_args

from torch import Tensor

from amplab.amp.backward.records import ScaleRecord

__all__ = ["SKIPS_BEFORE_COLLAPSE", "CollapseWatch", "LossScaleCollapse", "OnCollapse", "checked_on_collapse"]

SKIPS_BEFORE_COLLAPSE = 20

OnCollapse = Literal["raise", "warn"]


class LossScaleCollapse(RuntimeError):
    """Raised at the exit of `scale_loss` when every recent step was skipped and the scale is not to blame.

    The scale has moved, the step is going to be skipped: everything is in order for whoever goes on.

    Attributes:
        record: the last of the skips, with the loss scale and the gradient that was reached first.
        skips: how many there were in a row.
        loss_was_finite: whether the last loss was finite before it was scaled.
    """

    def __init__(self, message: str, record: ScaleRecord, skips: int, *, loss_was_finite: bool) -> None:
        super().__init__(message)
        self.record, self.skips, self.loss_was_finite = record, skips, loss_was_finite

    def __reduce__(self) -> tuple:
        return _unpickled, (str(self), self.record, self.skips, self.loss_was_finite)


class CollapseWatch:
    """Count the skips of one loss scaler that no smaller scale would have avoided.

    Args:
        on_collapse: "raise" `LossScaleCollapse`, or "warn" once until a step is clean again.
    """

    def __init__(self, on_collapse: OnCollapse) -> None:
        self._on_collapse = on_collapse
        self._skips = 0

    def see(self, record: ScaleRecord, loss: Tensor) -> None:
        """Take note of one exit of `scale_loss`.

        Args:
            record: what it came to.
            loss: before it was scaled, any shape.

        Raises:
            LossScaleCollapse: enough of them.

        Sync: one after a skip, else none.
        """
        if not record.skipped:
            self._skips = 0
            return
        finite = bool(loss.detach().isfinite().all())
        self._skips = 0 if finite and record.loss_scale > 1.0 else self._skips + 1
        if self._skips < SKIPS_BEFORE_COLLAPSE:
            return
        collapse = LossScaleCollapse(_message(record, self._skips, finite), record, self._skips, loss_was_finite=finite)
        if self._on_collapse == "raise":
            raise collapse
        if self._skips == SKIPS_BEFORE_COLLAPSE:
            warnings.warn(str(collapse), stacklevel=7)  # the line with the block of scale_loss


def checked_on_collapse(value: str) -> OnCollapse:
    """Return ``value`` if it is a word that `initialize` takes.

    Raises:
        ValueError: it is another.
    """
    if value not in get_args(OnCollapse):
        raise ValueError(
            f'on_collapse={value!r}: expected "raise" (LossScaleCollapse) or "warn"; use "warn" to skip on for ever.'
        )
    return value


def _message(record: ScaleRecord, skips: int, finite: bool) -> str:
    cause = (
        f"gradients are not finite at a loss scale of {record.loss_scale}, where scaling makes nothing larger"
        if finite
        else "the loss is not finite before it is scaled"
    )
    first = record.first_nonfinite or "none of these optimizers' parameters"
    return (
        f"Loss scaler {record.loss_id} has skipped {skips} steps in a row that no smaller scale can save: {cause}; "
        f"backward reached first the gradient of {first}. The loss scale is now {record.next_loss_scale}. Look for "
        'inf or NaN in the batch, the weights and the forward, lower the learning rate, or pass on_collapse="warn" to '
        "amp.initialize to go on."
    )


def _unpickled(message: str, record: ScaleRecord, skips: int, loss_was_finite: bool) -> LossScaleCollapse:
    return LossScaleCollapse(message, record, skips, loss_was_finite=loss_was_finite)
