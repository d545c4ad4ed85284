"""The gradients of one step, just before the optimizer uses them: their exponents and their norm, unscaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.formats import ExponentHistogram, exponent_histogram

__all__ = ["GradientMeasure"]


class GradientMeasure:
    """Measures when told to, and keeps the last measure until it is forgotten.

    Attributes:
        histogram: exponents of all gradients; None while nothing is measured.
        norm: their L2 norm.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        """Have measured nothing."""
        self.histogram: ExponentHistogram | None = None
        self.norm: float | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Measure the gradients that the optimizers hold now. Sync: a few."""
        scale, grads = 1.0, []
        for optimizer in self._optimizers:
            # torch and amplab lend the scale to an optimizer that unscales by itself, for the length of its step.
            lent = vars(optimizer).get("grad_scale")
            scale = scale if lent is None else float(lent)
            held = (weight.grad for group in optimizer.param_groups for weight in group["params"])
            grads += [_dense(grad) for grad in held if grad is not None]
        if not grads:
            return
        histogram = exponent_histogram(grads)
        usable = 0.0 < scale < math.inf and scale != 1.0
        self.histogram = histogram.shifted(-math.log2(scale)) if usable else histogram
        self.norm = torch.stack([grad.float().norm() for grad in grads]).norm().item() / scale

    @property
    def is_finite(self) -> bool | None:
        """Whether every gradient is, None where nothing is measured."""
        return None if self.histogram is None else not (self.histogram.infs or self.histogram.nans)

    @property
    def largest_exponent(self) -> float | None:
        """floor(log2) of the largest gradient, -inf where all are zero, None where nothing is measured."""
        return None if self.histogram is None else self.histogram.largest_exponent


def _dense(grad: Tensor) -> Tensor:
    """The numbers of a gradient: what a sparse one holds, the parts of a complex one."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values
