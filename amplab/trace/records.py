"""A traced step as data: `TensorInfo`, `OpRecord` and `Trace`, with its rows and its table as text.

A record is one call of an aten op with its input and output dtypes, its module and the reason for its dtypes. Records
hold no tensor. Events are recorded in `recorder.py`, records made in `reasons.py`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from amplab.display.table import Column, Table
from amplab.display.text import wrapped
from amplab.trace.lines import CodeLine

__all__ = ["OpRecord", "TensorInfo", "Trace", "folded", "shape_of"]

_COLUMNS = {
    "index": Column("#", right=True),
    "op": Column("op"),
    "module": Column("module"),
    "in": Column("in"),
    "out": Column("out"),
    "cast_bytes": Column("cast bytes", right=True),
    "note": Column("note"),
    "reason": Column("reason", cut=True),
}
_NUMBER = re.compile(r" #\d+")


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor that an op read or wrote; see `shape_of`.

    >>> str(TensorInfo(torch.float16, (64, 128)))
    'float16[64, 128]'
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype's name without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this shape and dtype."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype_name}{list(self.shape)}"


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of a nested tensor, whose parts have one each, the number of all its elements."""
    return (tensor.values().numel(),) if tensor.is_nested else tuple(tensor.shape)


@dataclass(frozen=True)
class OpRecord:
    """One op of a traced step.

    Args:
        index: index in `Trace.records`, in order of execution.
        op: the name of the call in the model's code (`linear`, `relu`, `cross_entropy`), or `cast` for a change of
            dtype. In backward, the name of the forward op whose gradient is computed.
        aten: the dispatcher's op, e.g. `aten.addmm.default`.
        phase: `forward` or `backward`; a gradient computed inside the loss function is `backward` too.
        module: path of the innermost running module, the model's class name for its own forward, else empty.
        inputs: tensors read, in argument order.
        outputs: tensors returned.
        reason: the reason for the dtypes: a list and row of the op table, promotion, no list, or the forward op.
        is_cast: True if the op only changes the dtype of floating-point values.
        cast_bytes: bytes that the cast reads and writes; 0 if `is_cast` is False.
        note: how it was computed, e.g. `fp32 accumulate, rounded once`; usually empty.
        is_view: True if nothing is computed or moved: views, detach, uninitialized storage.
        line: the line of the user's code that made the call, for a gradient that of the forward op; None if there is
            none. Not compared by `==`.
        parameter: name of the parameter that is cast here, or whose gradient is accumulated; else empty.
        from_cache: indexes of the casts of weights that the op got from the weight cache, without a cast of its own.
    """

    index: int
    op: str
    aten: str
    phase: str
    module: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    reason: str
    is_cast: bool = False
    cast_bytes: int = 0
    note: str = ""
    is_view: bool = False
    line: CodeLine | None = field(default=None, compare=False)
    parameter: str = ""
    from_cache: tuple[int, ...] = ()

    @property
    def folds(self) -> bool:
        """Whether a table may omit this record: a view, or an op on integers and booleans only."""
        return self.is_view or not any(info.dtype.is_floating_point for info in (*self.inputs, *self.outputs))

    @property
    def dtypes(self) -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]:
        """Input dtypes and output dtypes."""
        return tuple(info.dtype for info in self.inputs), tuple(info.dtype for info in self.outputs)


