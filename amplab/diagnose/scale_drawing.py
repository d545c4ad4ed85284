"""Curves of a loss scale as a small SVG: steps to the right, powers of two upwards. Numbers in, text out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from amplab.trace.plain_html import Markup

__all__ = ["scale_drawing"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 220, 44, 24, 8
_MOST_CORNERS = 400
# Okabe and Ito's colours, told apart by nearly everyone; `plain.css` has those for a dark ground. What was recorded has
# the text's. Dashes tell them apart without colour.
_COLOURS = ("currentColor", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2")


def scale_drawing(curves: Mapping[str, Sequence[float]]) -> Markup:
    """Draw loss scales over steps, each a staircase; below it a legend, where curves that are the same share a line.

    Args:
        curves: name -> the scale at every step, finite and > 0; others are left out.
    """
    exponents = [math.log2(scale) for curve in curves.values() for scale in curve if 0.0 < scale < math.inf]
    if not exponents:
        return Markup("")
    low, high = math.floor(min(exponents)), max(math.ceil(max(exponents)), math.floor(min(exponents)) + 1)
    steps = max(map(len, curves.values()))
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, curve in curves.items():
        alike.setdefault(tuple(curve), []).append(name)
    lines = [
        f'<polyline points="{" ".join(_corners(curve, low, high, steps))}" {_stroke(number)}/>'
        for number, curve in enumerate(alike)
    ]
    legend = "".join(_legend(number, ", ".join(names)) for number, names in enumerate(alike.values()))
    label = f'role="img" aria-label="loss scale over {steps} steps of {escape(", ".join(curves))}"'
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%"'
    drawing = (
        f'<svg {size} {label} font-size="11" fill="currentColor">{"".join((*_axis(low, high, steps), *lines))}</svg>'
    )
    return Markup(f'{drawing}<div class="key">{legend}</div>')


def _stroke(number: int) -> str:
    """How a curve is drawn; the first one, what was recorded, is broader."""
    place = number % len(_COLOURS)
    colour = f'stroke="{_COLOURS[place]}" style="stroke:var(--curve-{place}, {_COLOURS[place]})"'
    return f'fill="none" {colour} stroke-width="{2.5 if number == 0 else 2}" stroke-dasharray="{_DASHES[place]}"'


def _corners(curve: Sequence[float], low: int, high: int, steps: int) -> Iterator[str]:
    """The points of a staircase; a curve of more corners than a screen shows is thinned evenly."""
    corners = [step for step, scale in enumerate(curve) if step == 0 or scale != curve[step - 1]]
    corners = corners[:: len(corners) // _MOST_CORNERS + 1]
    heights = [(step, _height(curve[step], low, high)) for step in corners if 0.0 < curve[step] < math.inf]
    for place, (step, height) in enumerate(heights):
        if place:
            yield f"{_across(step, steps)},{heights[place - 1][1]}"
        yield f"{_across(step, steps)},{height}"
    if heights:
        yield f"{_across(len(curve), steps)},{heights[-1][1]}"


def _axis(low: int, high: int, steps: int) -> Iterator[str]:
    every = 2 ** max(0, math.ceil(math.log2((high - low) / 7)))
    for exponent in range(math.ceil(low / every) * every, high + 1, every):
        height = _height(2.0**exponent, low, high)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{_LEFT - 6}" y="{height + 4}" text-anchor="end">2^{exponent}</text>'
    for step, anchor in ((0, "start"), (steps // 2, "middle"), (steps, "end")):
        yield f'<text x="{_across(step, steps)}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {step:,}</text>'


def _legend(number: int, names: str) -> str:
    line = f'<line x1="0" x2="26" y1="5" y2="5" {_stroke(number)}/>'
    return (
        f'<span><svg viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">{line}</svg>{escape(names)}</span>'
    )


def _across(step: int, steps: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * step / max(steps, 1), 1)


def _height(scale: float, low: int, high: int) -> float:
    return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log2(scale)) / (high - low), 1)
