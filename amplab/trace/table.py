"""Records as plain strings: the rows of a table, and the table as text.

Pure functions of the records they are given; nothing here knows how a record came to be.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from amplab.display.text import WIDTH, fitted, wrapped

if TYPE_CHECKING:
    from amplab.trace.records import OpRecord, TensorInfo

__all__ = ["folded", "rows", "text"]

_COLUMNS = ("index", "op", "module", "in", "out", "cast_bytes", "note", "reason")
_TITLES = ("#", "op", "module", "in", "out", "cast bytes", "note", "reason")
_TO_THE_RIGHT, _REASON = (0, 5), 7
_NUMBER = re.compile(r" #\d+")


def rows(records: Iterable["OpRecord"], *, every: bool = False) -> list[dict[str, str]]:
    """Return `records` as dicts of plain strings; keys and folding as `Trace.rows` says."""
    groups = ([record] for record in records) if every else folded(records)
    return [_row(group) for group in groups]


def text(records: Sequence["OpRecord"], *, every: bool = False) -> str:
    """Return `records` as an aligned table, a rule above each phase, and a line of totals."""
    shown = rows(records, every=every)
    head, *cells = fitted([_TITLES, *map(_cells, shown)], right=_TO_THE_RIGHT, cut={_REASON})
    lines = [*head]
    for phase, numbered in groupby(range(len(shown)), key=lambda place: shown[place]["phase"]):
        lines.append(f"-- {phase} ".ljust(WIDTH, "-"))
        lines += [line for place in numbered for line in cells[place]]
    return "\n".join([*lines, wrapped(_totals(records, every))])


def folded(records: Iterable["OpRecord"]) -> Iterator[list["OpRecord"]]:
    """Yield the records that share a row, see `Trace.rows`."""
    kept = (record for record in records if not record.folds)
    for _, neighbours in groupby(kept, key=lambda record: (record.phase, record.module, record.op)):
        alike: dict[tuple, list[OpRecord]] = {}
        for record in neighbours:
            alike.setdefault((record.dtypes, record.note, _NUMBER.sub("", record.reason)), []).append(record)
        yield from alike.values()


def _row(group: Sequence["OpRecord"]) -> dict[str, str]:
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
    """The cells of one line; a long reason is cut short, the row has all of it."""
    cells = {**row, "module": row["module"] or "-", "in": row["in"] or "-", "out": row["out"] or "-"}
    if row["times"] != "1":
        cells["op"] += f" ×{row['times']}"
    return [cells[column] for column in _COLUMNS]


def _totals(records: Sequence["OpRecord"], every: bool) -> str:
    shown = [record for record in records if every or not record.folds]
    forward = sum(record.phase == "forward" for record in shown)
    casts = [record.cast_bytes for record in records if record.is_cast]
    ops = f"{len(shown)} ops: {forward} forward, {len(shown) - forward} backward"
    folded = "" if every else f"; {len(records) - len(shown)} views and index ops folded"
    return f"{ops}; {len(casts)} casts, {sum(casts):,} bytes{folded}"


def _shapes(infos: Sequence["TensorInfo"]) -> str:
    return ", ".join("x".join(map(str, info.shape)) or "scalar" for info in infos)
