"""The largest float16 numbers of a training run, measured in some of its steps, and when they will exceed 65504.

with peaks.at(step):      # around one training step
    ...
peaks.activation.reaches  # the step at which the largest activation is expected to exceed 65504
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amplab.formats import FLOAT16
from amplab.trace.dispatch_mode import DispatchMode

__all__ = ["HalfPeaks", "PeakTrend"]

_FEWEST = 6  # measurements that a trend needs
_GROWN = 1.5  # growth from the first measurement to the last; less is noise
_NEAR = 2.0**8  # no trend is reported for values below 65504 by more than this factor


@dataclass(frozen=True)
class PeakTrend:
    """The largest magnitude of one kind of value by step.

    Attributes:
        samples: (step, largest finite magnitude), in order.
    """

    samples: tuple[tuple[int, float], ...] = ()

    @property
    def largest(self) -> float:
        """The largest of all; 0.0 if nothing was float16."""
        return max((peak for _, peak in self.samples), default=0.0)

    @property
    def reaches(self) -> int | None:
        """The step at which it exceeds 65504 if it keeps growing as in the second half; None if it does not grow.

        A straight line is fitted to log2 of the samples.
        """
        recent = [(step, math.log2(peak)) for step, peak in self.samples[len(self.samples) // 2 :] if peak > 0]
        if len(recent) < _FEWEST or recent[-1][1] < math.log2(FLOAT16.max / _NEAR):
            return None
        mean_step = sum(step for step, _ in recent) / len(recent)
        mean = sum(level for _, level in recent) / len(recent)
        spread = sum((step - mean_step) ** 2 for step, _ in recent)
        slope = sum((step - mean_step) * (level - mean) for step, level in recent) / spread
        if slope * (recent[-1][0] - recent[0][0]) < math.log2(_GROWN):
            return None
        last, level = recent[-1]
        return math.ceil(last + (math.log2(FLOAT16.max) - level) / slope)


class HalfPeaks:
    """Measures the float16 results of the ops of single steps.

    Attributes:
        activation: of ops outside of backward.
        gradient: of ops in backward, multiplied by the loss scale as they are.
    """

    def __init__(self) -> None:
        self.activation, self.gradient = PeakTrend(), PeakTrend()

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Measure the step in the block. Sync: one."""
        mode = _Peaks()
        with mode:
            yield
        forward, backward = mode.peaks()
        self.activation = PeakTrend((*self.activation.samples, (step, forward)))
        self.gradient = PeakTrend((*self.gradient.samples, (step, backward)))


class _Peaks(DispatchMode):
    """Keeps the largest result of every float16 op, for forward and for backward."""

    def __init__(self) -> None:
        super().__init__()
        self._found: tuple[list[Tensor], list[Tensor]] = ([], [])

    def peaks(self) -> tuple[float, float]:
        """Return the largest magnitudes of forward and of backward; 0.0 without float16."""
        forward, backward = (torch.stack(found).amax().item() if found else 0.0 for found in self._found)
        return forward, backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float16 and result.numel() and not func.is_view:
            in_backward = torch._C._current_autograd_node() is not None
            size = result.detach().abs().float()
            # inf and 65504 itself are what masks are filled with; an overflow shows in the loss
            self._found[in_backward].append(torch.where(size < FLOAT16.max, size, 0.0).amax())
        return result
