"""`XRay`: one step with everything that was seen of it, and the forms it is read in.

Taking one is in `xray.py`, text and HTML are in `xray_page.py`, the comparison of two is in `xray_difference.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex

import torch

from amplab.formats import ExponentHistogram
from amplab.kernels import TensorStats
from amplab.trace.gradient_range import GradientRange
from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.reasons import records_of
from amplab.trace.recorder import Event
from amplab.trace.records import OpRecord, Trace
from amplab.trace.statistics import OpStatistics, Statistics
from amplab.trace.xray_difference import XRayDifference
from amplab.trace.xray_page import html, summary, text

__all__ = ["Cast", "XRay"]

_MEASURED = ("absmax", "smallest_nonzero", "zeros", "half_subnormals", "half_flushed", "half_overflows", "infs", "nans",
             "numel")  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """One change of dtype that an op needed.

    Attributes:
        index: of the record of the cast; where the weight cache served it, of the op that read the result.
        op: what it was for, e.g. `linear`; `to` where the code asks for it. In backward that of the forward's cast.
        module: path of the module at work.
        line: `model.py:12`, or empty.
        phase: `forward` or `backward`.
        parameter: name of the parameter that is cast, or empty.
        source, target: dtypes.
        nbytes: bytes read and written together; 0 where the cache served it.
        cached: whether the weight cache served it.
        saved: bytes that the cache spared; 0 where it did not.
    """

    index: int
    op: str
    module: str
    line: str
    phase: str
    parameter: str
    source: torch.dtype
    target: torch.dtype
    nbytes: int
    cached: bool = False
    saved: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class XRay:
    """Every op of one step, forward and backward, with dtypes, casts, reasons and the lines of code.

    Prints as a table, shows as HTML in a notebook, and `rows` gives plain values. `x[12]` is the record of the op that
    the table numbers 12, and a loop over `x` goes through all of them.

    Attributes:
        precision: in words what the step ran in, e.g. `O1`.
        loss: where the number came from that backward started at, in words.
        loss_scale: what it was multiplied by.
        model: the model's class.
        kept: bytes kept for backward, by module; None for a model that calls `torch.func`, where they cannot be
            counted.
        measured: what `statistics` and `gradients` are read from.
        events: what `trace` puts into words.
    """

    precision: str
    loss: str
    loss_scale: float
    model: str
    kept: KeptBytes | None
    measured: Statistics | None
    events: tuple[Event, ...]

    @property
    def statistics(self) -> Mapping[int, OpStatistics] | None:
        """The statistics of each op by index of its record; None where none were asked for."""
        return None if self.measured is None else self.measured.by_op

    @property
    def gradients(self) -> tuple[tuple[str, ExponentHistogram], ...] | None:
        """Name and histogram of each parameter's gradient, times `loss_scale`; None without statistics."""
        return None if self.measured is None else self.measured.gradients

    @cached_property
    def trace(self) -> Trace:
        """The step's records; put into words when they are first read."""
        return Trace(records_of(self.events))

    @cached_property
    def casts(self) -> tuple[Cast, ...]:
        """Every cast, in order, those that the weight cache served among them."""
        return tuple(cast for record in self.trace for cast in self._casts_at(record))

    def rows(self, *, every: bool = False) -> list[dict[str, Any]]:
        """Return one dict of plain values for each op.

        Keys: `index, phase, op, aten, module, line` (`model.py:12` or empty), `code` (the line itself), `inputs` and
        `outputs` (lists such as `["float16[64, 128]"]`), `cast` (bool), `cast_bytes`, `parameter` (that is cast, or
        whose gradient is added up), `from_cache` (names of weights whose casts the cache served), `view`, `reason`,
        `note`; with statistics also `statistics`: for each output `absmax, smallest_nonzero, zeros, half_subnormals,
        half_flushed, half_overflows, infs, nans, numel`, and `cast_from`, the same of what a cast read, or None.

        What is said of half is said of the values, in whatever dtype they are: `half_subnormals` of a float32 tensor
        counts the elements that half would hold with fewer bits and those that it would flush to zero, and
        `half_flushed` these alone.

        Args:
            every: views and ops on integers too.
        """
        return [_row_of(record, self.trace, self.statistics) for record in self.trace if every or not record.folds]

    def diff(self, other: "XRay") -> XRayDifference:
        """Return what is different in `other`: ops whose dtypes changed, ops that came or went, casts and memory.

        Raises:
            TypeError: `other` is no X-ray. ValueError: it is one of another model, with no op in common.
        """
        if not isinstance(other, XRay):
            raise TypeError(
                f"other={type(other).__name__}: expected another X-ray of the same model, such as "
                "amplab.xray(model, batch, opt_level='O1')."
            )
        return XRayDifference.between(self, other)

    def underflow(self, loss_scale: float | None = None) -> GradientRange:
        """Return what half loses of this step's gradients, layer by layer.

        What half has flushed on the way in this very step is gone and not counted: take the X-ray at O0, or
        `amplab.gradient_range`, to count all of it.

        Args:
            loss_scale: the scale to judge by; None for the one the step ran with.

        Raises:
            ValueError: the X-ray was taken without statistics; or a scale out of range.
        """
        if self.gradients is None:
            raise ValueError(
                "underflow() of an X-ray without statistics: expected xray(..., stats=True), which measures the "
                "gradients."
            )
        return GradientRange.of_scaled(self.gradients, self.loss_scale, loss_scale)

    def text(self, *, every: bool = False) -> str:
        """Return the table that `print` shows; with `every`, views and ops on integers too."""
        return text(self, every=every)

    def __len__(self) -> int:
        """The number of records, views among them."""
        return len(self.trace.records)

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.trace)

    def __getitem__(self, index: int) -> OpRecord:
        """The record of that number, as the table shows it.

        Raises:
            TypeError: `index` is no whole number. IndexError: there is no such record.
        """
        if isinstance(index, bool) or not isinstance(index, SupportsIndex):
            raise TypeError(
                f"xray[{index!r}]: expected the number of an op, as in the table's first column; for those of a module "
                "go through rows(), [row for row in x.rows() if row['module'] == '0']."
            )
        if not -len(self) <= index.__index__() < len(self):
            raise IndexError(f"xray[{index}]: expected a number below {len(self)}, as in the table's first column.")
        return self.trace.records[index]

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return f"XRay({summary(self)})"

    def _repr_html_(self) -> str:
        return html(self)

    def _casts_at(self, record: OpRecord) -> list[Cast]:
        served = [self._served(record, self.trace.records[index]) for index in record.served]
        return [*served, self._made(record)] if record.is_cast else served

    def _made(self, record: OpRecord) -> Cast:
        place = self.events[record.index].place
        if not place.call and place.origin is not None:
            place = self.events[place.origin].place
        op = place.decision.op if place.decision is not None and place.decision.kind == "cast" else place.call
        return Cast(record.index, op, *_place(record), *_ends(record), record.cast_bytes)

    def _served(self, record: OpRecord, cast: OpRecord) -> Cast:
        place = (*_place(record)[:3], cast.parameter)
        return Cast(record.index, record.op, *place, *_ends(cast), 0, cached=True, saved=cast.cast_bytes)


