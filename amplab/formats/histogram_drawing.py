"""An exponent histogram drawn in plain text above the range of a format, for consoles and notebooks.

One column per power of two, so that a loss scale of 2^k moves the picture k columns to the right.
"""

import numpy as np

from amplab.formats.exponents import ExponentHistogram
from amplab.formats.float_format import FloatFormat

__all__ = ["histogram_text"]

BLOCKS = " ▁▂▃▄▅▆▇█"


def histogram_text(
    histogram: ExponentHistogram, fmt: FloatFormat, *, low: int = -45, high: int = 24, height: int = 4
) -> str:
    """Draw the histogram, an axis of exponents, and what `fmt` does to each column.

    >>> import torch
    >>> from amplab.formats import FLOAT8_E4M3, exponent_histogram
    >>> numbers = torch.tensor([2.0**-12, 0.25, 0.3, 0.5, 1.0])
    >>> print(histogram_text(exponent_histogram(numbers), FLOAT8_E4M3, low=-18, high=17, height=1))
          ▄         █▄▄
            -10       0         10
    zero────│sub│normal────────│overflow

    Args:
        histogram: what to draw, perhaps `shifted` by a loss scale.
        fmt: the format whose range is drawn below.
        low, high: exponents of the first and last column; counts beyond them are added to these columns.
        height: lines of the picture; the fullest column fills them all.

    Raises:
        ValueError: if there is no column, or no line to draw in.
    """
    if low > high or height < 1:
        raise ValueError(
            f"low={low}, high={high}, height={height}: expected low <= high and height >= 1; "
            "leave them out for float16's surroundings."
        )
    columns = _columns(histogram, low, high)
    return "\n".join(line.rstrip() for line in [*_bars(columns, height), _axis(low, high), _range_line(fmt, low, high)])


def _columns(histogram: ExponentHistogram, low: int, high: int) -> np.ndarray:
    places = np.clip(histogram.exponents, low, high) - low
    return np.bincount(places, weights=histogram.counts, minlength=high - low + 1)  # (columns,)


def _bars(columns: np.ndarray, height: int) -> list[str]:
    """Lines from the top; a column that is not empty shows at least its lowest step."""
    steps = np.ceil(columns / max(columns.max(), 1) * height * (len(BLOCKS) - 1)).astype(int)
    full = len(BLOCKS) - 1
    filled = [np.clip(steps - full * line, 0, full) for line in reversed(range(height))]  # per line (columns,)
    return ["".join(BLOCKS[step] for step in line) for line in filled]


def _axis(low: int, high: int) -> str:
    """Exponents that are multiples of ten, each written from its own column on."""
    labels = {exponent - low: str(exponent) for exponent in range(-(-low // 10) * 10, high + 1, 10)}
    line = ""
    for column, label in labels.items():
        line = line.ljust(column) + label
    return line


def _range_line(fmt: FloatFormat, low: int, high: int) -> str:
    """Name what happens to the columns; a column of ties at the bottom counts as kept."""
    lowest_kept = fmt.min_exponent - fmt.mantissa_bits - 1
    edges = [low, lowest_kept, fmt.min_exponent, fmt.max_exponent + 1, high + 1]
    names = ["zero", "subnormal", "normal", "overflow"]
    line = ""
    for name, start, end in zip(names, edges, edges[1:], strict=False):
        width = min(max(end, low), high + 1) - min(max(start, low), high + 1)
        line += f"{'│' if line else ''}{name}".ljust(width, "─")[:width]
    return line
