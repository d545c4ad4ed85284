"""Scalars of a watched run for TensorBoard, where that is installed; amplab does not need it."""

from __future__ import annotations

import errno
import math
import os
from os import PathLike
from typing import Any

from amplab.amp.run_state.paths import given_path
from amplab.lab.events import StepRecord

__all__ = ["TensorBoardScalars"]


class TensorBoardScalars:
    """Writes loss, scale, skips and gradients under ``amplab/``.

    Args:
        folder: where to write the event files.

    Attributes:
        folder: where they are.

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
        self.folder = given_path(folder, "tensorboard").absolute()  # events are written later
        self._writer = SummaryWriter(str(self.folder))
        self._process = os.getpid()
        self._skips = 0

    def write(self, record: StepRecord, *, loss: float | None, gradient_norm: float | None) -> None:
        """Write one step, without the values that were not measured, which are None.

        Raises:
            OSError: a step before could not be written, since the disk is full or the folder is deleted; the process
                was forked from the one that writes.
        """
        if self._is_forked():  # without the thread that writes, values would wait for ever
            raise OSError(errno.EPERM, "the process was forked from the one that writes them")
        self._skips += record.skipped
        values = {
            "loss": loss,
            "loss_scale_log2": math.log2(record.loss_scale) if record.loss_scale > 0 else None,
            "skipped_steps": self._skips,
            "gradient_norm": gradient_norm,
            "largest_gradient_log2": record.grad_exponent,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"amplab/{name}", value, record.step)

    def close(self) -> None:
        """Write the remaining values and end the thread that writes; no effect in a forked process.

        Raises:
            OSError: they cannot be written; the thread has ended all the same.
        """
        if self._is_forked():
            return
        files: list[Any] = list((self._writer.all_writers or {}).values())
        try:
            self._writer.close()
        except Exception:  # before it ended the thread
            for file in files:
                file.close()
            raise

    def _is_forked(self) -> bool:
        return os.getpid() != self._process
