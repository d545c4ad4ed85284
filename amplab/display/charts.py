"""Charts for the lessons, drawn as SVG in the colors of the page, each with one line of numbers as its text.

    line_chart       curves, such as losses over the steps
    scale_drawing    loss scales over the steps
    bar_chart        one number for each name
    exponent_chart   the exponents of many values over the ranges of a format

The text has at most two significant digits, so that it is the same on every CPU.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from amplab.display.axes import LEGEND_LINE, Area, curve_style, legend
from amplab.display.drawings import range_edges
from amplab.display.html import Markup, page, with_still
from amplab.display.numbers import binary_power, power, raised_power
from amplab.display.palette import PALETTE
from amplab.display.text import escape

if TYPE_CHECKING:
    import numpy as np

    from amplab.formats import ExponentHistogram, FloatFormat

__all__ = ["Chart", "bar_chart", "exponent_chart", "line_chart", "scale_drawing"]

_CHARACTER = 6.4  # width
_MOST_POINTS = 400  # of a curve; more are thinned
_MOST_TURNS = 100  # of a curve with a line of full width; one with more is thin, so that others are seen through it
_TITLE = 14  # height of the title, with the space below it


@dataclass(frozen=True)
class Chart:
    """A drawing, and the line of numbers that describes it.

    Attributes:
        drawing: SVG.
        text: what `repr` returns.
    """

    drawing: Markup
    text: str

    def html(self) -> Markup:
        """Return the drawing as a part of a page."""
        return with_still(self.drawing)

    def _repr_html_(self) -> str:
        return page("", self.html())

    def __repr__(self) -> str:
        return self.text


# ---- lines --------------------------------------------------------------------------------------


def line_chart(
    curves: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | None = None,
    x_label: str = "step",
    y_label: str = "",
    log_y: bool = False,
    marks: Mapping[float, str] | None = None,
    holds: bool | None = None,
) -> Chart:
    """Draw curves over a common axis; values that are not finite are marked on the upper edge.

    Of a curve with many values, the least and the greatest of each few neighbors are drawn.

    >>> line_chart({"O0": [2.31, 0.52, 0.118], "O1": [2.31, math.inf, 0.25]}, y_label="loss")
    loss over step 0 to 2: O0 2.3 -> 0.12; O1 2.3 -> 0.25 (1 not finite)

    Args:
        curves: name -> values. With ``log_y=True``, values that are not positive are left out.
        x: the place of each value, ascending; None counts from 0.
        x_label, y_label: what the axes show.
        log_y: whether the vertical axis is logarithmic. Its ticks are powers of two if all values are, else of ten.
        marks: place -> word; a vertical line and its word, which is written once where it repeats.
        holds: whether each value holds until the next one, as a loss scale does; None: if the ticks are powers of two
            because all values are.

    Raises:
        ValueError: there is no curve, or `x` has another length than the longest curve.
    """
    curves = {name: list(values) for name, values in curves.items()}  # arrays too, such as a column of a history
    places = _places(curves, x)
    shown = [value for values in curves.values() for value in values if _is_shown(value, log=log_y)]
    names = list(curves) if len(curves) > 1 or not y_label else []
    key, lines = legend(names, top=16 + _TITLE, triangles=_not_finite(curves, named=bool(names)))
    axis = _Axis.of(shown, log=log_y)
    area = Area(
        first=places[0],
        last=places[-1] if places[-1] > places[0] else places[0] + 1.0,
        low=axis.low,
        high=axis.high,
        height=254 + LEGEND_LINE * lines,
        top=28 + LEGEND_LINE * lines,
        bottom=40,
    )
    parts = [*axis.grid(area), *area.across(x_label), *_words(area, marks or {}), _title(y_label)]
    for number, (name, values) in enumerate(curves.items()):
        parts += _curve(area, axis, places, values, number=number, holds=axis.binary if holds is None else holds)
        parts += [
            area.triangle(place, f"{name}: not finite")
            for place, value in zip(places, values, strict=False)
            if not math.isfinite(value)
        ]
    text = f"{y_label or 'value'} over {x_label} {_rough(places[0])} to {_rough(places[-1])}: " + "; ".join(
        f"{name} {_ends(values)}" for name, values in curves.items()
    )
    return Chart(area.svg([*parts, *key], text), text)


def _places(curves: Mapping[str, Sequence[float]], x: Sequence[float] | None) -> Sequence[float]:
    longest = max(map(len, curves.values()), default=0)
    if not longest:
        raise ValueError(f"curves={dict(curves)!r}: expected a name with at least one value.")
    if x is not None and len(x) != longest:
        raise ValueError(f"x has {len(x)} values and the longest curve {longest}: expected the same number.")
    return range(longest) if x is None else x


def _not_finite(curves: Mapping[str, Sequence[float]], *, named: bool) -> str:
    """The entry of the legend for the triangles: which curves have values that are not finite."""
    broken = [name for name, values in curves.items() if not all(map(math.isfinite, values))]
    if not broken:
        return ""
    return f"not finite: {', '.join(broken)}" if named else "not finite"


def _is_shown(value: float, *, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


@dataclass(frozen=True)
class _Axis:
    """The vertical axis; a logarithmic one counts in powers of two."""

    low: float
    high: float
    log: bool
    binary: bool

    @classmethod
    def of(cls, values: Sequence[float], *, log: bool) -> _Axis:
        heights = [math.log2(value) for value in values] if log else list(values)
        binary = log and all(height == round(height) for height in heights)
        low, high = min(heights, default=0.0), max(heights, default=1.0)
        if log:
            beyond = 0.5 if high > low else 1.5  # a constant has a power of two above and below it
            return cls(math.floor(low) - beyond, math.ceil(high) + beyond, log, binary)
        low = 0.0 if 0.0 <= low <= 0.6 * high else low  # an axis that can start at zero does
        span = (high - low) or abs(high) or 1.0
        return cls(low - (0.05 * span if low else 0.0), high + 0.05 * span, log, binary)

    def height_of(self, value: float) -> float:
        """Return the place of a value on the axis, NaN if it has none."""
        if not _is_shown(value, log=self.log):
            return math.nan
        return math.log2(value) if self.log else value

    def grid(self, area: Area) -> Iterator[str]:
        if not self.log or self.binary:
            return area.grid(binary=self.binary)
        return self._decades(area)

    def _decades(self, area: Area) -> Iterator[str]:
        digits = math.log2(10.0)
        lowest, highest = math.ceil(self.low / digits), math.floor(self.high / digits)
        if highest - lowest < 1:  # less than two powers of ten: powers of two
            yield from area.grid(binary=True)
            return
        every = max(1, math.ceil((highest - lowest) / 7))
        small = lowest < -3 or highest > 4
        for exponent in range(lowest, highest + 1, every):
            yield area.grid_line(exponent * digits, raised_power(10, exponent) if small else f"{10.0**exponent:g}")


def _title(label: str) -> str:
    return f'<text x="2" y="12" font-weight="600">{escape(label)}</text>'


def _words(area: Area, marks: Mapping[float, str]) -> Iterator[str]:
    """A vertical line for each mark; the word stands on the side that has room, and not over the one before."""
    free, written = -math.inf, None
    for place, word in sorted(marks.items()):
        if not area.first <= place <= area.last:
            continue
        at, length = area.x(place), 6 * len(word)
        yield (
            f'<line x1="{at}" x2="{at}" y1="{area.top - 4}" y2="{area.height - area.bottom}" stroke="currentColor" '
            f'opacity="0.5" stroke-dasharray="2 3"><title>{escape(word)}</title></line>'
        )
        turned = at + length > area.width
        start = at - 4 - length if turned else at + 4
        if start >= free and word != written:
            free, written = start + length, word
            side = f'x="{at - 4:.1f}" text-anchor="end"' if turned else f'x="{at + 4:.1f}"'
            yield f'<text {side} y="{area.top + 4}" font-size="10">{escape(word)}</text>'


def _curve(
    area: Area, axis: _Axis, places: Sequence[float], values: Sequence[float], *, number: int, holds: bool
) -> Iterator[str]:
    """The lines between the values that are shown; a value that is not shown is a gap."""
    heights = [axis.height_of(value) for value in values]
    run: list[str] = []
    chosen = _thinned(_corners(heights) if holds else range(len(heights)), heights)
    style = curve_style(number, width=1 if _turns([heights[place] for place in chosen]) > _MOST_TURNS else None)
    for place in chosen:
        if math.isnan(heights[place]):
            if run:
                yield _stroke(run, style)
            run = []
            continue
        if holds and run:
            run.append(f"{area.x(places[place])},{run[-1].partition(',')[2]}")
        run.append(f"{area.x(places[place])},{area.y(heights[place])}")
    if run:
        yield _stroke(run, style)


def _turns(heights: Sequence[float]) -> int:
    """Return how often values stop rising or falling."""
    steps = [after - before for before, after in pairwise(heights)]
    return sum(after * before < 0 for before, after in pairwise(steps))


def _corners(heights: Sequence[float]) -> list[int]:
    """Return the places where a value is not the one before, and the last."""
    last = len(heights) - 1
    return [place for place in range(len(heights)) if place in (0, last) or heights[place] != heights[place - 1]]


def _thinned(chosen: Sequence[int], heights: Sequence[float]) -> list[int]:
    """Return the ends and, of each few neighbors, the least and the greatest: no peak is lost."""
    if len(chosen) <= _MOST_POINTS:
        return list(chosen)
    size = math.ceil(2 * len(chosen) / _MOST_POINTS)
    kept = {chosen[0], chosen[-1]}
    for start in range(0, len(chosen), size):
        group = chosen[start : start + size]
        shown = [place for place in group if not math.isnan(heights[place])] or group[:1]
        kept |= {min(shown, key=heights.__getitem__), max(shown, key=heights.__getitem__)}
    return sorted(kept)


def _stroke(points: Sequence[str], style: str) -> str:
    if len(points) == 1:  # a line of one point is not drawn: a short line
        across, up = points[0].split(",")
        points = [points[0], f"{float(across) + 2:.1f},{up}"]
    return f'<polyline points="{" ".join(points)}" {style}/>'


def _ends(values: Sequence[float]) -> str:
    """The first and the last value in words."""
    if not values:
        return "no value"
    broken = sum(not math.isfinite(value) for value in values)
    return f"{_rough(values[0])} -> {_rough(values[-1])}" + (f" ({broken} not finite)" if broken else "")


def _rough(value: float) -> str:
    """Return a number with two significant digits; integers below 10⁶ and powers of two are exact."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    if value > 0 and math.frexp(value)[0] == 0.5 and not 2.0**-4 <= value <= 2.0**9:
        return power(value)
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{float(f'{value:.1e}'):g}"


