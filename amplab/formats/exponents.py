"""The number of elements of a tensor in each binade: the histogram of floor(log2|x|).

A loss scale of 2^k shifts the histogram by k bins and changes nothing else. One pass over the gradients is therefore
enough to compute, for every scale, which share a format would flush to zero and which share would overflow.
`out_of_range` computes the exact shares at one scale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from amplab.formats.float_format import FloatFormat

__all__ = ["BINS", "HIGHEST_EXPONENT", "LOWEST_EXPONENT", "ExponentHistogram", "exponent_histogram"]

LOWEST_EXPONENT = -149  # float32's smallest subnormal
HIGHEST_EXPONENT = 127  # float32's largest binade
BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Counts of finite non-zero elements per power of two, and counts of zeros, infs and nans.

    Attributes:
        counts: int64 array ``(bins,)``, made read-only; ``counts[i]`` elements have
            2^(low+i) <= |x| < 2^(low+i+1).
        low: exponent of the first bin.
        zeros, infs, nans: number of elements of each kind, which are in no bin.
        total: number of elements: ``counts.sum() + zeros + infs + nans``.
    """

    counts: np.ndarray
    low: int
    zeros: int
    infs: int
    nans: int
    total: int

    def __post_init__(self) -> None:
        """Make the counts read-only; the other fields are immutable."""
        self.counts.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        """Compare all fields; the default would compare arrays elementwise."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        """Return a hash consistent with equality."""
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[bytes, int, int, int, int, int]:
        return (self.counts.tobytes(), self.low, self.zeros, self.infs, self.nans, self.total)

    @property
    def exponents(self) -> np.ndarray:
        """The exponent of each bin, int64 ``(bins,)``: low, low + 1, …"""
        return np.arange(self.low, self.low + len(self.counts))

    @property
    def finite_nonzero(self) -> int:
        """Number of elements in a bin."""
        return int(self.counts.sum())

    def shifted(self, log2_scale: float) -> "ExponentHistogram":
        """Return the histogram of the same elements times 2^log2_scale.

        Bins are whole powers of two, so `log2_scale` is rounded to the nearest integer.

        >>> exponent_histogram(torch.tensor([0.75])).shifted(16).span
        (15, 15)
        """
        if not math.isfinite(log2_scale):
            raise ValueError(
                f"log2_scale={log2_scale}: expected a finite number; "
                "pass the logarithm of a positive scale, such as math.log2(scale)."
            )
        return replace(self, low=self.low + round(log2_scale))

    def underflow_fraction(self, fmt: FloatFormat) -> float:
        """Return the share of finite non-zero elements below half of `fmt`'s smallest number.

        Exact except for elements equal to that half: they round to zero but are not counted.
        """
        lowest_kept = round(math.log2(fmt.smallest_subnormal)) - 1
        return self._share(self.exponents < lowest_kept)

    def overflow_fraction(self, fmt: FloatFormat) -> float:
        """Return the share of finite non-zero elements in the binades above `fmt`'s largest number.

        Elements in the binade of the largest number are not counted. `amplab.formats.overflow_fraction` returns the
        exact share, which includes part of that binade (from 65520 in float16).
        """
        return self._share(self.exponents > fmt.max_exponent)

    def _share(self, chosen: np.ndarray) -> float:
        return int(self.counts[chosen].sum()) / max(self.finite_nonzero, 1)

    def lost_share(self, loss_scale: float, fmt: FloatFormat) -> float | None:
        """Return the share of finite non-zero elements that `fmt` turns into zero when scaled by `loss_scale`.

        Returns None if the scale is not finite and positive.

        >>> from amplab.formats import FLOAT16
        >>> exponent_histogram(torch.tensor([2.0**-30, 1.0])).lost_share(1.0, FLOAT16)
        0.5
        """
        usable = 0.0 < loss_scale < math.inf
        return self.shifted(math.log2(loss_scale)).underflow_fraction(fmt) if usable else None

    @property
    def span(self) -> tuple[int, int] | None:
        """Lowest and highest exponent that occur, or None if no element is in a bin."""
        occupied = self.exponents[self.counts > 0]
        return (int(occupied[0]), int(occupied[-1])) if len(occupied) else None

    @property
    def largest_exponent(self) -> float:
        """floor(log2) of the largest element: inf if an element is not finite, -inf if all are zero."""
        if self.infs or self.nans:
            return math.inf
        return -math.inf if self.span is None else float(self.span[1])

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        """Return the sum of two histograms, which may have different bins."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        low = min(self.low, other.low)
        high = max(self.low + len(self.counts), other.low + len(other.counts))
        counts = np.zeros(high - low, dtype=np.int64)
        for part in (self, other):
            start = part.low - low
            counts[start : start + len(part.counts)] += part.counts
        return ExponentHistogram(
            counts=counts,
            low=low,
            zeros=self.zeros + other.zeros,
            infs=self.infs + other.infs,
            nans=self.nans + other.nans,
            total=self.total + other.total,
        )


