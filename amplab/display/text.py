"""Plain text of at most 100 columns: wrapped sentences, and cells aligned in columns."""

import re
import textwrap
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

__all__ = ["WIDTH", "fitted", "labelled", "wrapped"]

WIDTH = 100
"""Columns of a page of text: what a notebook of 1000 pixels shows without breaking lines."""

# Columns that a wrapped cell keeps, and one that is cut short: that one gives first, the last pair where it must be.
_FLOORS = ((WIDTH, 24), (13, 24), (9, 14))
_BREAKS = re.compile(r"(?<=[./_])(?=[^\d\s])|(?<=[^\d\s][./_])(?=\d)|(?<=\s)")  # a path after a part, a number never
_WORDS = re.compile(r"(?<=_)(?=[^\W_])|(?<=\s)")
_FOLDERS = re.compile(r"(?<=[/\s])")
_UNIT = re.compile(r"(?<=\d) (?=[kMGT]?B\b)")


def wrapped(text: str, indent: int = 2) -> str:
    """Return a sentence in lines of at most `WIDTH` columns, the later ones indented."""
    bound = _UNIT.sub("\0", text)  # a number keeps its unit
    return textwrap.fill(bound, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False).replace("\0", " ")


def labelled(label: str, text: str) -> str:
    """Return a text after its label, in lines of at most `WIDTH` columns that stand under each other."""
    first = f"  {label:<8}  "
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False,
                         break_long_words=False)  # fmt: skip


def fitted(
    lines: Sequence[Sequence[str]], right: Container[int] = (), cut: Collection[int] = ()
) -> Iterator[list[str]]:
    """Yield for each line of cells the lines of text that it takes in a table of at most `WIDTH` columns.

    Cells that are too wide go on below, paths broken after a dot; those of the columns in `cut` take no line more
    than the others, and end in "…".
    """
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
    """Take from the widest column, until all fit or are at their floors."""
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
    """The first lines of a cell, the last of them ending in dots where there are more."""
    if len(lines) <= height:
        return lines
    last, following = lines[height - 1 : height + 1]
    more = f"{last}{'' if last.endswith('_') else ' '}{following}"[: width - 1]
    return [*lines[: height - 1], more.rstrip(" ,:;") + "…"]


def _broken(cell: str, width: int, breaks: re.Pattern[str] | None = None) -> list[str]:
    """The lines that a cell takes, broken at spaces and within paths where no other places are given."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for piece in (breaks or (_FOLDERS if "/" in cell else _BREAKS)).split(cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [part for line in lines for part in textwrap.wrap(line.strip(), width) or [""]]
