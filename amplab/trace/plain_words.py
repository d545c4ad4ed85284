"""Numbers in words, and lines of cells under each other, for what is printed."""

import math
from collections.abc import Container, Iterator, Sequence

__all__ = ["aligned", "count", "percent", "power"]


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


def aligned(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Yield lines of cells in columns; those in `right` end at the same place, the others begin there."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
