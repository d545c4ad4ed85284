"""Draw an exponent histogram as plain text above the range of a format.

Each column is one power of two, so a loss scale of 2^k shifts the histogram k columns to the right.
"""

import numpy as np

from amplab.formats.exponents import ExponentHistogram
from amplab.formats.float_format import FloatFormat

__all__ = ["histogram_text"]

BLOCKS = " ▁▂▃▄▅▆▇█"


def histogram_text(
    histogram: ExponentHistogram, fmt: FloatFormat, *, low: int = -45, high: int = 24, height: int = 4
) -> str:
    """Return the histogram, an axis of exponents, and the range of `fmt` as text.

    >>> import torch
    >>> from amplab.formats import FLOAT8_E4M3, exponent_histogram
    >>> numbers = torch.tensor([2.0**-12, 0.25, 0.3, 0.5, 1.0])
    >>> print(histogram_text(exponent_histogram(numbers), FLOAT8_E4M3, low=-18, high=17, height=1))
          ▄         █▄▄
            -10       0         10
    zero────│sub│normal────────│overflow

    Args:
        histogram: the histogram, which may be `shifted` by a loss scale.
        fmt: the format whose range is drawn below it.
        low, high: exponents of the first and last column; counts beyond them are added to these columns.
        height: number of lines of the highest column.

    Raises:
        ValueError: if there is no column or no line.
    """
    if low > high or height < 1:
        raise ValueError(
            f"low={low}, high={high}, height={height}: expected low <= high and height >= 1; "
            "omit them for the range around float16."
        )
    columns = _columns(histogram, low, high)
    return "\n".join(line.rstrip() for line in [*_bars(columns, height), _axis(low, high), _range_line(fmt, low, high)])


def _columns(histogram: ExponentHistogram, low: int, high: int) -> np.ndarray:
    places = np.clip(histogram.exponents, low, high) - low
    return np.bincount(places, weights=histogram.counts, minlength=high - low + 1)  # (columns,)


def _bars(columns: np.ndarray, height: int) -> list[str]:
    """Return the lines from the top; a column that is not empty has at least the lowest block."""
    steps = np.ceil(columns / max(columns.max(), 1) * height * (len(BLOCKS) - 1)).astype(int)
    full = len(BLOCKS) - 1
    filled = [np.clip(steps - full * line, 0, full) for line in reversed(range(height))]  # per line (columns,)
    return ["".join(BLOCKS[step] for step in line) for line in filled]


def _axis(low: int, high: int) -> str:
    """Return the multiples of ten, each starting in its column."""
    labels = {exponent - low: str(exponent) for exponent in range(-(-low // 10) * 10, high + 1, 10)}
    line = ""
    for column, label in labels.items():
        line = line.ljust(column) + label
    return line


def _range_line(fmt: FloatFormat, low: int, high: int) -> str:
    """Return the names of the ranges; the column with the tie at half the smallest subnormal counts as subnormal."""
    lowest_kept = fmt.min_exponent - fmt.mantissa_bits - 1
    edges = [low, lowest_kept, fmt.min_exponent, fmt.max_exponent + 1, high + 1]
    names = ["zero", "subnormal", "normal", "overflow"]
    line = ""
    for name, start, end in zip(names, edges, edges[1:], strict=False):
        width = min(max(end, low), high + 1) - min(max(start, low), high + 1)
        line += f"{'│' if line else ''}{name}".ljust(width, "─")[:width]
    return line
