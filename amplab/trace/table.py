"""Records as plain strings: the rows of a table, and the table as text.

Pure functions of what they are given; nothing here knows how a record came to be.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amplab.trace.records import OpRecord, TensorInfo

__all__ = ["row", "text"]

_COLUMNS = ("index", "op", "module", "in", "out", "cast_bytes", "note", "reason")
_TITLES = ("#", "op", "module", "in", "out", "cast bytes", "note", "reason")
_WIDEST_REASON = 80


def row(record: "OpRecord") -> dict[str, str]:
    """Return `record` as a dict of plain strings; the keys are listed in `Trace.rows`."""
    return {
        "index": str(record.index),
        "op": record.op,
        "aten": record.aten,
        "module": record.module,
        "phase": record.phase,
        "in": _dtypes(record.inputs),
        "out": _dtypes(record.outputs),
        "shapes": f"{_shapes(record.inputs)} -> {_shapes(record.outputs)}".strip(),
        "cast": "yes" if record.is_cast else "no",
        "cast_bytes": f"{record.cast_bytes:,}" if record.is_cast else "",
        "view": "yes" if record.is_view else "no",
        "reason": record.reason,
        "note": record.note,
    }


def text(records: Sequence["OpRecord"], *, views: bool = False) -> str:
    """Return `records` as an aligned table, forward above backward as they ran, and a line of totals."""
    shown = [record for record in records if views or not record.folds]
    cells = [_cells(record) for record in shown]
    widths = [max(map(len, column)) for column in zip(_TITLES, *cells, strict=True)]
    lines, phase = [_line(_TITLES, widths)], ""
    for record, line in zip(shown, cells, strict=True):
        if record.phase != phase:
            phase = record.phase
            lines.append(f"-- {phase} ".ljust(len(lines[0]) if len(lines) == 1 else len(lines[1]), "-"))
        lines.append(_line(line, widths))
    return "\n".join([*lines, _totals(records, shown)])


def _cells(record: "OpRecord") -> list[str]:
    """The cells of one line; a long reason is cut short, `row` has all of it."""
    cells = row(record)
    if len(record.reason) > _WIDEST_REASON:
        cells["reason"] = record.reason[: _WIDEST_REASON - 1].rstrip(" ,:") + "…"
    return [cells[column] or ("" if column == "note" else "-") for column in _COLUMNS]


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    numeric = {0, 5}
    parts = (
        cell.rjust(width) if place in numeric else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(parts).rstrip()


def _totals(records: Sequence["OpRecord"], shown: Sequence["OpRecord"]) -> str:
    forward = sum(record.phase == "forward" for record in shown)
    casts = [record for record in records if record.is_cast]
    moved = sum(record.cast_bytes for record in casts)
    line = f"{len(shown)} ops: {forward} forward, {len(shown) - forward} backward; {len(casts)} casts, {moved:,} bytes"
    folded = len(records) - len(shown)
    return f"{line}; {folded} views and index ops folded" if folded else line


def _dtypes(infos: Sequence["TensorInfo"]) -> str:
    return ", ".join(info.dtype_name for info in infos)


def _shapes(infos: Sequence["TensorInfo"]) -> str:
    return ", ".join("x".join(map(str, info.shape)) or "scalar" for info in infos)
