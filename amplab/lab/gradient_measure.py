"""Measure the unscaled gradients that the optimizers of a watched loop are about to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add

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


class GradientMeasure:
    """Measures the gradients just before the optimizers use them, and keeps the last result until `forget`.

    `take` counts the exponents of all elements and takes tens of times as long as `take_largest`, which is cheap
    enough for every step.

    Args:
        optimizers: those of the loop.
        names: returns the name of each parameter that they step, by its id, in the model's order.

    Attributes:
        histogram: exponents of all unscaled gradients; None until `take`.
        layers: name and exponents of the gradient of each of the `LAYERS` largest parameters; empty until `take`.
        norm: their L2 norm; None until `take`, and of sharded gradients, of which this rank measures its shards.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Callable[[], Mapping[int, str]] = dict) -> None:
        self._optimizers, self._names = optimizers, names
        self.forget()

    def forget(self) -> None:
        """Drop the last result."""
        self.histogram: ExponentHistogram | None = None
        self.layers: tuple[tuple[str, ExponentHistogram], ...] = ()
        self.norm: float | None = None
        self._largest: Tensor | None = None
        self._scale = 1.0

    @torch.no_grad()
    def take(self) -> None:
        """Measure the gradients that the optimizers hold now. Sync: a few."""
        self.forget()
        measured = self._measured()
        if not measured:
            return
        usable = 0.0 < self._scale < math.inf and self._scale != 1.0
        shift = -math.log2(self._scale) if usable else 0.0
        counted = {id(weight): exponent_histogram(grad).shifted(shift) for weight, grad in measured}
        self.histogram = reduce(add, counted.values())
        self.layers = self._largest_layers(counted)
        if not any(is_sharded(weight) for weight, _ in measured):  # a norm over shards would need the other ranks
            self.norm = torch.stack([grad.float().norm() for _, grad in measured]).norm().item() / self._scale

    def _largest_layers(self, counted: Mapping[int, ExponentHistogram]) -> tuple[tuple[str, ExponentHistogram], ...]:
        names = self._names()
        known = [key for key in names if key in counted]
        kept = set(sorted(known, key=lambda key: -counted[key].total)[:LAYERS])
        return tuple((names[key], counted[key]) for key in known if key in kept)

    @torch.no_grad()
    def take_largest(self) -> None:
        """Measure only the largest gradient that the optimizers hold now. Sync: none; one when it is read."""
        self.forget()
        grads = [grad for grad in self._gradients() if grad.numel()]
        if grads and grads[0].is_cpu:
            ends = [end.float() for grad in grads for end in torch.aminmax(grad)]  # 18 x as fast as the inf norm
            self._largest = torch.stack(ends).abs().amax()
        elif grads:
            norms = torch._foreach_norm(grads, math.inf)
            self._largest = torch.stack([norm.float().to(norms[0].device) for norm in norms]).amax()

    def _gradients(self) -> list[Tensor]:
        return [grad for _, grad in self._measured()]

    def _measured(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters with their gradients; `_scale` is what those of the last optimizer are still multiplied by."""
        self._scale, grads = 1.0, []
        for optimizer in self._optimizers:
            # During a step, torch and amplab set the scale on an optimizer that unscales by itself.
            own_scale = vars(optimizer).get("grad_scale")
            self._scale = self._scale if own_scale is None else float(own_scale)
            grads += [(weight, _dense(weight.grad)) for weight in params_of(optimizer) if weight.grad is not None]
        return grads

    @property
    def is_finite(self) -> bool | None:
        """Whether every gradient is finite, None while nothing is measured. Sync: as `largest_exponent`."""
        if self.histogram is not None:
            return not (self.histogram.infs or self.histogram.nans)
        return None if self._largest is None else math.isfinite(self._largest.item())

    @property
    def largest_exponent(self) -> float | None:
        """floor(log2) of the largest gradient, -inf if all are zero, inf if one is not finite; None if not measured.

        Sync: one after `take_largest` if the gradients are on a device.
        """
        if self.histogram is not None:
            return self.histogram.largest_exponent
        if self._largest is None:
            return None
        largest = self._largest.item() / self._scale
        if not math.isfinite(largest):
            return math.inf
        return math.frexp(largest)[1] - 1.0 if largest else -math.inf


def _dense(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: the shard here, the values of a sparse one, the parts of a complex one."""
    values = stored_values(local_shard(grad))
    return torch.view_as_real(values) if values.is_complex() else values
