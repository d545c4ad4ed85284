"""How large the elements of a tensor are: `Statistics`, measured without waiting, read all at once.

`extremes` is one pass (smallest, largest; NaN shows in both), `statistics` counts too. Both leave their figures on the
tensor's device; `read` brings those of many tensors to the host together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HALF_MAX", "HALF_VANISHES", "MEASURED", "Statistics", "extremes", "read", "statistics"]

MEASURED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128))
"""The dtypes that are measured; complex numbers by their real and imaginary parts."""

HALF_MAX = torch.finfo(torch.float16).max
HALF_VANISHES = 2.0**-25
"""The largest magnitude that rounds to zero in half: half of its smallest subnormal, a tie that goes to even."""

_COUNTED = ("zeros", "infs", "nans")


@dataclass(frozen=True)
class Statistics:
    """Figures of one tensor.

    Args:
        dtype: its dtype.
        numel: its number of elements.
        lowest: the smallest element; NaN where one is NaN.
        highest: the largest element; NaN where one is NaN.
        absmax: the largest finite magnitude; where inf and NaN were not counted, the largest magnitude.
        smallest: the smallest non-zero finite magnitude, inf where there is none; None where it was not measured.
        zeros: how many elements are zero; None where it was not counted. infs, nans: the same of these.
    """

    dtype: torch.dtype
    numel: int
    lowest: float
    highest: float
    absmax: float
    smallest: float | None = None
    zeros: int | None = None
    infs: int | None = None
    nans: int | None = None

    @property
    def is_finite(self) -> bool:
        """Whether no element is inf or NaN."""
        return math.isfinite(self.lowest) and math.isfinite(self.highest)

    @property
    def has_nan(self) -> bool:
        """Whether an element is NaN."""
        return math.isnan(self.lowest) or math.isnan(self.highest)

    @property
    def is_half(self) -> bool:
        """Whether it is float16."""
        return self.dtype == torch.float16

    def __str__(self) -> str:
        counted = (f"{count:,} {name}" for name in _COUNTED if (count := getattr(self, name)))
        spread = "" if self.is_finite and not self.absmax else f"|x| up to {self.absmax:.4g}"
        parts = (f"{str(self.dtype).removeprefix('torch.')}, {self.numel:,} elements", spread, *counted)
        return ", ".join(filter(None, parts))


def extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the smallest and the largest element on the tensor's device, NaN where one is. Sync: none."""
    return torch.aminmax(_real(tensor))


def statistics(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return lowest, highest, absmax, smallest non-zero magnitude, zeros, infs, nans, on the device. Sync: none."""
    tensor = _real(tensor)
    magnitudes = tensor.abs()
    nans, infs, zeros = torch.isnan(tensor), torch.isinf(tensor), tensor == 0
    finite = magnitudes.masked_fill(nans | infs, 0)
    nonzero = finite.masked_fill(finite == 0, math.inf)
    return (*torch.aminmax(tensor), finite.amax(), nonzero.amin(), zeros.sum(), infs.sum(), nans.sum())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def read(measured: Sequence[tuple[Tensor, ...]], kinds: Sequence[tuple[torch.dtype, int]]) -> list[Statistics]:
    """Bring figures to the host.

    Args:
        measured: what `extremes` or `statistics` returned, for each tensor; all from one of the two.
        kinds: dtype and number of elements of each tensor.

    Sync: one for each dtype and device among the figures.
    """
    figures = [figure for row in measured for figure in row]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, figure in enumerate(figures):
        alike.setdefault((figure.dtype, figure.device), []).append(place)
    numbers = [0.0] * len(figures)
    for places in alike.values():
        for place, number in zip(places, torch.stack([figures[each] for each in places]).tolist(), strict=True):
            numbers[place] = float(number)
    width = len(measured[0]) if measured else 0
    return [_statistics(numbers[place * width : (place + 1) * width], *kind) for place, kind in enumerate(kinds)]


def _statistics(row: list[float], dtype: torch.dtype, numel: int) -> Statistics:
    lowest, highest = row[:2]
    if len(row) == 2:
        return Statistics(dtype, numel, lowest, highest, max(abs(lowest), abs(highest)))
    absmax, smallest, zeros, infs, nans = row[2:]
    return Statistics(dtype, numel, lowest, highest, absmax, smallest, int(zeros), int(infs), int(nans))
