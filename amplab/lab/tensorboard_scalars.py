"""Scalars of a watched run for TensorBoard, where that is installed; amplab does not need it."""

from __future__ import annotations

import math
from os import PathLike

from amplab.amp.run_state.paths import given_path
from amplab.lab.events import StepRecord

__all__ = ["TensorBoardScalars"]


class TensorBoardScalars:
    """Writes loss, scale, skips and gradients under ``amplab/``.

    Args:
        folder: where to write the event files.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "tensorboard=…: TensorBoard is not installed; run: python -m pip install tensorboard, or omit it."
            ) from error
        self._writer = SummaryWriter(str(given_path(folder, "tensorboard")))
        self._skips = 0

    def write(self, record: StepRecord, gradient_norm: float | None) -> None:
        """Write one step, without the values that were not measured."""
        self._skips += record.skipped
        values = {
            "loss": record.loss,
            "loss_scale_log2": math.log2(record.loss_scale) if record.loss_scale > 0 else None,
            "skipped_steps": self._skips,
            "gradient_norm": gradient_norm,
            "largest_gradient_log2": record.grad_exponent,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"amplab/{name}", value, record.step)

    def close(self) -> None:
        """Write the remaining values and close the files."""
        self._writer.close()
