"""How much of an optimizer's step is lost because 16-bit weights round it away.

An update u changes a weight w only if |u| is at least about half the gap between w and the next number: 2^-12 |w| in
float16, 2^-9 |w| in bfloat16, or more. The same step is taken twice, by the optimizer and by a copy of it with float32
weights and state, and the changes of each weight are compared. The rule that uses this is in `rules.updates`.

Only for the optimizers of torch and amplab: the step of another class, and a hook on all optimizers, may draw random
numbers, talk to other ranks or count, which must not happen twice.
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


_KNOWN = ("torch.optim.", "amplab.optimizers.")


class LostUpdates(NamedTuple):
    """How many updates of 16-bit weights one step lost.

    Args:
        optimizer: number of the optimizer.
        parameters: how many 16-bit parameters it stepped.
        updated: number of elements that the step changes in float32.
        unmoved: how many of them it does not change in 16 bits.
        norm_share: norm of the lost updates divided by the norm of all updates, in [0, 1].
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
        """Share of the updated elements that did not change."""
        return self.unmoved / max(self.updated, 1)


class ShadowStep:
    """A copy of an optimizer with float32 weights, made before its step, that takes the same step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [each for each in _params(optimizer) if each.grad is not None]
        self._before = [each.detach().clone() for each in self._params]
        self._shadow, shadows = _widened(optimizer)
        self._shadows = [
            shadow for shadow, own in zip(shadows, _params(optimizer), strict=True) if own.grad is not None
        ]

    @staticmethod
    def applies_to(optimizer: Optimizer) -> bool:
        """Whether it is torch's or amplab's, and updates 16-bit weights with finite gradients. Sync: one per weight."""
        if not type(optimizer).__module__.startswith(_KNOWN):
            return False
        low = (each for each in _params(optimizer) if each.dtype in LOW_PRECISION_DTYPES)
        grads = [each.grad for each in low if each.grad is not None]
        return bool(grads) and all(grad.layout is torch.strided and _is_finite(grad) for grad in grads)

    @torch.no_grad()
    def compared(self, number: int) -> LostUpdates | None:
        """Take the step in float32 too, and return what the 16-bit step lost; None if there was no update."""
        step = type(self._shadow).step  # not that of the instance, which a scheduler has replaced
        if hasattr(step, "hooked"):  # around it are the hooks on all optimizers
            step = getattr(step, "__wrapped__", step)
        with torch.enable_grad():
            step(self._shadow)
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
    """A copy without hooks with float32 weights, gradients and states; and its weights, in order."""
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
