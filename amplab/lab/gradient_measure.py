"""Measure the unscaled gradients that the optimizers of a watched loop are about to use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.formats import ExponentHistogram, exponent_histogram

__all__ = ["GradientMeasure"]


class GradientMeasure:
    """Measures the gradients just before the optimizers use them, and keeps the last result until `forget`.

    Attributes:
        histogram: exponents of all unscaled gradients; None while nothing is measured.
        norm: their L2 norm; None while nothing is measured.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        """Drop the last result."""
        self.histogram: ExponentHistogram | None = None
        self.norm: float | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Measure the gradients that the optimizers hold now. Sync: a few."""
        scale, grads = 1.0, []
        for optimizer in self._optimizers:
            # During a step, torch and amplab set the scale on an optimizer that unscales by itself.
            own_scale = vars(optimizer).get("grad_scale")
            scale = scale if own_scale is None else float(own_scale)
            grads += [_dense(weight.grad) for weight in _stepped(optimizer) if weight.grad is not None]
        if not grads:
            return
        histogram = exponent_histogram(grads)
        usable = 0.0 < scale < math.inf and scale != 1.0
        self.histogram = histogram.shifted(-math.log2(scale)) if usable else histogram
        self.norm = torch.stack([grad.float().norm() for grad in grads]).norm().item() / scale

    @property
    def is_finite(self) -> bool | None:
        """Whether every gradient is finite, None while nothing is measured."""
        return None if self.histogram is None else not (self.histogram.infs or self.histogram.nans)

    @property
    def largest_exponent(self) -> float | None:
        """floor(log2) of the largest gradient, -inf if all are zero, None while nothing is measured."""
        return None if self.histogram is None else self.histogram.largest_exponent


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _dense(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: the values of a sparse one, the parts of a complex one."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values