@dataclass(frozen=True)
class Trace:
    """The ops of one step, forward and backward, in order of execution; without those of the optimizer.

    Args:
        records: the records, in order.
        model: name of the model's class, which its own ops have as their module; empty if it is not known.
    """

    records: Sequence[OpRecord]
    model: str = ""

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.records)

    @property
    def casts(self) -> tuple[OpRecord, ...]:
        """The records that only change a dtype."""
        return tuple(record for record in self.records if record.is_cast)

    @property
    def cast_bytes(self) -> int:
        """Bytes read and written by all casts."""
        return sum(record.cast_bytes for record in self.records)

    def rows(self, *, every: bool = False) -> list[dict[str, str]]:
        """Return the step as dicts of plain strings, for a table on screen.

        Keys: `index, op, aten, module, phase, in, out, shapes, cast, cast_bytes, times, view, reason, note`. `cast` and
        `view` are `yes` or `no`, `in` and `out` are dtypes joined by commas, `shapes` is `64x128, 128x128 -> 64x128`.

        Args:
            every: one row per record. Otherwise views and ops on integers are left out (`OpRecord.folds`), and
                consecutive records of one op and module that differ only in shape share a row: `index`, `aten` and
                `shapes` are those of the first, `times` is their number, `cast_bytes` their sum.
        """
        return _rows(self.records, every=every)

    def text(self, *, every: bool = False) -> str:
        """Return `rows` as an aligned table with a line of totals, ready to print."""
        return _text(self.records, every=every)

    def changed_since(self, other: "Trace") -> set[int]:
        """Return the indexes of the records whose dtypes differ from those in `other`.

        Records are matched by (module, op, phase, occurrence); one that `other` lacks counts as changed. Views are
        counted separately, so that an additional view does not shift the others.
        """
        before = {key: record.dtypes for key, record in other.keyed()}
        return {record.index for key, record in self.keyed() if before.get(key) != record.dtypes}

    def keyed(self) -> Iterator[tuple[tuple[str, str, str, bool, int], OpRecord]]:
        """Yield each record after the key that matches it in another trace, see `changed_since`."""
        seen: Counter[tuple[str, str, str, bool]] = Counter()
        for record in self.records:
            key = (record.module, record.op, record.phase, record.is_view)
            yield (*key, seen[key]), record
            seen[key] += 1

    def __str__(self) -> str:
        return self.text()


def _rows(records: Iterable[OpRecord], *, every: bool = False) -> list[dict[str, str]]:
    """The records as dicts of plain strings, see `Trace.rows`."""
    groups = ([record] for record in records) if every else folded(records)
    return [_row(group) for group in groups]


def _text(records: Sequence[OpRecord], *, every: bool = False) -> str:
    """The records as a table with a rule above each phase, and a line of totals."""
    shown = _rows(records, every=every)
    table = Table(tuple(_COLUMNS.values()), [_cells(row) for row in shown], groups=[row["phase"] for row in shown])
    return f"{table}\n{wrapped(_totals(records, every))}"


def folded(records: Iterable[OpRecord]) -> Iterator[list[OpRecord]]:
    """Yield lists of the records that share a row, see `Trace.rows`."""
    kept = (record for record in records if not record.folds)
    for _, neighbours in groupby(kept, key=lambda record: (record.phase, record.module, record.op)):
        alike: dict[tuple[object, ...], list[OpRecord]] = {}
        for record in neighbours:
            alike.setdefault((record.dtypes, record.note, _NUMBER.sub("", record.reason)), []).append(record)
        yield from alike.values()


def _row(group: Sequence[OpRecord]) -> dict[str, str]:
    record = group[0]
    return {
        "index": str(record.index),
        "op": record.op,
        "aten": record.aten,
        "module": record.module,
        "phase": record.phase,
        "in": ", ".join(info.dtype_name for info in record.inputs),
        "out": ", ".join(info.dtype_name for info in record.outputs),
        "shapes": f"{_shapes(record.inputs)} -> {_shapes(record.outputs)}".strip(),
        "cast": "yes" if record.is_cast else "no",
        "cast_bytes": f"{sum(member.cast_bytes for member in group):,}" if record.is_cast else "",
        "times": str(len(group)),
        "view": "yes" if record.is_view else "no",
        "reason": record.reason,
        "note": record.note,
    }


def _cells(row: dict[str, str]) -> list[str]:
    """The cells of one line."""
    cells = {**row, "module": row["module"] or "-", "in": row["in"] or "-", "out": row["out"] or "-"}
    if row["times"] != "1":
        cells["op"] += f" ×{row['times']}"
    return [cells[column] for column in _COLUMNS]


def _totals(records: Sequence[OpRecord], every: bool) -> str:
    shown = [record for record in records if every or not record.folds]
    forward = sum(record.phase == "forward" for record in shown)
    casts = [record.cast_bytes for record in records if record.is_cast]
    ops = f"{len(shown)} ops: {forward} forward, {len(shown) - forward} backward"
    folded = "" if every else f"; {len(records) - len(shown)} views and index ops folded"
    return f"{ops}; {len(casts)} casts, {sum(casts):,} bytes{folded}"


def _shapes(infos: Sequence[TensorInfo]) -> str:
    return ", ".join("x".join(map(str, info.shape)) or "scalar" for info in infos)
