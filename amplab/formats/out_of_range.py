"""The shares of a tensor that underflow and overflow in a format.

    underflow: x != 0 finite, and round(scale * x) == 0
    overflow:  x finite, and |scale * x| too large to round to the largest number;
               it becomes infinity, or is clipped if the format has no infinity

Both are shares of the finite non-zero elements. `exponents` counts elements by power of two, from which
approximate shares follow for every scale at once.
"""

import math

import torch
from torch import Tensor

from amplab.formats.float_format import FloatFormat

__all__ = ["overflow_fraction", "underflow_fraction"]


def underflow_fraction(tensor: Tensor, fmt: FloatFormat, *, scale: float = 1.0) -> float:
    """Return the share of finite non-zero elements that round to zero after scaling.

    >>> from amplab.formats import FLOAT16
    >>> underflow_fraction(torch.tensor([0.0, 1.0, 1e-8, -1e-9]), FLOAT16)
    0.6666666666666666
    >>> underflow_fraction(torch.tensor([0.0, 1.0, 1e-8, -1e-9]), FLOAT16, scale=2.0**16)
    0.0

    Args:
        tensor: any floating dtype, any shape.
        fmt: the format to round to.
        scale: the factor to multiply the elements by first, finite and > 0 (a loss scale).

    Returns:
        A share in [0, 1]; 0.0 if there is no finite non-zero element.

    Raises:
        TypeError: if the tensor is not floating-point.
        ValueError: if the scale is not finite and positive.

    Sync: one
    """
    magnitudes = _magnitudes(tensor)
    # The tie at half of the smallest subnormal rounds to zero, which is even.
    flushed = magnitudes * _checked_scale(scale) <= fmt.smallest_subnormal / 2
    return _share(flushed & (magnitudes > 0), magnitudes)


def overflow_fraction(tensor: Tensor, fmt: FloatFormat, *, scale: float = 1.0) -> float:
    """Return the share of finite non-zero elements that overflow after scaling.

    >>> from amplab.formats import FLOAT16
    >>> overflow_fraction(torch.tensor([1.0, 65519.0, 65520.0, 1e9]), FLOAT16)
    0.5

    Args, Returns, Raises and Sync are the same as for `underflow_fraction`.
    """
    magnitudes = _magnitudes(tensor)
    scaled = magnitudes * _checked_scale(scale)
    tie = fmt.max + fmt.ulp(fmt.max) / 2
    # In a format with infinity the largest mantissa is all ones, which is odd, so the tie rounds to infinity.
    # Without infinity that pattern is NaN; the largest number is even, so the tie rounds to it.
    overflowed = scaled >= tie if fmt.has_infinity else scaled > tie
    return _share(overflowed & (magnitudes < math.inf), magnitudes)


def _magnitudes(tensor: Tensor) -> Tensor:
    """Return |x| in float64, where scaling neither overflows nor underflows for usual scales."""
    if not tensor.is_floating_point():
        raise TypeError(
            f"tensor of {tensor.dtype}: expected a floating-point tensor; integers neither underflow nor overflow here."
        )
    return tensor.detach().double().abs()


def _checked_scale(scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale={scale}: expected a finite number > 0; a loss scale is usually a power of two such as 2.0**16."
        )
    return scale


def _share(chosen: Tensor, magnitudes: Tensor) -> float:
    """Return chosen / finite non-zero elements; reads both counts in one transfer."""
    finite_nonzero = (magnitudes > 0) & (magnitudes < math.inf)
    counts = torch.stack([chosen.count_nonzero(), finite_nonzero.count_nonzero()])
    part, whole = counts.tolist()
    return part / whole if whole else 0.0