def exponent_histogram(tensors: Tensor | Iterable[Tensor]) -> ExponentHistogram:
    """Count the elements of one tensor, or of several together, by power of two.

    The bins run from 2^-149 to 2^127, the range of float32; float64 elements outside of it are counted in the
    nearest bin. Takes one pass of integer arithmetic: a few milliseconds for a million elements on one CPU core.

    >>> histogram = exponent_histogram(torch.tensor([0.0, 1.0, 1.5, -2.0, float("inf")]))
    >>> histogram.span, histogram.zeros, histogram.infs, histogram.total
    ((0, 1), 1, 1, 5)

    Args:
        tensors: floating-point, dense, any shapes.

    Raises:
        TypeError: if a tensor is not floating-point, or is sparse.

    Sync: one per tensor
    """
    if isinstance(tensors, Tensor):
        tensors = (tensors,)
    histogram = ExponentHistogram(np.zeros(BINS, np.int64), LOWEST_EXPONENT, 0, 0, 0, 0)
    for tensor in tensors:
        histogram = histogram + _histogram_of(tensor)
    return histogram


def _histogram_of(tensor: Tensor) -> ExponentHistogram:
    values = _dense_values(tensor)
    fields = _exponent_fields(values)
    by_field = torch.bincount(fields, minlength=256).cpu().numpy()
    counts = np.zeros(BINS, dtype=np.int64)
    first_normal = -126 - LOWEST_EXPONENT
    counts[first_normal:] = by_field[1:255]
    zeros = values.numel() - int(torch.count_nonzero(values))
    if by_field[0] > zeros:
        counts += _subnormal_counts(values[(fields == 0) & (values != 0)])
    nans = int(torch.count_nonzero(values.isnan())) if by_field[255] else 0
    return ExponentHistogram(
        counts=counts,
        low=LOWEST_EXPONENT,
        zeros=zeros,
        infs=int(by_field[255]) - nans,
        nans=nans,
        total=values.numel(),
    )


def _dense_values(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension, as float32 or, if they are float64, as float64."""
    if not tensor.is_floating_point():
        raise TypeError(
            f"exponent_histogram({tensor.dtype}): expected a floating-point tensor; "
            "convert it with tensor.float() first."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"exponent_histogram({tensor.layout}): expected a dense tensor; "
            "pass tensor.coalesce().values() to count the stored elements."
        )
    values = tensor.detach().resolve_neg().reshape(-1)  # (elements,); a negated view has other bits
    return values if values.dtype is torch.float64 else values.float()


def _exponent_fields(values: Tensor) -> Tensor:
    """Return the float32 exponent field (0: zero or subnormal, 255: inf or nan) of each element, int32."""
    if values.dtype is torch.float32:
        return (values.view(torch.int32) >> 23) & 0xFF
    fields = ((values.view(torch.int64) >> 52) & 0x7FF).int()
    finite = (fields - 1023 + 127).clamp_(0, 254)
    return torch.where(fields == 0x7FF, 255, finite)


def _subnormal_counts(values: Tensor) -> np.ndarray:
    """Return counts ``(BINS,)`` of elements below 2^-126, whose exponent is not in the exponent field."""
    exponents = torch.frexp(values.double()).exponent - 1
    bins = exponents.clamp_(min=LOWEST_EXPONENT) - LOWEST_EXPONENT
    return torch.bincount(bins, minlength=BINS).cpu().numpy()
