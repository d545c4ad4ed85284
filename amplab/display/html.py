"""Plain HTML for the output of a cell: tables, folded parts, dtypes on their colors. No scripts.

Text is escaped; `Markup` is HTML already and used unchanged. In the style sheet, `page.css`, text and lines have the
colors of the page, light or dark; the colors of dtypes and severities are those of `palette.py`.
"""

import re
from base64 import b64encode
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from amplab.display.palette import palette_css
from amplab.display.text import escape

__all__ = ["Markup", "chip", "dtype_chips", "figures", "html_table", "key", "markup", "name", "page",
           "ribbon", "styled", "with_still"]  # fmt: skip

_DTYPE = re.compile(r"(\b(?:bfloat|float|complex|u?int)\d\w*|\bbool\b)")
_PART = re.compile(r"[^./]{12,20}_|[^./]+[./]*|[./]+")  # where a path may break; long names also after "_"


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def markup(text: str) -> Markup:
    """Return text as HTML: escaped, or unchanged if it is `Markup`."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def page(sentence: str, *parts: str) -> str:
    """Return a piece of a page: a leading sentence, if not empty, and parts of HTML."""
    lead = f'<p class="lead">{markup(sentence)}</p>' if sentence else ""
    return f'<style>{_style()}</style><div class="amplab-plain">{lead}{"".join(parts)}</div>'


def styled(*parts: str) -> Markup:
    """Return parts that only the style sheet of `page` shows.

    JupyterLab removes style sheets and SVG in a notebook that it does not trust: one that was opened outside of
    `amplab lab` and not run. A drawing would leave its words there without their places.
    """
    return Markup(f'<div class="drawn" style="display:none">{"".join(parts)}</div>')


def with_still(drawing: str) -> Markup:
    """Return an SVG drawing with a picture of it, in a gray that both themes show, for pages without `styled` parts."""
    named = re.search(r'aria-label="([^"]*)"', drawing)
    still = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" color="#7b7b7b" ', 1)
    source = b64encode(still.encode()).decode()
    alt = named[1] if named else ""
    return Markup(f'{styled(drawing)}<img class="still" alt="{alt}" src="data:image/svg+xml;base64,{source}">')


def html_table(
    heads: Sequence[str],
    lines: Iterable[Sequence[str]],
    right: Container[int] = (),
    *,
    caption: str = "",
    groups: Sequence[str] = (),
    chosen: Container[int] = (),
) -> Markup:
    """Return lines of cells as a table, which scrolls if it is wide or long.

    Args:
        heads: titles of the columns.
        lines: cells, each text or `Markup`.
        right: columns that are aligned to the right.
        caption: what the table is, for screen readers.
        groups: the group of each line; a heading comes before the first line of each.
        chosen: lines to emphasize.
    """
    kinds = [' class="right"' if place in right else "" for place in range(len(heads))]
    titles = "".join(f'<th scope="col"{kind}>{markup(head)}</th>' for kind, head in zip(kinds, heads, strict=True))
    rows = [_row(line, kinds, chosen=place in chosen) for place, line in enumerate(lines)]
    named = f'<caption class="unseen">{escape(caption)}</caption>' if caption else ""
    return Markup(
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption or "table")}">'
        f"<table>{named}<thead><tr>{titles}</tr></thead>{_bodies(rows, groups, len(heads))}</table></div>"
    )


def figures(named: Mapping[str, str]) -> Markup:
    """Return a few numbers in large type, each below its name."""
    parts = ((markup(name), markup(value)) for name, value in named.items())
    cells = "".join(f"<li><small>{name}</small> <strong>{value}</strong></li>" for name, value in parts)
    return Markup(f'<ul class="figures">{cells}</ul>')


def chip(dtype: str) -> Markup:
    """Return a dtype's name on its color."""
    return Markup(f'<span class="chip tone" data-dtype="{escape(dtype)}">{escape(dtype)}</span>')


def name(path: str, times: int = 1) -> Markup:
    """Return the name of an op, a module or a file as code that may break between its parts; an empty one as a dash."""
    parts = "<wbr>".join(map(escape, _PART.findall(path)))
    return Markup((f"<code>{parts}</code>" if path else "–") + (f"<small> ×{times}</small>" if times > 1 else ""))


def dtype_chips(text: str) -> Markup:
    """Return a text with the dtypes in it as chips, such as `float16 ×3 → float32`."""
    words = (chip(word) if _DTYPE.fullmatch(word) else markup(word) for word in _DTYPE.split(text))
    return Markup(f'<span class="dtypes">{"".join(words)}</span>')


def ribbon(runs: Iterable[tuple[str, bool, int, str]], label: str, *, turned: bool = False) -> Markup:
    """Return a sequence of dtypes as a band of colors.

    Args:
        runs: dtype, whether it is that of a cast, how many ops, and a description of them.
        label: what the band is, for screen readers.
        turned: whether it runs from right to left.
    """
    parts = "".join(
        f'<i class="tone{" cast" if is_cast else ""}" data-dtype="{escape(dtype)}" style="flex-grow:{times}" '
        f'title="{escape(said)}"></i>'
        for dtype, is_cast, times, said in runs
    )
    return Markup(
        f'<span class="ribbon{" turned" if turned else ""}" role="img" aria-label="{escape(label)}">{parts}</span>'
    )


def key(dtypes: Iterable[str], *, casts: bool) -> Markup:
    """Return the legend of a ribbon."""
    shown = [(dtype, False, dtype) for dtype in dtypes] + ([("", True, "a cast, in its output dtype")] if casts else [])
    parts = (f"<span>{ribbon([(dtype, is_cast, 1, '')], said)}{escape(said)}</span>" for dtype, is_cast, said in shown)
    return Markup(f'<div class="key" aria-hidden="true">{" ".join(parts)}</div>')


def _row(line: Sequence[str], kinds: Sequence[str], *, chosen: bool) -> str:
    cells = "".join(f"<td{kind}>{markup(cell)}</td>" for kind, cell in zip(kinds, line, strict=True))
    return f'<tr class="chosen">{cells}</tr>' if chosen else f"<tr>{cells}</tr>"


def _bodies(rows: Sequence[str], groups: Sequence[str], columns: int) -> str:
    if not groups:
        return f"<tbody>{''.join(rows)}</tbody>"
    places = groupby(range(len(rows)), key=groups.__getitem__)
    return "".join(
        f'<tbody><tr class="group"><th scope="rowgroup" colspan="{columns}">{escape(name)}</th></tr>'
        f"{''.join(rows[place] for place in members)}</tbody>"
        for name, members in places
    )


@cache
def _style() -> str:
    return palette_css() + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
