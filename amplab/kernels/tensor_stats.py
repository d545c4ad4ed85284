"""Statistics of many tensors in one pass without a sync: largest, smallest, and how many values float16 loses.

One operator, ``torch.ops.amplab.tensor_stats``, and one int64 table, a row for each tensor:

    absmax | smallest_nonzero | zeros | half_subnormals | half_flushed | half_overflows | infs | nans | bins …

The first two are float64 in the same 8 bytes. The bins count the finite non-zero elements by floor(log2|x|). The
schema, the PyTorch reference and the classes that read a table are here; ``tensor_stats.cpp`` and
``tensor_stats.cu`` hold the kernels that a build registers under the same name, with the same counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from amplab.formats import ExponentHistogram
from amplab.kernels import builder
from amplab.kernels.list_checks import check_present
from amplab.kernels.operators import define_operator

__all__ = ["StatsTable", "TensorStats", "tensor_stats", "tensor_stats_reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LAYOUTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}  # mantissa bits, bias
_HEAD = 8  # columns before the bins
_SMALLEST_NORMAL_HALF = 2.0**-14
_FLUSHED = 2.0**-25  # half of float16's smallest subnormal; the tie rounds to zero, which is even
_OVERFLOWS = 65520.0  # halfway from float16's largest number to the next power of two

_LOW, _BINS = -47, 64  # the last bin counts what is beyond float16's binades: 2^16 and more


@dataclass(frozen=True)
class TensorStats:
    """The statistics of one tensor.

    Attributes:
        absmax: the largest finite magnitude; 0.0 if no element is finite and non-zero.
        smallest_nonzero: the smallest non-zero magnitude; inf if no element is finite and non-zero.
        half_subnormals: elements with 0 < ``|x|`` < 2^-14, which float16 represents with fewer bits or not at all.
        half_flushed: those of them with ``|x|`` <= 2^-25, which become zero in float16.
        half_overflows: finite elements with ``|x|`` >= 65520, which become inf in float16.
        exponents: the elements by power of two, and the zeros, infs and nans; the first and the last bin also count
            what is beyond them.
    """

    absmax: float
    smallest_nonzero: float
    half_subnormals: int
    half_flushed: int
    half_overflows: int
    exponents: ExponentHistogram

    @property
    def zeros(self) -> int:
        """Elements that are 0 or -0."""
        return self.exponents.zeros

    @property
    def infs(self) -> int:
        """Elements that are inf or -inf."""
        return self.exponents.infs

    @property
    def nans(self) -> int:
        """Elements that are NaN."""
        return self.exponents.nans

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.exponents.total


@dataclass(frozen=True, eq=False)
class StatsTable:
    """The statistics of many tensors, on their device until they are read.

    Attributes:
        table: int64 ``(tensors, 8 + bins)``, a row for each tensor; the columns are in this module's docstring.
        low: exponent of the first bin.
    """

    table: Tensor
    low: int

    def __len__(self) -> int:
        """Return the number of tensors."""
        return self.table.shape[0]

    @property
    def absmax(self) -> Tensor:
        """float64 ``(tensors,)``, on the device: the largest finite magnitude of each. Sync: none."""
        return self.table.view(torch.float64)[:, 0]

    @property
    def smallest_nonzero(self) -> Tensor:
        """float64 ``(tensors,)``, on the device: the smallest non-zero magnitude, or inf. Sync: none."""
        return self.table.view(torch.float64)[:, 1]

    @property
    def nonfinite(self) -> Tensor:
        """int64 ``(tensors,)``, on the device: how many elements of each are inf or NaN. Sync: none."""
        return self.table[:, 6] + self.table[:, 7]

    @property
    def exponent_counts(self) -> Tensor:
        """int64 ``(tensors, bins)``, on the device: the elements of each by power of two. Sync: none."""
        return self.table[:, _HEAD:]

    def cpu(self) -> "StatsTable":
        """Return a copy on the CPU. Sync: one; none if the table is on the CPU."""
        return StatsTable(self.table.cpu(), self.low)

    def read(self) -> tuple[TensorStats, ...]:
        """Return the statistics of each tensor, in the order in which they were given.

        Sync: one.
        """
        table = self.table.cpu()
        extremes = table.view(torch.float64)[:, :2].tolist()
        counts = table[:, 2:_HEAD].tolist()
        bins = table[:, _HEAD:].numpy().copy()
        return tuple(map(self._row, extremes, counts, bins))

    def _row(self, extremes: list[float], counts: list[int], bins: NDArray[np.int64]) -> TensorStats:
        zeros, subnormals, flushed, overflows, infs, nans = counts
        total = int(bins.sum()) + zeros + infs + nans
        histogram = ExponentHistogram(bins, self.low, zeros, infs, nans, total)
        absmax, smallest = extremes
        return TensorStats(absmax, smallest, subnormals, flushed, overflows, histogram)


def tensor_stats(tensors: Sequence[Tensor], *, low: int = _LOW, bins: int = _BINS) -> StatsTable:
    """Compute the statistics of every tensor, all in one pass.

    By default 64 bins from 2^-47 to 2^16: the range of float16, what a loss scale of 2^22 would move into it, and in
    the last bin everything larger. ``low=LOWEST_EXPONENT, bins=BINS`` of `amplab.formats.exponents` are all binades of
    float32.

    Args:
        tensors: float16, bfloat16, float32 or float64, in any mixture, any shape and strides, also expanded, on one
            device; not modified.
        low: exponent of the first bin, which also counts what is smaller; -4096 to 4096.
        bins: the number of bins, 1 to 4096; the last one also counts what is larger.

    Raises:
        RuntimeError: an integer, complex or sparse tensor, one on another device, or one whose storage was freed (named
            by its index); ``low`` or ``bins`` out of its range.

    Sync: none; one when the table is read.

    >>> weight = torch.tensor([0.0, 1.0, -3.0, 2.0**-15, 1e-9, 1e6, float("inf")])
    >>> (stats,) = tensor_stats([weight]).read()
    >>> stats.absmax, stats.zeros, stats.half_subnormals, stats.half_flushed, stats.half_overflows, stats.infs
    (1000000.0, 1, 2, 1, 1, 1)
    >>> stats.exponents.span
    (-30, 16)
    """
    builder.settle()
    return StatsTable(_STATS(tensors, low, bins), low)


def tensor_stats_reference(tensors: Sequence[Tensor], low: int, bins: int) -> Tensor:
    """PyTorch reference of `tensor_stats`; returns the table. Sync: none."""
    _check_arguments(tensors, low, bins)
    check_present((f"tensor {index}", tensor) for index, tensor in enumerate(tensors))
    table = _empty_table(tensors, bins)
    for row, x in zip(table, tensors, strict=True):
        _fill(row, x.reshape(-1), low)
    return table


def _fill(row: Tensor, x: Tensor, low: int) -> None:
    """Write the row of one tensor, ``x`` of shape ``(elements,)``."""
    magnitude = (x if x.dtype == torch.float64 else x.float()).abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    extremes, bins = row.view(torch.float64), row[_HEAD:]
    # One element more, so that there is an extreme if there is no element.
    extremes[0] = F.pad(torch.where(counted, magnitude, 0.0), (0, 1), value=0.0).amax()
    extremes[1] = F.pad(torch.where(counted, magnitude, math.inf), (0, 1), value=math.inf).amin()
    row[2] = (magnitude == 0).count_nonzero()
    row[3] = (counted & (magnitude < _SMALLEST_NORMAL_HALF)).count_nonzero()
    row[4] = (counted & (magnitude <= _FLUSHED)).count_nonzero()
    row[5] = (counted & (magnitude >= _OVERFLOWS)).count_nonzero()
    row[6] = magnitude.isinf().count_nonzero()
    row[7] = magnitude.isnan().count_nonzero()
    bins.scatter_add_(0, (_exponents(magnitude) - low).clamp_(0, len(bins) - 1), counted.long())


def _exponents(magnitude: Tensor) -> Tensor:
    """Return floor(log2) of each, int64, from the bits; undefined for zeros and for what is not finite."""
    integer, mantissa, bias = _LAYOUTS[magnitude.dtype]
    subnormal = magnitude < torch.finfo(magnitude.dtype).smallest_normal
    normal = torch.where(subnormal, magnitude * 2.0**mantissa, magnitude)
    return (normal.view(integer) >> mantissa).long() - bias - mantissa * subnormal


def _empty_table(tensors: Sequence[Tensor], bins: int) -> Tensor:
    device = tensors[0].device if tensors else "cpu"
    return torch.zeros(len(tensors), _HEAD + bins, dtype=torch.int64, device=device)


def _check_arguments(tensors: Sequence[Tensor], low: int, bins: int) -> None:
    """Raise for what the kernels refuse, with the same messages."""
    if not 1 <= bins <= 4096:
        raise RuntimeError(f"bins={bins}: expected 1 to 4096; 64 from low=-47 are half's range and what is near.")
    if not -4096 <= low <= 4096:
        raise RuntimeError(f"low={low}: expected an exponent from -4096 to 4096; float32's lowest is -149.")
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise RuntimeError(f"tensor {index} is not strided: pass the values of a coalesced sparse tensor.")
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"tensor {index}: expected float16, bfloat16, float32 or float64.")
        if tensor.device != tensors[0].device:
            raise RuntimeError(f"tensor {index} is on another device than tensor 0; call once per device.")


def _fake(tensors: Sequence[Tensor], low: int, bins: int) -> Tensor:
    _check_arguments(tensors, low, bins)
    return _empty_table(tensors, bins)


_STATS = define_operator(
    "tensor_stats", "(Tensor[] tensors, int low, int bins) -> Tensor", tensor_stats_reference, _fake
)
