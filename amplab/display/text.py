"""Plain text of at most 100 columns: wrapped sentences, and cells aligned in columns, without control characters."""

import html
import re
import textwrap
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

__all__ = ["CONTROLS", "WIDTH", "escape", "fitted", "labelled", "visible", "wrapped"]

WIDTH = 100
"""The number of columns that fit in a notebook 1000 pixels wide."""

# Minimum widths of a wrapped and of a truncated cell, tried in order: truncated cells shrink first.
_FLOORS = ((WIDTH, 24), (13, 24), (9, 14))
_BREAKS = re.compile(
    r"(?<=[./_])(?=[^\d\s])|(?<=[^\d\s][./_])(?=\d)|(?<=\s)"
)  # after part of a path, not within a number
_WORDS = re.compile(r"(?<=_)(?=[^\W_])|(?<=\s)")
_FOLDERS = re.compile(r"(?<=[/\s])")
_UNIT = re.compile(r"(?<=\d) (?=[kMGT]?B\b)")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, what turns the direction of text, other ends of lines, and half of a pair."""


def visible(text: str) -> str:
    """Return text that a terminal can only show: the control characters of a log or a file name as escapes.

    >>> print(visible("a red \\x1b[31m word"))
    a red \\x1b[31m word
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape(text: str) -> str:
    """Return text as HTML that a page can only show, with control characters as `visible` has them.

    >>> print(escape("a \\x1b[31m <b>word</b>"))
    a \\x1b[31m &lt;b&gt;word&lt;/b&gt;
    """
    return html.escape(visible(text))


def wrapped(text: str, indent: int = 2) -> str:
    """Return a sentence in lines of at most `WIDTH` columns, with all but the first indented."""
    bound = _UNIT.sub("\0", visible(text))  # no break between a number and its unit
    return textwrap.fill(bound, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False).replace("\0", " ")


def labelled(label: str, text: str) -> str:
    """Return a label and a text next to it, in lines of at most `WIDTH` columns."""
    first = f"  {label:<8}  "
    return textwrap.fill(
        visible(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def fitted(
    lines: Sequence[Sequence[str]], right: Container[int] = (), cut: Collection[int] = ()
) -> Iterator[list[str]]:
    """Yield the lines of text for each line of cells, in a table of at most `WIDTH` columns.

    Cells that are too wide are wrapped; paths are wrapped after a dot. Cells of the columns in `cut` are truncated with
    "…" to as many lines as the others need. Cells of the columns in `right` are right-aligned.
    """
    lines = [[visible(cell) for cell in line] for line in lines]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for narrowest, fewest in _FLOORS:
        floors = {place: fewest if place in cut else narrowest for place in range(len(widths)) if place not in right}
        _narrow(widths, floors)
    for line in lines:
        pairs = enumerate(zip(line, widths, strict=True))
        cells = [_broken(cell, width, _WORDS if place in cut else None) for place, (cell, width) in pairs]
        height = max(len(cell) for place, cell in enumerate(cells) if place not in cut)
        for place in cut:
            cells[place] = _cut(cells[place], height, widths[place])
        rows = ([cell[row] if row < len(cell) else "" for cell in cells] for row in range(height))
        yield [_line(row, widths, right) for row in rows]


def _narrow(widths: list[int], floors: Mapping[int, int]) -> None:
    """Narrow the widest column until all fit or have their minimum width."""
    while sum(widths) + 2 * len(widths) - 2 > WIDTH:
        wide = [place for place, floor in floors.items() if widths[place] > floor]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def _line(cells: Sequence[str], widths: Sequence[int], right: Container[int]) -> str:
    padded = (
        cell.rjust(width) if place in right else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _cut(lines: list[str], height: int, width: int) -> list[str]:
    """The first lines of a cell, with an ellipsis at the end if there are more."""
    if len(lines) <= height:
        return lines
    last, following = lines[height - 1 : height + 1]
    more = f"{last}{'' if last.endswith('_') else ' '}{following}"[: width - 1]
    return [*lines[: height - 1], more.rstrip(" ,:;") + "…"]


def _broken(cell: str, width: int, breaks: re.Pattern[str] | None = None) -> list[str]:
    """The lines of a cell, broken at `breaks`, by default at spaces and between the parts of paths."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for piece in (breaks or (_FOLDERS if "/" in cell else _BREAKS)).split(cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [part for line in lines for part in textwrap.wrap(line.strip(), width) or [""]]
