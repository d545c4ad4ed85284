"""Measure the unscaled gradients that the optimizers of a watched loop are about to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.backward.optimizer_params import params_of
from amplab.formats import ExponentHistogram, exponent_histogram
from amplab.formats.stored_values import stored_values
from amplab.scalers.unscaler import is_sharded, local_shard

__all__ = ["GradientMeasure"]

LAYERS = 64
"""Parameters whose exponents are kept one by one, those with the most elements: a run has thousands of measures."""


class _Measured(NamedTuple):
    """A parameter, the numbers of its gradient, and what they are still multiplied by."""

    weight: Tensor
    grad: Tensor
    scale: float


class GradientMeasure:
    """Measures the gradients just before the optimizers use them, and keeps the last result until `forget`.

    `take` counts the exponents of all elements and takes tens of times as long as `take_largest`, which is cheap
    enough for every step.

    Args:
        optimizers: those of the loop.
        left_scale: returns what the gradients of an optimizer are still multiplied by.
        names: returns the name of each parameter that they step, by its id, in the model's order.

    Attributes:
        histogram: exponents of all unscaled gradients; None until `take`.
        layers: name and exponents of the gradient of each of the `LAYERS` largest parameters; empty until `take`.
        norm: their L2 norm; None until `take`, and of sharded gradients, of which this rank measures its shards.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        left_scale: Callable[[Optimizer], float],
        names: Callable[[], Mapping[int, str]],
    ) -> None:
        self._optimizers, self._left_scale, self._names = optimizers, left_scale, names
        self.forget()

    def forget(self) -> None:
        """Drop the last result."""
        self.histogram: ExponentHistogram | None = None
        self.layers: tuple[tuple[str, ExponentHistogram], ...] = ()
        self.norm: float | None = None
        self._largest: Tensor | None = None  # of the gradients of each scale
        self._scales: list[float] = []

    @torch.no_grad()
    def take(self) -> None:
        """Measure the gradients that the optimizers hold now. Sync: a few."""
        self.forget()
        measured = self._measured()
        if not measured:
            return
        counted = {id(each.weight): _histogram(each) for each in measured}
        self.histogram = reduce(add, counted.values())
        self.layers = self._largest_layers(counted)
        if not any(is_sharded(each.weight) for each in measured):  # a norm over shards would need the other ranks
            norms = [each.grad.float().norm() / each.scale for each in measured]
            self.norm = torch.stack(norms).norm().item()

    def _largest_layers(self, counted: Mapping[int, ExponentHistogram]) -> tuple[tuple[str, ExponentHistogram], ...]:
        names = self._names()
        known = [key for key in names if key in counted]
        kept = set(sorted(known, key=lambda key: -counted[key].total)[:LAYERS])
        return tuple((names[key], counted[key]) for key in known if key in kept)

    @torch.no_grad()
    def take_largest(self) -> None:
        """Measure only the largest gradient that the optimizers hold now.

        Sync: none without a scale that is left, see `LeftScales.of`; one when it is read.
        """
        self.forget()
        by_scale: dict[float, list[Tensor]] = {}
        for each in self._measured():
            if each.grad.numel():
                by_scale.setdefault(each.scale, []).append(each.grad)
        if by_scale:
            largest = [_largest(grads) for grads in by_scale.values()]
            self._largest = torch.stack([each.to(largest[0].device) for each in largest])
            self._scales = [*by_scale]

    def _measured(self) -> list[_Measured]:
        """Return each parameter that has a gradient once: the first of several optimizers unscales for all."""
        found: dict[int, _Measured] = {}
        for optimizer in self._optimizers:
            scale = self._left_scale(optimizer)
            scale = scale if 0.0 < scale < math.inf else 1.0
            for weight in params_of(optimizer):
                if weight.grad is not None and id(weight) not in found:
                    found[id(weight)] = _Measured(weight, _dense(weight.grad), scale)
        return [*found.values()]

    @property
    def is_finite(self) -> bool | None:
        """Whether every gradient is finite, None while nothing is measured. Sync: as `largest_exponent`."""
        if self.histogram is not None:
            return not (self.histogram.infs or self.histogram.nans)
        return None if self._largest is None else all(map(math.isfinite, self._largest.tolist()))

    @property
    def largest_exponent(self) -> float | None:
        """floor(log2) of the largest gradient, -inf if all are zero, inf if one is not finite; None if not measured.

        Sync: one after `take_largest` if the gradients are on a device.
        """
        if self.histogram is not None:
            return self.histogram.largest_exponent
        if self._largest is None:
            return None
        each = self._largest.tolist()
        if not all(map(math.isfinite, each)):
            return math.inf
        largest = max(value / scale for value, scale in zip(each, self._scales, strict=True))
        return math.frexp(largest)[1] - 1.0 if largest else -math.inf


def _histogram(measured: _Measured) -> ExponentHistogram:
    return exponent_histogram(measured.grad).shifted(-math.log2(measured.scale))


def _largest(grads: list[Tensor]) -> Tensor:
    """`()` float32: the largest magnitude; not finite if an element is not. Sync: none."""
    if grads[0].is_cpu:
        ends = [end.float() for grad in grads for end in torch.aminmax(grad)]  # 18 x as fast as the inf norm
        return torch.stack(ends).abs().amax()
    norms = torch._foreach_norm(grads, math.inf)
    return torch.stack([norm.float().to(norms[0].device) for norm in norms]).amax()


def _dense(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: the shard here, the values of a sparse one, the parts of a complex one."""
    values = stored_values(local_shard(grad))
    return torch.view_as_real(values) if values.is_complex() else values
