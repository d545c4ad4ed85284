"""Numbers in words, and lines of cells under each other, for what is printed."""

import math
import re
import textwrap
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

__all__ = ["WIDTH", "aligned", "count", "filled", "fitted", "labelled", "number", "percent", "places", "power", "size",
           "wrapped"]  # fmt: skip

WIDTH = 100
"""Columns of a page of text: what a notebook of 1000 pixels shows without breaking lines."""

# Columns that a wrapped cell keeps, and one that is cut short: that one gives first, the last pair where it must be.
_FLOORS = ((WIDTH, 24), (13, 24), (9, 14))
_BREAKS = re.compile(r"(?<=[./_])(?=[^\d\s])|(?<=[^\d\s][./_])(?=\d)|(?<=\s)")  # a path after a part, a number never
_WORDS = re.compile(r"(?<=_)(?=[^\W_])|(?<=\s)")
_FOLDERS = re.compile(r"(?<=[/\s])")
_UNIT = re.compile(r"(?<=\d) (?=[kMGT]?B\b)")


def percent(share: float) -> str:
    """Return a share in percent, small ones told apart from none.

    >>> percent(0.0), percent(0.0004), percent(0.25), percent(1.0)
    ('0 %', '<0.1 %', '25.0 %', '100 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


def power(value: float) -> str:
    """Return a number as a power of two where it is one.

    >>> power(65536.0), power(1000.0), power(1.0)
    ('2^16', '1000', '1')
    """
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and value != 1 else f"{value:g}"


def count(number: int, noun: str) -> str:
    """Return how many of a thing.

    >>> count(1, "cast"), count(1200, "byte")
    ('1 cast', '1,200 bytes')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Return bytes in the unit that suits them; decimal units, as in the dashboard.

    >>> size(0), size(640), size(102_840), size(2_500_000_000)
    ('0 B', '640 B', '103 kB', '2.50 GB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    place = min(int(math.log10(nbytes)) // 3, 4)
    value = nbytes / 1000.0**place
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {('B', 'kB', 'MB', 'GB', 'TB')[place]}"


def number(value: float | str) -> str:
    """Return a number as a person writes it: groups of three digits, powers of two, four digits of what is left.

    >>> number(9216), number(65536.0), number(2.0**-24), number(0.46973), number(1e-8), number("loss")
    ('9,216', '2^16', '2^-24', '0.4697', '1e-08', 'loss')
    """
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    is_power = 0.0 < value < math.inf and math.frexp(value)[0] == 0.5
    return power(value) if is_power and not 2.0**-4 <= value <= 2.0**9 else f"{value:.4g}"


def wrapped(text: str, indent: int = 2) -> str:
    """Return a sentence in lines of at most `WIDTH` columns, the later ones indented."""
    bound = _UNIT.sub("\0", text)  # a number keeps its unit
    return textwrap.fill(bound, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False).replace("\0", " ")


def labelled(label: str, text: str) -> str:
    """Return a text after its label, in lines of at most `WIDTH` columns that stand under each other."""
    first = f"  {label:<8}  "
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False,
                         break_long_words=False)  # fmt: skip


def filled(lines: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return lines of cells, the first of them the titles, without the columns that have nothing but a title."""
    columns = [column for column in zip(*lines, strict=True) if not set(column[1:]) <= {"", "-", "–"}]
    return list(zip(*columns, strict=True))


def places(titles: Sequence[str], chosen: Container[str]) -> set[int]:
    """Return where the columns of these titles are."""
    return {place for place, title in enumerate(titles) if title in chosen}


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


def aligned(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Yield lines of cells in columns; those in `right` end at the same place, the others begin there."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return (_line(line, widths, right) for line in lines)


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


def _broken(cell: str, width: int, breaks: re.Pattern | None = None) -> list[str]:
    """The lines that a cell takes, broken at spaces and within paths where no other places are given."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for piece in (breaks or (_FOLDERS if "/" in cell else _BREAKS)).split(cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [part for line in lines for part in textwrap.wrap(line.strip(), width) or [""]]
