"""What the SVG charts share: the area with its grid and ticks, the look of curve number n, and the legend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amplab.display.html import Markup
from amplab.display.numbers import binary_power, short_text
from amplab.display.palette import CURVES, PALETTE
from amplab.display.text import escape

__all__ = ["LEGEND_LINE", "Area", "curve_style", "legend", "round_part"]

LEGEND_LINE = 18
"""The height of a line of a legend."""

_WIDTH, _LEGEND_LEFT = 760, 52.0
_CHARACTER = 6.4  # width
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2")


@dataclass(frozen=True, kw_only=True)
class Area:
    """The area of a chart: `first` to `last` across, `low` to `high` upwards, in units of the drawing.

    Attributes:
        first, last: Ends of the horizontal axis.
        low, high: Ends of the vertical axis.
        width, height: Size of the whole drawing.
        left, right, top, bottom: Margins around the area.
    """

    first: float
    last: float
    low: float
    high: float
    width: int = 760
    height: int = 196
    left: int = 52
    right: int = 8
    top: int = 26
    bottom: int = 24

    def x(self, value: float) -> float:
        """Return the place of a value across."""
        share = (value - self.first) / (self.last - self.first)
        return round(self.left + (self.width - self.left - self.right) * share, 1)

    def y(self, value: float) -> float:
        """Return the place of a value upwards, counted from the top as in SVG."""
        share = (self.high - value) / (self.high - self.low)
        return round(self.top + (self.height - self.top - self.bottom) * share, 1)

    def grid(self, *, binary: bool = False) -> Iterator[str]:
        """Yield the lines and the numbers of the vertical axis; `binary` writes the tick n as 2ⁿ."""
        span = self.high - self.low
        every = 2 ** max(0, math.ceil(math.log2(span / 7))) if binary else round_part(span / 4)
        for number in range(math.ceil(self.low / every), math.floor(self.high / every) + 1):
            tick = number * every
            yield self.grid_line(tick, binary_power(round(tick)) if binary else _tick_text(float(tick), every))

    def grid_line(self, tick: float, label: str) -> str:
        """Return one line of the grid with its number."""
        at = self.y(tick)
        return (
            f'<line x1="{self.left}" x2="{self.width - self.right}" y1="{at}" y2="{at}" stroke="currentColor" '
            f'opacity="0.15"/><text x="{self.left - 6}" y="{at + 4}" text-anchor="end">{label}</text>'
        )

    def across(self, label: str = "") -> Iterator[str]:
        """Yield the numbers of the horizontal axis, each below a short line, and what the axis shows.

        Between two integers, such as the first and the last step, the numbers are integers.
        """
        every = round_part((self.last - self.first) / 4)
        if float(self.first).is_integer() and float(self.last).is_integer():
            every = max(every, 1.0)
        base = self.height - self.bottom
        for number in range(math.ceil(self.first / every - 1e-9), math.floor(self.last / every + 1e-9) + 1):
            tick = number * every
            at, word = self.x(tick), _tick_text(tick, every)
            place = f'x="{at}" text-anchor="middle"'
            if at + _CHARACTER * len(word) / 2 > self.width:
                place = f'x="{self.width}" text-anchor="end"'
            yield f'<path d="M{at} {base}v4" stroke="currentColor" opacity="0.4"/>'
            yield f'<text {place} y="{base + 16}">{word}</text>'
        if label:
            center = (self.left + self.width - self.right) / 2
            yield f'<text x="{center}" y="{self.height - 4}" text-anchor="middle">{escape(label)}</text>'

    def triangle(self, at: float, said: str) -> str:
        """Return a mark above the area that points down to the value `at`."""
        return _triangle(self.x(at), self.top + 1, f"<title>{escape(said)}</title>")

    def svg(self, parts: Sequence[str], said: str) -> Markup:
        """Return the drawing; `said` describes it for screen readers."""
        return Markup(
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" style="max-width:100%" role="img" '
            f'font-size="11" aria-label="{escape(said)}" fill="currentColor">{"".join(parts)}</svg>'
        )


def _tick_text(tick: float, every: float) -> str:
    """Return the number of a tick with as many digits as tell it from the next one, at least 3 and at most 6."""
    if tick.is_integer() and abs(tick) < 1e6:
        return f"{tick:,.0f}"
    digits = 1 + math.floor(math.log10(abs(tick) / every) + 1e-9) if tick else 1
    return short_text(tick, digits=min(max(digits + 1, 3), 6))


def _triangle(at: float, tip: float, inside: str = "") -> str:
    """A triangle with its tip down."""
    return (
        f'<path d="M{at - 4:.1f} {tip - 7:g}h8l-4 7z" fill="#c04f00" style="fill:var(--amp-warning, #c04f00)">'
        f"{inside}</path>"
    )


def round_part(value: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is at most `value`."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * each for each in (5, 2, 1) if unit * each <= value)


def curve_style(number: int, *, width: float | None = None) -> str:
    """Return the attributes of a curve's line: its own color and dashes; the first one is wider."""
    place = number % len(CURVES)
    light, _ = PALETTE[CURVES[place]]
    color = f'stroke="{light}" style="stroke:var(--amp-{CURVES[place]}, {light})"'
    shown = width or (2.5 if number == 0 else 2)
    return f'fill="none" {color} stroke-width="{shown}" stroke-dasharray="{_DASHES[place]}"'


def legend(names: Sequence[str], *, top: float, triangles: str = "") -> tuple[list[str], int]:
    """Return the names of curves, in their order, each after a piece of its line, and how many lines of text they take.

    Args:
        names: they wrap at the width of an `Area`.
        top: where the base line of the first line of text is; the next ones are `LEGEND_LINE` below each other.
        triangles: what the triangles above the area mean; empty: there are none.
    """
    parts, left, line = [], _LEGEND_LEFT, 0
    for number, name in enumerate([*names, triangles] if triangles else names):
        is_curve = number < len(names)
        sign = 26 if is_curve else 8  # width of what stands before the name
        wide = sign + 8 + _CHARACTER * len(name) + 18
        if left > _LEGEND_LEFT and left + wide > _WIDTH:
            left, line = _LEGEND_LEFT, line + 1
        up = top + LEGEND_LINE * line
        stroke = f'<path d="M{left:.0f} {up - 4:g}h26" {curve_style(number)}/>'
        parts.append(stroke if is_curve else _triangle(left + 4, up - 1))
        parts.append(f'<text x="{left + sign + 7:.0f}" y="{up:g}">{escape(name)}</text>')
        left += wide
    return parts, line + 1 if parts else 0
