"""Tables as HTML that needs no script and no colour of its own: it takes those of the page, light or dark."""

from collections.abc import Container, Iterable, Sequence
from html import escape

__all__ = ["folded_part", "html_table", "page"]

_STYLE = """<style>
.amplab-plain { --faint: var(--jp-ui-font-color2, color-mix(in srgb, currentColor 65%, transparent));
  --edge: var(--jp-border-color2, color-mix(in srgb, currentColor 25%, transparent)); color: inherit; }
.amplab-plain .scroll { overflow-x: auto; }
.amplab-plain table { border-collapse: collapse; margin: 4px 0; font-variant-numeric: tabular-nums; }
.amplab-plain th, .amplab-plain td { padding: 2px 10px 2px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--edge); background: none; }
.amplab-plain th { font-weight: 600; white-space: nowrap; }
.amplab-plain .right { text-align: right; }
.amplab-plain .changed { font-weight: 600; }
.amplab-plain small, .amplab-plain .faint { color: var(--faint); }
.amplab-plain summary { cursor: pointer; }
.amplab-plain p { margin: 4px 0; }
</style>"""


def page(sentence: str, *parts: str) -> str:
    """Return a piece of a page: a sentence and what follows, all HTML but the sentence."""
    return f'{_STYLE}<div class="amplab-plain"><p>{escape(sentence)}</p>{"".join(parts)}</div>'


def html_table(heads: Sequence[str], lines: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """Return lines of cells as a table, wide ones scrolling; the columns in `right` hold numbers."""
    columns = [' class="right"' if place in right else "" for place in range(len(heads))]
    titles = "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for kind, head in zip(columns, heads, strict=True))
    rows = (
        "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(columns, line, strict=True)) for line in lines
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def folded_part(title: str, body: str, *, is_open: bool = False) -> str:
    """Return a part that folds under its title."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{body}</details>"
