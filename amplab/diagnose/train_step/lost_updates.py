"""How much of an optimizer's step is lost because 16-bit weights round it away.

A weight w moves by an update u only where |u| is at least about half the gap between w and its neighbour: 2^-12 |w| in
half, 2^-9 |w| in bfloat16, at the least. Here the same step is taken twice, by the optimizer itself and by a copy of it
with float32 weights and state, and what each weight moved by is compared. The rule about it is in `rules.parameters`.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.formats import LOW_PRECISION_DTYPES

__all__ = ["LostUpdates", "ShadowStep"]


class LostUpdates(NamedTuple):
    """What became of one step of 16-bit weights.

    Args:
        optimizer: number of the optimizer.
        parameters: how many 16-bit parameters it stepped.
        updated: elements that the step moves in float32.
        unmoved: how many of them it leaves where they are in 16 bits.
        norm_share: norm of the updates so lost, divided by that of all of them, in [0, 1].
        dtype: of the weights.
    """

    optimizer: int
    parameters: int
    updated: int
    unmoved: int
    norm_share: float
    dtype: torch.dtype

    @property
    def share(self) -> float:
        """Share of the elements with an update that did not move."""
        return self.unmoved / max(self.updated, 1)


class ShadowStep:
    """A copy of an optimizer with float32 weights, from before its step, to take the same step beside it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [each for each in _params(optimizer) if each.grad is not None]
        self._before = [each.detach().clone() for each in self._params]
        self._shadow, shadows = _widened(optimizer)
        self._shadows = [
            shadow for shadow, own in zip(shadows, _params(optimizer), strict=True) if own.grad is not None
        ]

    @staticmethod
    def applies_to(optimizer: Optimizer) -> bool:
        """Whether it steps 16-bit weights, with finite gradients. Sync: one for each of them."""
        params = [each for each in _params(optimizer) if each.dtype in LOW_PRECISION_DTYPES and each.grad is not None]
        return bool(params) and all(each.grad.layout is torch.strided and _is_finite(each.grad) for each in params)

    @torch.no_grad()
    def compared(self, number: int) -> LostUpdates | None:
        """Take the step in float32 too, and say what the one in 16 bits has lost; None where nothing was to move."""
        with torch.enable_grad():
            self._shadow.step()
        updated = unmoved = 0
        squares, lost_squares, dtypes = 0.0, 0.0, []
        for own, before, shadow in zip(self._params, self._before, self._shadows, strict=True):
            if own.dtype in LOW_PRECISION_DTYPES:
                update = shadow.double() - before.double()
                lost = (update != 0) & (own == before)
                updated, unmoved = updated + int((update != 0).sum()), unmoved + int(lost.sum())
                squares += update.square().sum().item()
                lost_squares += update.masked_fill(~lost, 0).square().sum().item()
                dtypes.append(own.dtype)
        if not updated or not math.isfinite(squares):
            return None
        return LostUpdates(number, len(dtypes), updated, unmoved, math.sqrt(lost_squares / squares), dtypes[0])


def _widened(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor]]:
    """A copy without hooks, whose weights, gradients and 16-bit states are float32; and its weights, in order."""
    shadow = copy.deepcopy(optimizer)
    for own, mine in zip(_params(optimizer), _params(shadow), strict=True):
        mine.grad = None
        mine.data = _wide(mine.data)
        mine.grad = None if own.grad is None else _wide(own.grad.detach().clone())
    for state in shadow.state.values():
        state.update({name: _wide(value) for name, value in state.items()})
    return shadow, _params(shadow)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION_DTYPES else value


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(grad).all())
