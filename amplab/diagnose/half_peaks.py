"""The largest float16 numbers of a training run, measured in some of its steps, and when they will exceed 65504.

with peaks.at(step):      # around one training step
    ...
peaks.activation.reaches  # the step at which the largest activation is expected to exceed 65504
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from amplab.diagnose.observed_step.values import writes_values
from amplab.formats import FLOAT16
from amplab.formats.stored_values import has_values, stored_values
from amplab.trace.dispatch_mode import DispatchMode, run_op

__all__ = ["HalfPeaks", "PeakTrend"]

_FEWEST = 6  # measurements that a trend needs to count against a rung
_FEWEST_STEADY = 4  # measurements from which on a steady growth is reported
_STEADY = 0.8  # of the pairs of measurements in which the later one is larger
_GROWN = 1.5  # growth from the first measurement to the last; less is noise
_NEAR = 2.0**8  # no trend is reported for values below 65504 by more than this factor


@dataclass(frozen=True)
class PeakTrend:
    """The largest magnitude of one kind of value by step.

    Attributes:
        samples: (step, largest finite magnitude), in order.
        overflowed: the first step in which an op made inf of finite values, as far as steps are measured; else None.
    """

    samples: tuple[tuple[int, float], ...] = ()
    overflowed: int | None = None

    @property
    def largest(self) -> float:
        """The largest of all; 0.0 if nothing was float16."""
        return max((peak for _, peak in self.samples), default=0.0)

    @property
    def reaches(self) -> int | None:
        """The step at which it exceeds 65504 if it keeps growing as in the second half; None if it does not grow.

        A straight line is fitted to log2 of the samples.
        """
        recent = self._recent(len(self.samples) // 2)
        if len(recent) < _FEWEST or recent[-1][1] < math.log2(FLOAT16.max / _NEAR):
            return None
        slope = _slope(recent)
        if slope * (recent[-1][0] - recent[0][0]) < math.log2(_GROWN):
            return None
        return _reached(recent, slope)

    @property
    def share(self) -> float:
        """The largest of all as a share of 65504."""
        return self.largest / FLOAT16.max

    @property
    def rises(self) -> bool:
        """Whether the last samples, half of all and at least 4, grow steadily, however slowly."""
        levels = [level for _, level in self._rising_part]
        pairs = list(combinations(levels, 2))
        larger = sum(later > earlier for earlier, later in pairs)
        return len(levels) >= _FEWEST_STEADY and larger >= _STEADY * len(pairs)

    @property
    def heads_for(self) -> int | None:
        """The step at which samples that rise exceed 65504 if they go on so; None if they do not rise.

        As `reaches`, but of few samples and of a slow growth too.
        """
        return _reached(self._rising_part, _slope(self._rising_part)) if self.rises else None

    @property
    def _rising_part(self) -> list[tuple[int, float]]:
        return self._recent(max(0, len(self.samples) - max(_FEWEST_STEADY, len(self.samples) // 2)))

    def _recent(self, start: int) -> list[tuple[int, float]]:
        """Return step and log2 of the samples from `start` on."""
        return [(step, math.log2(peak)) for step, peak in self.samples[start:] if peak > 0]

    def and_then(self, step: int, peak: float, *, overflows: bool) -> PeakTrend:
        """Return the trend with one more sample."""
        first = step if overflows and self.overflowed is None else self.overflowed
        return PeakTrend((*self.samples, (step, peak)), first)


def _slope(recent: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the straight line through the samples, by least squares."""
    mean_step = sum(step for step, _ in recent) / len(recent)
    mean = sum(level for _, level in recent) / len(recent)
    spread = sum((step - mean_step) ** 2 for step, _ in recent)
    return sum((step - mean_step) * (level - mean) for step, level in recent) / spread


def _reached(recent: Sequence[tuple[int, float]], slope: float) -> int:
    """Return the step at which a line through the last sample exceeds 65504."""
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
        (forward, forward_overflows), (backward, backward_overflows) = mode.peaks()
        self.activation = self.activation.and_then(step, forward, overflows=forward_overflows)
        self.gradient = self.gradient.and_then(step, backward, overflows=backward_overflows)


class _Peaks(DispatchMode):
    """Keeps the largest result of every float16 op, and whether it overflowed, for forward and for backward."""

    def __init__(self) -> None:
        super().__init__()
        self._found: tuple[list[Tensor], list[Tensor]] = ([], [])

    def peaks(self) -> tuple[tuple[float, bool], tuple[float, bool]]:
        """Return largest magnitude, 0.0 without float16, and whether one overflowed, of forward and of backward."""
        forward, backward = (torch.stack(found).amax(0).tolist() if found else (0.0, 0.0) for found in self._found)
        return (forward[0], bool(forward[1])), (backward[0], bool(backward[1]))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        usual = _all_usual(args)  # before an op in place writes
        result = run_op(func, args, kwargs)
        if writes_values(func) and _is_dense(result) and result.dtype == torch.float16 and result.numel():
            in_backward = torch._C._current_autograd_node() is not None
            size = stored_values(result.detach()).abs().float()
            # inf and 65504 itself are what masks are filled with
            largest = torch.where(size < FLOAT16.max, size, 0.0).amax()
            overflows = size.isinf().any() & usual.to(size.device) if usual is not None else torch.zeros_like(largest)
            self._found[in_backward].append(torch.stack((largest, overflows.float())))
        return result


def _all_usual(args: tuple[Any, ...]) -> Tensor | None:
    """Whether all arguments are finite and none is a mask's number; None without a tensor to compute with.

    Masks are filled with inf or the most negative number of a dtype, which in float16 is -inf too.
    """
    if not all(abs(each) < _MASK for each in args if isinstance(each, int | float)):
        return None
    tensors = [each for each in args if _is_dense(each) and each.is_floating_point() and each.numel()]
    for each in args:
        tensors += [one for one in each if _is_dense(one)] if isinstance(each, list | tuple) else []
    below = [(stored_values(each.detach()).abs() < _MASK).all() for each in tensors]
    return torch.stack(below).all() if below else None


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and has_values(value)


_MASK = 1e30
"""No activation is as large."""
