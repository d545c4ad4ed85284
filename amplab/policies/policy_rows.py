"""The rows of a policy as plain values that print as a table: as text, and as HTML in a notebook.

The HTML needs no widget and no script, and takes its colours from JupyterLab's theme, light or dark;
elsewhere it follows the page.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping

from amplab.policies.cast_policy import CastPolicy
from amplab.policies.op_table import OpRule, absent

__all__ = ["PolicyRows", "policy_rows"]

_COLUMNS = {"op": 34, "cast": 20, "runs in": 16, "reason": 90}
"""The columns of the text form with their widths in characters."""

_STYLE = """
.amplab-policy { color: var(--jp-content-font-color1, inherit); font: var(--jp-content-font-size1, 14px)/1.45
  var(--jp-content-font-family, system-ui, sans-serif); max-height: 32em; overflow: auto; }
.amplab-policy.amplab-policy table { border-collapse: collapse; table-layout: auto; margin: 0; color: inherit;
  font-size: .93em; }
.amplab-policy.amplab-policy caption { text-align: left; padding: .3em .6em;
  color: var(--jp-content-font-color2, inherit); }
.amplab-policy.amplab-policy th, .amplab-policy.amplab-policy td { text-align: left; vertical-align: top;
  padding: .3em .6em;
  border-bottom: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .4)); white-space: normal; }
.amplab-policy tbody th { font-weight: normal; }
.amplab-policy thead th { position: sticky; top: 0; background: var(--jp-layout-color1, Canvas); }
.amplab-policy.amplab-policy.amplab-policy code { font-family: var(--jp-code-font-family, ui-monospace, monospace);
  background: none; color: inherit; }
.amplab-policy.amplab-policy.amplab-policy tr { background: none; }
.amplab-policy summary { cursor: pointer; }
.amplab-policy .soft { color: var(--jp-content-font-color2, inherit); }
"""


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
        head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
        body = "".join(map(_html_row, self))
        caption = f"<caption><code>{html.escape(self.title)}</code>: {self._count()}</caption>"
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="amplab-policy"><style>{_STYLE}</style>{table}</div>'

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


def _html_row(row: dict[str, str]) -> str:
    cells = {key: html.escape(value) for key, value in row.items()}
    names = f"<code>{cells['spellings']}</code><br>ATen: <code>{cells['aten'] or 'none of its own'}</code>"
    unfolding = f"<details><summary><code>{cells['op']}</code></summary><div class='soft'>{names}</div></details>"
    columns = [f"<th scope='row'>{unfolding}</th>", *(f"<td>{cells[column]}</td>" for column in list(_COLUMNS)[1:])]
    return f"<tr>{''.join(columns)}</tr>"
