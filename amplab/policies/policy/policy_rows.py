"""The rows of a policy as plain values, displayed as a table in a terminal and in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from amplab.display.html import Markup, dtype_chips, html_table, name, page
from amplab.policies.tables.op_table import CastPolicy, OpRule, absent

__all__ = ["PolicyRows", "policy_rows"]

_COLUMNS = {"op": 34, "cast": 20, "runs in": 16, "reason": 90}
"""The columns of the text form with their widths in characters; in 100 columns, reasons would wrap to five lines."""


class PolicyRows(list[dict[str, str]]):
    """A plain list of rows; every value is a string.

    Keys of a row: "op"; "cast", the cast policy; "runs in", the dtype that the op computes in; "reason"; "list", the
    table, with " (inside)" if the table only names an op inside it, or "your rule"; "aten" and "spellings", names
    separated by spaces.

    Attributes:
        title: the string form of the policy.
    """

    def __init__(self, rows: list[dict[str, str]], title: str) -> None:
        """Store the rows and the title."""
        super().__init__(rows)
        self.title = title

    def __repr__(self) -> str:
        """Return the rows as text, with wrapped reasons."""
        head = {column: column for column in _COLUMNS}
        return "\n".join([f"{self.title}: {self._count()}", *(_text_row(row) for row in (head, *self))])

    def _repr_html_(self) -> str:
        """Return the rows as an HTML table; click an op to see the names of its functions."""
        lines = [(_op(row), name(row["cast"]), dtype_chips(row["runs in"]), row["reason"]) for row in self]
        return page(f"{self.title}: {self._count()}", html_table(list(_COLUMNS), lines, caption="Ops of the policy"))

    def _count(self) -> str:
        return f"{len(self)} ops; all other ops run in the dtype of their arguments"


def policy_rows(rules: Iterable[OpRule], *, table: str, lower: Mapping[OpRule, str], title: str) -> PolicyRows:
    """Return the rows of a policy for display.

    Args:
        rules: the rows of the policy; those of ops that the installed torch does not have are left out.
        table: the name of the table that they come from.
        lower: rule -> the precision it runs in if it is lower_precision_fp, e.g. "float16".
        title: the string form of the policy.
    """
    return PolicyRows([_row(rule, table, lower[rule]) for rule in rules if rule.exists], title)


def _row(rule: OpRule, table: str, lower: str) -> dict[str, str]:
    inside = bool(rule.spellings) and rule.spellings == rule.added
    return {
        "op": rule.op,
        "cast": rule.cast.value,
        "runs in": _dtype_of(rule.cast, lower),
        "reason": rule.reason,
        "list": "your rule" if rule.by_user else f"{table} (inside)" if inside else table,
        "aten": " ".join(rule.aten),
        "spellings": " ".join(spelling for spelling in rule.spellings if not absent(spelling)),
    }


def _dtype_of(cast: CastPolicy, lower: str) -> str:
    if cast is CastPolicy.LOWER_PRECISION_FP:
        return lower
    if cast in (CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE):
        return "float32"
    if cast in (CastPolicy.PROMOTE, CastPolicy.SEQUENCE_PROMOTE):
        return "widest argument"
    if cast is CastPolicy.MATCH_SELF:
        return "own dtype"
    return "float32 only" if cast is CastPolicy.BANNED else "argument dtype"


def _text_row(row: dict[str, str]) -> str:
    *first, reason = (row[column] for column in _COLUMNS)
    *widths, wide = _COLUMNS.values()
    start = "".join(f"{value:<{width}}" for value, width in zip(first, widths, strict=True))
    return textwrap.fill(reason, sum(widths) + wide, initial_indent=start, subsequent_indent=" " * sum(widths))


def _op(row: dict[str, str]) -> Markup:
    """Return the op as an element that expands to the names of its functions."""
    names = f"{name(row['spellings'])}<br>ATen: {name(row['aten'] or 'none')}"
    opened = f'<details><summary>{name(row["op"])}</summary><div class="faint">{names}</div></details>'
    return Markup(opened)
