"""`XRayDifference`: ops whose dtypes differ between two X-rays, added and removed ops, casts and memory.

Ops are matched by (module, op, phase, occurrence), as in `Trace.changed_since`. Casts depend on the precision and are
compared by their number and bytes for each module.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amplab.display.html import dtype_chips, name
from amplab.display.numbers import count, size
from amplab.display.table import Card, Cell, Column, Table
from amplab.trace.kept_tensors import KeptBytes
from amplab.trace.records import OpRecord
from amplab.trace.xray_page import dtypes

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["OpChange", "XRayDifference"]

_COLUMNS = (
    Column("op"),
    Column("module", as_html=name),
    Column("line"),
    Column("before", as_html=dtype_chips),
    Column("after", as_html=dtype_chips),
    Column("reason", cut=True),
)


@dataclass(frozen=True)
class OpChange:
    """One op that differs.

    Attributes:
        before: its record in the first X-ray; None if it was added.
        after: its record in the second X-ray; None if it was removed.
    """

    before: OpRecord | None
    after: OpRecord | None

    @property
    def record(self) -> OpRecord:
        """The record in the second X-ray, else that in the first."""
        record = self.after or self.before
        assert record is not None
        return record

    @property
    def kind(self) -> str:
        """`changed`, `added` or `removed`."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


@dataclass(frozen=True, eq=False, repr=False)
class XRayDifference:
    """The difference between two X-rays; prints as a table.

    Attributes:
        changes: ops with other dtypes and added ops, in the order of the second X-ray, then removed ops.
        before, after: the two X-rays.
    """

    changes: tuple[OpChange, ...]
    before: "XRay"
    after: "XRay"

    @classmethod
    def between(cls, before: "XRay", after: "XRay") -> "XRayDifference":
        """Compare two X-rays of the same step.

        Raises:
            ValueError: if they have no op in common.
        """
        old, new = (dict(_ops(xray)) for xray in (before, after))
        if not old.keys() & new.keys():
            raise ValueError(
                f"The X-rays of {before.model} and {after.model} have no op and module path in common: expected two "
                "X-rays of one model."
            )
        added = [OpChange(old.get(key), record) for key, record in new.items() if _differ(old.get(key), record)]
        removed = [OpChange(record, None) for key, record in old.items() if key not in new]
        return cls((*added, *removed), before, after)

    def __len__(self) -> int:
        return len(self.changes)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each op that differs.

        Keys: `kind` (`changed`, `added`, `removed`), `op, module, phase, line`, `before` and `after` (dtypes as
        `float32 → float16`, empty if there is no such op), `reason` (in the second X-ray).
        """
        return [_row(change) for change in self.changes]

    def casts(self) -> list[dict[str, Any]]:
        """Return the changed casts of each module: `module, casts_before, casts_after, bytes_before, bytes_after`."""
        sides = [_casts_by_module(xray) for xray in (self.before, self.after)]
        modules = dict.fromkeys((*sides[0], *sides[1]))
        found = ((module, *(side.get(module, (0, 0)) for side in sides)) for module in modules)
        return [
            {
                "module": module,
                "casts_before": old[0],
                "casts_after": new[0],
                "bytes_before": old[1],
                "bytes_after": new[1],
            }
            for module, old, new in found
            if old != new
        ]

    @property
    def sentence(self) -> str:
        """The difference in one sentence."""
        kinds = Counter(change.kind for change in self.changes)
        ops = f"{kinds['changed']:,} changed dtypes, {kinds['added']:,} added, {kinds['removed']:,} removed"
        (old, moved_before), (new, moved_after) = (_moved(xray) for xray in (self.before, self.after))
        moved = f"{size(moved_before)} → {size(moved_after)}"
        kept = " → ".join(size((xray.kept or KeptBytes()).total) for xray in (self.before, self.after))
        return (
            f"{self._models()}{self.before.precision} → {self.after.precision}: "
            f"of {count(_size(self.after), 'op')} {ops}; casts {old:,} → {new:,}, {moved}; kept for backward {kept}."
        )

    def _models(self) -> str:
        """The names of the models if there are two."""
        two = self.before.model, self.after.model
        return "" if two[0] == two[1] else f"two models, {two[0]} and {two[1]}, "

    def __str__(self) -> str:
        return str(self._card())

    def __repr__(self) -> str:
        return f"XRayDifference({self.sentence})"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        groups = _alike(self.rows())
        if not groups:
            return Card(self.sentence)
        caption = f"Ops that differ between {self.before.precision} and {self.after.precision}"
        phases = [group[0]["phase"] for group in groups]
        return Card(self.sentence, (Table(_COLUMNS, [*map(_line, groups)], caption, phases),))


def _ops(xray: "XRay") -> Iterator[tuple[Any, OpRecord]]:
    return ((key, record) for key, record in xray.trace.keyed() if not (record.is_cast or record.folds))


def _size(xray: "XRay") -> int:
    return sum(1 for _ in _ops(xray))


def _differ(old: OpRecord | None, new: OpRecord) -> bool:
    return old is None or old.dtypes != new.dtypes


def _casts_by_module(xray: "XRay") -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for record in xray.trace.casts:
        number, moved = found.get(record.module, (0, 0))
        found[record.module] = number + 1, moved + record.cast_bytes
    return found


def _moved(xray: "XRay") -> tuple[int, int]:
    return len(xray.trace.casts), xray.trace.cast_bytes


def _row(change: OpChange) -> dict[str, Any]:
    record = change.record
    return {
        "kind": change.kind,
        "op": record.op,
        "module": record.module,
        "phase": record.phase,
        "line": str(record.line or ""),
        "before": dtypes(change.before) if change.before else "",
        "after": dtypes(change.after) if change.after else "",
        "reason": change.after.reason if change.after else "",
    }


def _alike(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Lists of consecutive equal rows."""
    return [list(alike) for _, alike in groupby(rows, key=lambda row: tuple(row.values()))]


def _line(group: list[dict[str, Any]]) -> tuple[str, ...]:
    """The cells of the line that a group shares."""
    row = group[0]
    named = row["op"] if len(group) == 1 else f"{row['op']} ×{len(group)}"
    place = row["line"].rpartition("/")[2] or "-"
    return (
        Cell(named, name(row["op"], len(group))),
        row["module"] or "-",
        Cell(place, name(row["line"])),
        row["before"] or "(added)",
        row["after"] or "(removed)",
        row["reason"],
    )
