"""`TensorSummary`: the range of a tensor and counts of special values, measured without a sync and read together.

`extremes` is one pass (smallest and largest element; NaN makes both NaN). `measure` counts too: two passes if the
`tensor_stats` kernel is built, else fourteen. Both return tensors on the same device; `read` copies those of many
tensors to the host together. `Measurements` does both, and reads tensors on the host at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amplab import kernels
from amplab.kernels import tensor_stats

__all__ = [
    "HALF_MAX",
    "HALF_UNDERFLOWS",
    "MEASURED",
    "Measurements",
    "TensorSummary",
    "counted",
    "counts_by_kernel",
    "counts_by_torch",
    "extremes",
    "read",
    "measure",
]

MEASURED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128))
"""The dtypes that are measured; of complex numbers the real and imaginary parts."""

HALF_MAX = torch.finfo(torch.float16).max
HALF_UNDERFLOWS = 2.0**-25
"""The largest magnitude that float16 rounds to 0: half of its smallest subnormal number, a tie to even."""

_COUNTED = ("zeros", "infs", "nans")


@dataclass(frozen=True)
class TensorSummary:
    """The range of one tensor, and counts of special values.

    Args:
        dtype: its dtype.
        numel: its number of elements.
        lowest: the smallest element; NaN if any is NaN.
        highest: the largest element; NaN if any is NaN.
        absmax: the largest finite magnitude; without counts, the largest magnitude.
        smallest: the smallest non-zero finite magnitude, inf if there is none; None if not measured.
        zeros, infs, nans: the number of such elements; None if not counted.
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
        counted = (
            f"{count:,} {name if count > 1 else name[:-1]}" for name in _COUNTED if (count := getattr(self, name))
        )
        size = "holds NaN" if math.isnan(self.absmax) else f"|x| up to {self.absmax:.4g}"
        spread = size if self.absmax else ""
        parts = (f"{str(self.dtype).removeprefix('torch.')}, {self.numel:,} elements", spread, *counted)
        return ", ".join(filter(None, parts))


def extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the smallest and the largest element on the tensor's device, NaN if any is. Sync: none."""
    return torch.aminmax(_real(tensor))


def measure(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return lowest, highest, absmax, smallest non-zero magnitude, zeros, infs, nans, on the device. Sync: none."""
    tensor = _real(tensor)
    counts = counts_by_kernel if kernels.report().status == "built" else counts_by_torch
    return (*torch.aminmax(tensor), *counts(tensor))


def counts_by_kernel(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return absmax, smallest non-zero magnitude, zeros, infs, nans in one pass of `tensor_stats`. Sync: none."""
    found = tensor_stats((tensor,))
    columns = found.table[0]
    return found.absmax[0], found.smallest_nonzero[0], columns[2], columns[6], columns[7]


def counts_by_torch(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the same with torch ops, in thirteen passes. Sync: none."""
    magnitudes = tensor.abs()
    nans, infs, zeros = torch.isnan(tensor), torch.isinf(tensor), tensor == 0
    finite = magnitudes.masked_fill(nans | infs, 0)
    nonzero = finite.masked_fill(finite == 0, math.inf)
    return finite.amax(), nonzero.amin(), zeros.sum(), infs.sum(), nans.sum()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def read(measured: Sequence[tuple[Tensor, ...]], kinds: Sequence[tuple[torch.dtype, int]]) -> list[TensorSummary]:
    """Copy measurements to the host.

    Args:
        measured: for each tensor the result of `extremes`, or for each that of `measure`.
        kinds: dtype and number of elements of each tensor.

    Sync: one per dtype and device.
    """
    return [_summary(row, *kind) for row, kind in zip(_numbers(measured), kinds, strict=True)]


def _numbers(measured: Sequence[tuple[Tensor, ...]]) -> list[list[float]]:
    """The numbers of equally long rows, on the host."""
    figures = [figure for row in measured for figure in row]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, figure in enumerate(figures):
        alike.setdefault((figure.dtype, figure.device), []).append(place)
    numbers = [0.0] * len(figures)
    for places in alike.values():
        for place, number in zip(places, torch.stack([figures[each] for each in places]).tolist(), strict=True):
            numbers[place] = float(number)
    width = len(measured[0]) if measured else 0
    return [numbers[place * width : (place + 1) * width] for place in range(len(measured))]


def _summary(row: Sequence[float], dtype: torch.dtype, numel: int) -> TensorSummary:
    lowest, highest = row[:2]
    if len(row) == 2:
        return TensorSummary(dtype, numel, lowest, highest, max(abs(lowest), abs(highest)))
    absmax, smallest, zeros, infs, nans = row[2:]
    return TensorSummary(dtype, numel, lowest, highest, absmax, smallest, int(zeros), int(infs), int(nans))


class Measurements:
    """Summaries of many tensors, by index.

    Tensors on the host are measured and read immediately; this is faster than reading many of them later. Tensors on a
    device are measured immediately, but `settle` reads the results.
    """

    def __init__(self) -> None:
        self._rows: list[Sequence[float]] = []
        self._kinds: list[tuple[torch.dtype, int]] = []
        self._waiting: list[tuple[int, tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, tensor: Tensor, *, detailed: bool = False) -> int:
        """Measure a tensor with `extremes`, or with `measure` if `detailed`, and return its index. Sync: none."""
        figures = measure(tensor) if detailed else extremes(tensor)
        if tensor.is_cpu:
            self._rows.append([figure.item() for figure in figures])
        else:
            self._waiting.append((len(self._rows), figures))
            self._rows.append(())
        self._kinds.append((tensor.dtype, tensor.numel()))
        return len(self._rows) - 1

    def settle(self) -> None:
        """Copy all measurements to the host. Sync: one per dtype and device."""
        for width in {len(figures) for _, figures in self._waiting}:
            waiting = [each for each in self._waiting if len(each[1]) == width]
            for (place, _), row in zip(waiting, _numbers([figures for _, figures in waiting]), strict=True):
                self._rows[place] = row
        self._waiting = []

    def is_finite(self, place: int) -> bool | None:
        """Whether a tensor has no inf and no NaN; None if that is not on the host yet."""
        row = self._rows[place]
        return math.isfinite(row[0]) and math.isfinite(row[1]) if row else None

    def kind(self, place: int) -> tuple[torch.dtype, int]:
        """Dtype and number of elements."""
        return self._kinds[place]

    def __getitem__(self, place: int) -> TensorSummary:
        """The summary of one tensor; call `settle` first."""
        return _summary(self._rows[place], *self._kinds[place])


def counted(tensors: Sequence[Tensor]) -> list[TensorSummary]:
    """Return the summaries of tensors, with counts. Sync: one per dtype and device."""
    measured = Measurements()
    places = [measured.add(tensor, detailed=True) for tensor in tensors]
    measured.settle()
    return [measured[place] for place in places]
