"""What a watch reads off the optimizers of a loop: their unscaled gradients, and which of them never step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.diagnose import Finding
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.parameters import model_parameters
from amplab.diagnose.rules.updates import never_stepped
from amplab.formats import ExponentHistogram, exponent_histogram

__all__ = ["GradientMeasure", "IdleOptimizers"]

ENOUGH_STEPS = 5
"""Steps of another optimizer without one of this, from which on this one counts as idle: the critic of a GAN may take a
few steps for each of its generator."""


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


class IdleOptimizers:
    """Counts the steps of several optimizers, since the steps of a run are those of the first only."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps = [0] * len(optimizers)

    def follow(self) -> Callable[[], None]:
        """Start counting, if there are several optimizers; return a function that ends it."""
        if len(self._optimizers) == 1:
            return lambda: None
        ends = [
            each.register_step_pre_hook(self._counter(number)).remove for number, each in enumerate(self._optimizers)
        ]

        def end() -> None:
            for each in ends:
                each()

        return end

    def findings(self, model: nn.Module, scaling: str, steps: int) -> Iterator[Finding]:
        """Yield a finding for each optimizer without a step whose parameters hold a finite gradient.

        Sync: one for each optimizer without a step.

        Args:
            model: the model whose parameters they update.
            scaling: what scales the loss, as `Observation.scaling`.
            steps: number of steps of the run, which are those of the first optimizer, skipped ones included.
        """
        counts = [max(self._steps[0], steps), *self._steps[1:]]
        for number, optimizer in enumerate(self._optimizers):
            if counts[number] == 0 and max(counts) > ENOUGH_STEPS:
                names = _with_gradient(model, optimizer)
                if names:
                    seen = {"parameters": len(names), "steps_of_others": max(counts)}
                    yield never_stepped(number, names, Api(ApiStyle(scaling)), {**seen})

    def _counter(self, number: int) -> Callable[..., None]:
        def count(*_: object) -> None:
            self._steps[number] += 1

        return count


def _with_gradient(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters with a finite gradient that is not zero."""
    own = {id(each) for each in model_parameters(optimizer)}
    masters = dict(zip(map(id, model_parameters(optimizer)), _stepped(optimizer), strict=True))
    held = [(name, each) for name, each in model.named_parameters() if id(each) in own]
    grads = [(name, each.grad if each.grad is not None else masters[id(each)].grad) for name, each in held]
    return [name for name, grad in grads if grad is not None and 0 < _norm(grad) < float("inf")]


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _norm(grad: Tensor) -> float:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return float(torch.linalg.vector_norm(values.float()).item())


def _dense(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: the values of a sparse one, the parts of a complex one."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values
