"""The rows of a policy as plain values that print as a table, and show as one in a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from amplab.display.html import Markup, dtype_chips, html_table, name, page
from amplab.policies.tables.op_table import CastPolicy, OpRule, absent

__all__ = ["PolicyRows", "policy_rows"]

_COLUMNS = {"op": 34, "cast": 20, "runs in": 16, "reason": 90}
"""The columns of the text form with their widths in characters; in 100 columns the reasons would take five lines."""


class PolicyRows(list[dict[str, str]]):
    """A plain list of rows; every value is a string.

    Keys of a row: "op"; "cast", the cast policy; "runs in", the dtype that the op computes in; "reason"; "list", the
    table, with " (inside)" where the table names only an op inside, or "your rule"; "aten" and "spellings", with
    blanks between names.

    Attributes:
        title: the string form of the policy.
    """

    def __init__(self, rows: list[dict[str, str]], title: str) -> None:
        """Keep the rows and what they are the rows of."""
        super().__init__(rows)
        self.title = title

    def __repr__(self) -> str:
        """The rows as text, the reason wrapped under its column."""
        head = {column: column for column in _COLUMNS}
        return "\n".join([f"{self.title}: {self._count()}", *(_text_row(row) for row in (head, *self))])

    def _repr_html_(self) -> str:
        """The rows as an HTML table; names of functions unfold from the op."""
        lines = [(_op(row), name(row["cast"]), dtype_chips(row["runs in"]), row["reason"]) for row in self]
        return page(f"{self.title}: {self._count()}", html_table(list(_COLUMNS), lines, caption="Ops of the policy"))

    def _count(self) -> str:
        return f"{len(self)} ops, the others run in the dtype they get"


def policy_rows(rules: Iterable[OpRule], *, table: str, lower: Mapping[OpRule, str], title: str) -> PolicyRows:
    """The rows of a policy.

    Args:
        rules: its rows as the engine carries them out.
        table: the name of the list they come from.
        lower: what each row runs in if it is lower_precision_fp, e.g. "float16".
        title: the policy's string form.
    """
    return PolicyRows([_row(rule, table, lower[rule]) for rule in rules], title)


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
        return "the widest given"
    if cast is CastPolicy.MATCH_SELF:
        return "its own"
    return "float32 only" if cast is CastPolicy.BANNED else "as it comes"


def _text_row(row: dict[str, str]) -> str:
    *first, reason = (row[column] for column in _COLUMNS)
    *widths, wide = _COLUMNS.values()
    start = "".join(f"{value:<{width}}" for value, width in zip(first, widths, strict=True))
    return textwrap.fill(reason, sum(widths) + wide, initial_indent=start, subsequent_indent=" " * sum(widths))


def _op(row: dict[str, str]) -> Markup:
    """The op, from which the names of its functions unfold."""
    names = f"{name(row['spellings'])}<br>ATen: {name(row['aten'] or 'none')}"
    opened = f'<details><summary>{name(row["op"])}</summary><div class="faint">{names}</div></details>'
    return Markup(opened)
