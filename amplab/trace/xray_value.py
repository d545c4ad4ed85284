"""`XRay`: the result of `xray`, with its rows, casts, statistics and gradients.

`xray` is in `xray.py`, text and HTML are in `xray_page.py`, the comparison of two is in `xray_difference.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from amplab.formats import ExponentHistogram
from amplab.formats.kept_property import kept_property
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
    """One cast for an op.

    Attributes:
        index: index of the record of the cast; for a cast from the weight cache, of the op that read it.
        op: the op that needed it, e.g. `linear`; `to` if the code requests it. In backward, that of the forward cast.
        module: path of the running module.
        line: `model.py:12`, or empty.
        phase: `forward` or `backward`.
        parameter: name of the parameter that is cast, or empty.
        source, target: dtypes.
        nbytes: bytes read and written; 0 if it came from the weight cache.
        cached: whether it came from the weight cache.
        saved: bytes that the weight cache avoided to move, else 0.
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
    """Every op of one step, forward and backward, with dtypes, casts, reasons and lines of code.

    It prints as a table and shows as HTML in a notebook; `rows` returns plain values. `x[12]` is the record of the op
    with number 12 in the table; iterating yields all records.

    Attributes:
        precision: the precision of the step, e.g. `O1`.
        loss: a description of the loss that backward started from.
        loss_scale: the factor of that loss.
        model: the name of the model's class.
        kept: bytes kept for backward, by module; None for a model that calls `torch.func`, where they cannot be
            counted.
        measured: the source of `statistics` and `gradients`.
        events: the source of `trace`.
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
        """The statistics of each op by index of its record; None without `stats=True`."""
        return None if self.measured is None else self.measured.by_op

    @property
    def gradients(self) -> tuple[tuple[str, ExponentHistogram], ...] | None:
        """Name and histogram of each parameter's gradient, scaled by `loss_scale`; None without `stats=True`."""
        return None if self.measured is None else self.measured.gradients

    @kept_property
    def trace(self) -> Trace:
        """The records of the step, made at the first access."""
        return Trace(records_of(self.events), self.model)

    @kept_property
    def casts(self) -> tuple[Cast, ...]:
        """Every cast in order, including those from the weight cache."""
        return tuple(cast for record in self.trace for cast in self._casts_at(record))

    def rows(self, *, every: bool = False) -> list[dict[str, Any]]:
        """Return one dict of plain values for each op.

        Keys: `index, phase, op, aten, module, line` (`model.py:12` or empty), `code` (the line itself), `inputs` and
        `outputs` (lists such as `["float16[64, 128]"]`), `cast` (bool), `cast_bytes`, `parameter` (the one that is
        cast, or whose gradient is accumulated), `from_cache` (names of weights cast by an earlier op), `view`,
        `reason`, `note`; with statistics also `statistics`: for each output `absmax, smallest_nonzero, zeros,
        half_subnormals, half_flushed, half_overflows, infs, nans, numel`, and `cast_from`, the same for the input of a
        cast, or None.

        The counts for float16 hold for values of any dtype: `half_subnormals` of a float32 tensor counts the elements
        that float16 would store with fewer bits or flush to zero, and `half_flushed` only the latter.

        Args:
            every: include views and ops on integers.
        """
        return [_row_of(record, self.trace, self.statistics) for record in self.trace if every or not record.folds]

    def diff(self, other: "XRay") -> XRayDifference:
        """Return the differences to `other`: ops with other dtypes, added and removed ops, casts and memory.

        Raises:
            TypeError: if `other` is not an X-ray. ValueError: if the two have no op in common.
        """
        if not isinstance(other, XRay):
            raise TypeError(
                f"other={type(other).__name__}: expected another X-ray of the same model, such as "
                "amplab.xray(model, batch, opt_level='O1')."
            )
        return XRayDifference.between(self, other)

    def underflow(self, loss_scale: float | None = None) -> GradientRange:
        """Return what float16 loses of this step's gradients, by layer.

        Values that this step itself flushed to zero are not counted: X-ray the step at O0, or use
        `amplab.gradient_range`, to count all of them.

        Args:
            loss_scale: the loss scale to evaluate; None for that of the step.

        Raises:
            ValueError: if the X-ray has no statistics, or for an invalid scale.
        """
        if self.gradients is None:
            raise ValueError(
                "underflow() of an X-ray without statistics: expected one that measured the gradients; call "
                "xray(..., stats=True)."
            )
        return GradientRange.of_scaled(self.gradients, self.loss_scale, loss_scale)

    def text(self, *, every: bool = False) -> str:
        """Return the text that `print` shows; with `every`, including views and ops on integers."""
        return text(self, every=every)

    def __len__(self) -> int:
        """The number of records, including views."""
        return len(self.trace.records)

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.trace)

    def __getitem__(self, index: int) -> OpRecord:
        """The record with that number in the table.

        Raises:
            TypeError: if `index` is not an integer. IndexError: if there is no such record.
        """
        if isinstance(index, bool) or not isinstance(index, SupportsIndex):
            raise TypeError(
                f"xray[{index!r}]: expected the number of an op, as in the first column of the table; to select the "
                "ops of a module, use [row for row in x.rows() if row['module'] == '0']."
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
        cached = [self._from_cache(record, self.trace.records[index]) for index in record.from_cache]
        return [*cached, self._made(record)] if record.is_cast else cached

    def _made(self, record: OpRecord) -> Cast:
        place = self.events[record.index].place
        if not place.call and place.origin is not None:
            place = self.events[place.origin].place
        op = place.decision.op if place.decision is not None and place.decision.kind == "cast" else place.call
        return Cast(record.index, op, *_place(record), *_ends(record), record.cast_bytes)

    def _from_cache(self, record: OpRecord, cast: OpRecord) -> Cast:
        place = (*_place(record)[:3], cast.parameter)
        return Cast(record.index, record.op, *place, *_ends(cast), 0, cached=True, saved=cast.cast_bytes)


def _place(record: OpRecord) -> tuple[str, str, str, str]:
    return record.module, str(record.line or ""), record.phase, record.parameter


def _ends(cast: OpRecord) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes that a cast reads and writes; the target is the first input of `copy_`."""
    if len(cast.inputs) == 2:
        return cast.inputs[1].dtype, cast.inputs[0].dtype
    return cast.inputs[0].dtype, cast.outputs[0].dtype


def _row_of(record: OpRecord, trace: Trace, statistics: Mapping[int, OpStatistics] | None) -> dict[str, Any]:
    """Return one op as a dict, see `XRay.rows`."""
    row: dict[str, Any] = {
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
        "from_cache": [trace.records[index].parameter for index in record.from_cache],
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
    row: dict[str, float | int | None] = {name: getattr(stats, name) for name in _MEASURED}
    if math.isinf(stats.smallest_nonzero):  # there is none; JSON has no inf
        row["smallest_nonzero"] = None
    return row
