"""How far two tensors lie apart that should be one: relative, in units of half's last place, as an angle.

    relative  ||b - a|| / ||a||                     0: equal;  inf: b is not finite where a is
    ulps      median |b - a| / ulp_half(a)          0.5: as near as half can write a
    cosine    a . b / (||a|| ||b||)                 1: the same direction

All in float64; where both are 0 they are equal.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amplab.formats import FLOAT16

__all__ = ["TwinError", "twin_error"]

_LOWEST = FLOAT16.min_exponent
_MANTISSA = FLOAT16.mantissa_bits


@dataclass(frozen=True)
class TwinError:
    """The distance of a tensor from its twin; see the module's table."""

    relative: float
    ulps: float
    cosine: float

    @property
    def is_finite(self) -> bool:
        """Whether both were finite."""
        return math.isfinite(self.relative)


def twin_error(left: Tensor, right: Tensor) -> TwinError:
    """Measure how far `right` lies from `left`, of the same shape and any floating dtypes. Sync: one.

    >>> twin_error(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.5]))
    TwinError(relative=0.5, ulps=0.0, cosine=1.0)
    """
    a, b = left.detach().double().flatten(), right.detach().double().flatten()  # (elements,)
    difference = b - a
    apart, size, other = (each.norm() for each in (difference, a, b))
    ulps = (difference.abs() / _ulp_of_half(a)).median() if len(a) else apart
    apart, size, other, product, ulps = torch.stack([apart, size, other, a @ b, ulps]).tolist()
    if not math.isfinite(size) or not math.isfinite(other):
        return TwinError(math.inf, math.inf, math.nan)
    if apart == 0:
        return TwinError(0.0, 0.0, 1.0)
    relative = apart / size if size else math.inf
    return TwinError(relative, ulps, product / (size * other) if size and other else 0.0)


def _ulp_of_half(x: Tensor) -> Tensor:
    exponent = torch.frexp(x).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent.clamp(min=_LOWEST) - _MANTISSA)