def _place(record: OpRecord) -> tuple[str, str, str, str]:
    return record.module, str(record.line or ""), record.phase, record.parameter


def _ends(cast: OpRecord) -> tuple[torch.dtype, torch.dtype]:
    """What a cast reads and writes; a copy into a tensor of another dtype names the tensor first."""
    if len(cast.inputs) == 2:
        return cast.inputs[1].dtype, cast.inputs[0].dtype
    return cast.inputs[0].dtype, cast.outputs[0].dtype


def _row_of(record: OpRecord, trace: Trace, statistics: Mapping[int, OpStatistics] | None) -> dict[str, Any]:
    """Return one op with the keys that `XRay.rows` names."""
    row = {
        "index": record.index,
        "phase": record.phase,
        "op": record.op,
        "aten": record.aten,
        "module": record.module,
        "line": str(record.line or ""),
        "code": record.line.source if record.line else "",
        "inputs": list(map(str, record.inputs)),
        "outputs": list(map(str, record.outputs)),
        "cast": record.is_cast,
        "cast_bytes": record.cast_bytes,
        "parameter": record.parameter,
        "from_cache": [trace.records[index].parameter for index in record.served],
        "view": record.is_view,
        "reason": record.reason,
        "note": record.note,
    }
    if statistics is not None:
        measured = statistics.get(record.index, OpStatistics(()))
        row["statistics"] = [_plain(stats) for stats in measured.outputs]
        row["cast_from"] = _plain(measured.cast_from) if measured.cast_from else None
    return row


def _plain(stats: TensorStats) -> dict[str, float | int | None]:
    row = {name: getattr(stats, name) for name in _MEASURED}
    if math.isinf(row["smallest_nonzero"]):  # there is none, and JSON has no inf
        row["smallest_nonzero"] = None
    return row
