"""Curves of a loss scale as a small SVG: steps to the right, powers of two upwards. Numbers in, text out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

__all__ = ["scale_drawing"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 220, 44, 24, 8
_MOST_CORNERS = 400
# Okabe and Ito's colours, told apart by nearly everyone and on light and dark ground; what was recorded has the text's.
_COLOURS = ("currentColor", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a800")


def scale_drawing(curves: Mapping[str, Sequence[float]]) -> str:
    """Draw loss scales over steps, each curve a staircase with its name in the legend.

    Args:
        curves: name -> the scale at every step, finite and > 0; others are left out.
    """
    exponents = [math.log2(scale) for curve in curves.values() for scale in curve if 0.0 < scale < math.inf]
    if not exponents:
        return ""
    low, high = math.floor(min(exponents)), max(math.ceil(max(exponents)), math.floor(min(exponents)) + 1)
    steps = max(map(len, curves.values()))
    parts = [*_axis(low, high, steps)]
    for number, (name, curve) in enumerate(curves.items()):
        colour, width = _COLOURS[number % len(_COLOURS)], 2.5 if number == 0 else 1.5
        points = " ".join(_corners(curve, low, high, steps))
        beside = f'transform="translate(0 {1.6 * number:.1f})"'  # curves that coincide are all seen
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" {beside}/>')
        parts.append(_legend(number, name, colour))
    label = f'role="img" aria-label="loss scale of {escape(", ".join(curves))}"'
    size = f'viewBox="0 0 {_WIDTH + 100} {_HEIGHT}" width="100%" style="max-width:{_WIDTH + 100}px"'
    return f'<svg {size} {label} font-size="11" fill="currentColor">{"".join(parts)}</svg>'


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
    every = max(1, (high - low) // 6)
    for exponent in range(low, high + 1, every):
        height = _height(2.0**exponent, low, high)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{_LEFT - 6}" y="{height + 4}" text-anchor="end">2^{exponent}</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">step {steps}</text>'


def _legend(number: int, name: str, colour: str) -> str:
    y = _TOP + 12 + 16 * number
    line = f'<line x1="{_WIDTH + 10}" x2="{_WIDTH + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>'
    return f'{line}<text x="{_WIDTH + 29}" y="{y}">{escape(name)}</text>'


def _across(step: int, steps: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * step / max(steps, 1), 1)


def _height(scale: float, low: int, high: int) -> float:
    return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log2(scale)) / (high - low), 1)
