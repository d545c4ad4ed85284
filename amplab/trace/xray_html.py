"""An X-ray as HTML: a sentence, and one folded table for each module, in the order in which they ran."""

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from amplab.trace.plain_html import folded_part, html_table, page
from amplab.trace.plain_words import count
from amplab.trace.records import OpRecord
from amplab.trace.table import folded
from amplab.trace.xray_text import cells, heads, summary, totals

if TYPE_CHECKING:
    from amplab.trace.xray_value import XRay

__all__ = ["html"]

_MODULE = 2  # the column that the tables of modules do not need


def html(xray: "XRay") -> str:
    """Return the X-ray as a piece of a page."""
    by_module: dict[str, list[list[OpRecord]]] = defaultdict(list)
    for group in folded(xray.trace):
        by_module[group[0].module].append(group)
    parts = (_part(xray, module, groups) for module, groups in by_module.items())
    rest = "".join(f"<p>{line}</p>" for line in map(escape, totals(xray)[1:]))
    return page(f"X-ray of {summary(xray)}.", *parts, rest)


def _part(xray: "XRay", module: str, groups: list[list[OpRecord]]) -> str:
    records = [record for group in groups for record in group]
    moved = sum(record.cast_bytes for record in records)
    title = f"{module or 'outside of every module'}: {count(len(records), 'op')}"
    title += f", {count(moved, 'byte')} of casts" if moved else ""
    kept = xray.kept.of(module) if xray.kept else 0
    title += f", {count(kept, 'byte')} kept for backward" if kept else ""
    titles = (*_without_module(heads(xray)), "phase")
    lines = [(*_without_module(cells(group, xray)), group[0].phase) for group in groups]
    return folded_part(title, html_table(titles, lines, right={0, 4}))


def _without_module(line: tuple[str, ...]) -> tuple[str, ...]:
    return (*line[:_MODULE], *line[_MODULE + 1 :])
