"""How much an average of the weights loses because it is kept in 16 bits.

An exponential moving average changes by (1 - decay) (w - average) in each step. In float16 that is 0 once it is smaller
than half the gap to the next number, 2^-12 |average| or more, so the average stops following the weights.

Every op that writes in place to a 16-bit tensor with the shape of a parameter runs a second time on a float64 copy of
it; at the end both are compared. A plain copy of the weights loses nothing by this measure: it is their rounding. The
rule that uses this is in `rules.updates`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.formats import LOW_PRECISION_DTYPES

__all__ = ["LostAverage", "WeightAverages"]

_ALIKE = 0.5  # relative distance up to which a tensor is an average of the weights, and not a gradient or a momentum


class LostAverage(NamedTuple):
    """What a 16-bit average of the weights loses in one step.

    Args:
        name: the name of the parameter that it averages.
        dtype: the dtype of the average.
        updated: number of elements that differ from the rounded weight and that the step changes in float64.
        unmoved: how many of them it does not change in 16 bits.
        elements: number of all elements.
    """

    name: str
    dtype: torch.dtype
    updated: int
    unmoved: int
    elements: int


class _Average(NamedTuple):
    tensor: Tensor
    before: Tensor
    exact: Tensor  # float64


class WeightAverages:
    """Follows the 16-bit tensors with the shapes of a model's parameters that a step writes to in place."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = dict(model.named_parameters())
        self._shapes = {parameter.shape for parameter in self._parameters.values()}
        own = [*model.parameters(), *model.buffers()]
        own += [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        own += [
            each
            for optimizer in optimizers
            for state in optimizer.state.values()
            for each in state.values()
            if isinstance(each, Tensor)
        ]
        self._own = {each.data_ptr() for each in own if each.layout is torch.strided}
        self._followed: dict[int, _Average] = {}

    def before(self, func: Any, written: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Apply an op that is about to run to float64 copies of its 16-bit arguments, and to copies of what it writes.

        Sync: none.
        """
        candidates = [each for each in written if self._may_be_average(each)]
        if not candidates:
            return
        # Run twice, it would advance the generator twice; and what an op of others does besides is not known.
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            self._forget(candidates)
            return
        for each in candidates:
            if each.data_ptr() not in self._followed:
                before = each.detach().clone()
                self._followed[each.data_ptr()] = _Average(each, before, before.double())
        try:
            func(*self._exact(args), **{name: self._exact(value) for name, value in kwargs.items()})
        except Exception:  # noqa: BLE001  an op without float64: nothing is known of what it writes
            self._forget(candidates)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        for each in tensors:
            self._followed.pop(each.data_ptr(), None)

    @torch.no_grad()
    def lost(self) -> Iterator[LostAverage]:
        """Yield what each average lost. Sync: a few for each of them."""
        for average in self._followed.values():
            with contextlib.suppress(RuntimeError):
                near = self._nearest(average.tensor)
                if near is not None:
                    yield self._compared(average, *near)

    def _may_be_average(self, tensor: Tensor) -> bool:
        fits = tensor.dtype in LOW_PRECISION_DTYPES and tensor.shape in self._shapes
        return fits and tensor.layout is torch.strided and tensor.data_ptr() not in self._own

    def _exact(self, value: Any) -> Any:
        """An argument of an op with its 16-bit tensors in float64; no tensor is that of the program."""
        if isinstance(value, list | tuple):
            return type(value)(self._exact(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        known = self._followed.get(value.data_ptr())
        if known is not None and known.tensor.shape == value.shape:
            return known.exact
        return value.detach().to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)

    def _nearest(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The parameter of the same shape that is nearest to a tensor, if it is near."""
        alike = [(name, each) for name, each in self._parameters.items() if each.shape == tensor.shape]
        distances = {name: _distance(tensor, each) for name, each in alike}
        name = min(distances, key=distances.__getitem__)
        return (name, self._parameters[name]) if distances[name] < _ALIKE else None

    def _compared(self, average: _Average, name: str, weight: Tensor) -> LostAverage:
        differs = average.tensor != weight.detach().to(average.tensor.dtype)
        updated = differs & (average.exact != average.before.double())
        unmoved = updated & (average.tensor == average.before)
        counts = int(updated.sum()), int(unmoved.sum())
        return LostAverage(name, average.tensor.dtype, *counts, average.tensor.numel())


def _distance(tensor: Tensor, weight: Tensor) -> float:
    size = weight.detach().double().norm().item()
    distance = (tensor.double() - weight.detach().double()).norm().item()
    return distance / size if size and math.isfinite(distance) else math.inf