def scale_drawing(curves: Mapping[str, Sequence[float] | np.ndarray]) -> Markup:
    """Draw loss scales over steps, with a legend in which equal curves share an entry.

    Args:
        curves: name -> the scale at every step.
    """
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, curve in curves.items():
        alike.setdefault(tuple(map(float, curve)), []).append(name)
    named = {", ".join(names): scales for scales, names in alike.items()}
    return line_chart(named, y_label="loss scale", log_y=True, holds=True).html()


# ---- bars ---------------------------------------------------------------------------------------

_BAR, _APART = 22, 8  # height of a bar, space to the next


def bar_chart(
    values: Mapping[str, float],
    *,
    unit: str = "",
    label: str = "",
    whole: float | None = None,
    muted: Container[str] = (),
) -> Chart:
    """Draw one horizontal bar for each name, from zero.

    >>> bar_chart({"O0": 1.0, "O1": 0.52}, unit="MB", label="memory of the model")
    memory of the model: O0 1 MB, O1 0.52 MB

    Args:
        values: name -> number; one that is not finite or is negative has no bar, only its text.
        unit: written after each number.
        label: what the numbers are.
        whole: the number of a bar of full length, so that drawings can be compared; None: the largest value.
        muted: names whose bars are gray, such as those of before a change. The names must tell it too: color is never
            the only difference.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("values={}: expected at least one name with a number.")
    largest = max([whole or 0.0, *(value for value in values.values() if math.isfinite(value))])
    said = {name: f"{_rough(value)} {unit}".strip() for name, value in values.items()}
    left = 14 + _CHARACTER * max(map(len, values))
    room = 760 - left - 16 - _CHARACTER * max(map(len, said.values()))
    top = 24 if label else 4
    parts = [_title(label)] if label else []
    for place, (name, value) in enumerate(values.items()):
        wide = round(room * value / largest, 1) if 0 < value < math.inf else 0.0
        color = "curve-7" if name in muted else "accent"
        parts += _bar(name, said[name], left=round(left, 1), top=top + place * (_BAR + _APART), wide=wide, color=color)
    text = (f"{label}: " if label else "") + ", ".join(f"{name} {words}" for name, words in said.items())
    height = top + len(values) * (_BAR + _APART)
    area = Area(first=0, last=1, low=0, high=1, height=height)
    return Chart(area.svg(parts, text), text)


def _bar(name: str, said: str, *, left: float, top: int, wide: float, color: str) -> Iterator[str]:
    plain = PALETTE[color][0]  # where no style sheet sets the color of the theme
    line = top + _BAR // 2 + 4
    yield f'<text x="{left - 8:.1f}" y="{line}" text-anchor="end">{escape(name)}</text>'
    yield (
        f'<rect x="{left}" y="{top}" width="{wide}" height="{_BAR}" rx="2" fill="{plain}" '
        f'style="fill:var(--amp-{color}, {plain})"/>'
    )
    yield f'<text x="{left + wide + 7:.1f}" y="{line}">{escape(said)}</text>'


# ---- exponents ----------------------------------------------------------------------------------

_BELOW, _ABOVE = 20, 8  # powers of two shown below and above the range of the format


def exponent_chart(histogram: ExponentHistogram, fmt: FloatFormat, *, shift: int = 0) -> Chart:
    """Draw the share of the values in each power of two, over the ranges of a format.

    The axis stays where it is, and the bars move with `shift`. Values beyond the axis are counted in its first or last
    bar. A value in the range "zero" is flushed to zero by the format.

    >>> import torch
    >>> from amplab.formats import FLOAT16, exponent_histogram
    >>> exponent_chart(exponent_histogram(torch.tensor([2.0**-30, 2.0**-20, 1.0, 3.0])), FLOAT16, shift=8)
    float16, values × 2^8: 0 % zero, 25 % subnormal, 75 % normal, 0 % overflow

    Args:
        histogram: exponents of the values, such as gradients; zeros are not counted.
        fmt: the format.
        shift: the values are multiplied by 2^shift, as by a loss scale.
    """
    moved = histogram.shifted(shift)
    lost, normal, top = range_edges(fmt)
    area = Area(first=lost - _BELOW, last=top + _ABOVE, low=0.0, high=1.0, height=210, left=8, top=42, bottom=36)
    edges = {"zero": area.first, "subnormal": lost, "normal": normal, "overflow": top}
    counts = dict(zip(moved.exponents.tolist(), moved.counts.tolist(), strict=True))
    total = max(sum(counts.values()), 1)
    parts: list[str] = []
    words: list[str] = []
    for (name, start), end in zip(edges.items(), [lost, normal, top, area.last], strict=True):
        first = -math.inf if name == "zero" else start
        last = math.inf if name == "overflow" else end
        share = _share(sum(times for exponent, times in counts.items() if first <= exponent < last), total)
        words.append(f"{share} {name}")
        parts += _range(area, name, share, start, end)
    parts += _exponent_bars(area, counts, lost, top)
    parts += _exponent_ticks(area)
    scaled = f", values × 2^{shift}" if shift else ""
    text = f"{fmt.name}{scaled}: {', '.join(words)}" if moved.finite_nonzero else f"{fmt.name}{scaled}: only zeros"
    return Chart(area.svg(parts, text), text)


def _share(count: int, total: int) -> str:
    """Return a share as a whole percentage; neither a few nor all but a few are rounded away."""
    share = 100 * count / total
    if 0 < share < 1:
        return "<1 %"
    return ">99 %" if 99 < share < 100 else f"{share:.0f} %"


def _range(area: Area, name: str, share: str, start: float, end: float) -> Iterator[str]:
    """The ground of one range, its name and the share of the values in it."""
    left, wide = area.x(start), area.x(end) - area.x(start)
    lost = name in ("zero", "overflow")
    color = 'style="fill:var(--amp-error, #c0123c)"' if lost else 'style="fill:var(--amp-float16, #e69f00)"'
    opacity = {"zero": 0.1, "subnormal": 0.12, "normal": 0.24, "overflow": 0.1}[name]
    tall = area.height - area.top - area.bottom
    yield f'<rect x="{left}" y="{area.top}" width="{wide:.1f}" height="{tall}" {color} opacity="{opacity}"/>'
    if wide >= 54:
        center = f'x="{left + wide / 2:.1f}" text-anchor="middle"'
        yield f'<text {center} y="14">{name}</text>'
        yield f'<text {center} y="32" font-size="14" font-weight="600">{share}</text>'


def _exponent_bars(area: Area, counts: Mapping[int, int], lost: int, top: int) -> Iterator[str]:
    columns: dict[int, int] = {}
    for exponent, times in counts.items():
        place = min(max(exponent, int(area.first)), int(area.last) - 1)
        columns[place] = columns.get(place, 0) + times
    largest = max(columns.values(), default=0)
    bars: dict[str, str] = {}
    for exponent, times in sorted(columns.items()):
        if times:
            left, wide = area.x(exponent), area.x(exponent + 1) - area.x(exponent)
            tall = max(1.5, (area.height - area.top - area.bottom - 6) * times / largest)
            kind = "note" if lost <= exponent < top else "error"
            bar = f"M{left + 0.5:.1f} {area.height - area.bottom}v{-tall:.1f}h{wide - 1:.1f}v{tall:.1f}z"
            bars[kind] = bars.get(kind, "") + bar
    fallback = {"note": "#5b7190", "error": "#c0123c"}
    for kind, drawn in bars.items():
        yield f'<path d="{drawn}" style="fill:var(--amp-{kind}, {fallback[kind]})"/>'


def _exponent_ticks(area: Area) -> Iterator[str]:
    every = 8 if area.last - area.first <= 100 else 32
    base = area.height - area.bottom
    ends = f'x1="{area.left}" x2="{area.width - area.right}" y1="{base}" y2="{base}"'
    yield f'<line {ends} stroke="currentColor" opacity="0.4"/>'
    for exponent in range(math.ceil(area.first / every) * every, int(area.last) + 1, every):
        at = area.x(exponent)
        yield f'<text x="{at}" y="{base + 14}" text-anchor="middle">{binary_power(exponent)}</text>'
    center = (area.left + area.width - area.right) / 2
    yield f'<text x="{center}" y="{area.height - 4}" text-anchor="middle">magnitude of a value</text>'
