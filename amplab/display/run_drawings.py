"""SVG charts of one run: a value over its steps, with the changes and the skipped steps marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from amplab.display.html import Markup
from amplab.display.numbers import binary_power

__all__ = ["run_chart"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 196, 52, 8, 26, 24
_APART = 46  # units between two labels of changes


def run_chart(
    steps: Sequence[float],
    values: Sequence[float],
    *,
    title: str,
    binary: bool = False,
    changes: Iterable[tuple[int, str]] = (),
    skips: Iterable[int] = (),
) -> Markup:
    """Draw a value over steps.

    Args:
        steps: The steps, ascending.
        values: The value at each; those that are not finite are marked on the upper edge.
        title: What the value is.
        binary: Whether the axis is that of powers of two; then the value holds until it changes.
        changes: (step, label) of each change.
        skips: Skipped steps.
    """
    heights = [_height_of(value, binary=binary) for value in values]
    finite = [height for height in heights if math.isfinite(height)]
    if not finite:
        return Markup(f"<p>{escape(title)}: no finite value.</p>")
    low, high = _ends(finite, binary=binary)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / (last - first), 1)

    def y(height: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - height) / (high - low), 1)

    pairs = list(zip(steps, heights, strict=True))
    parts = [
        *_grid(low, high, y, binary=binary),
        *(
            f'<text x="{x(step)}" y="{_HEIGHT - 7}" text-anchor="{at}">{step:,.0f}</text>'
            for step, at in _marks(first, last)
        ),
        *_changes(changes, x, first, last),
        f'<polyline points="{" ".join(_points(pairs, x, y, holds=binary))}" fill="none" stroke="#0b6bb8" '
        'style="stroke:var(--amp-accent, #0b6bb8)" stroke-width="1.8"/>',
        *(_triangle(x(step), "not finite") for step, height in pairs if not math.isfinite(height)),
        *(_triangle(x(step), "skipped") for step in skips if first <= step <= last),
    ]
    said = f"{title} over steps {first:,.0f} to {last:,.0f}, from {values[0]:.4g} to {values[-1]:.4g}"
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%" role="img" font-size="11" '
        f'aria-label="{escape(said)}" fill="currentColor">'
        f'<text x="2" y="12" font-weight="600">{escape(title)}</text>{"".join(parts)}</svg>'
    )


def _height_of(value: float, *, binary: bool) -> float:
    if not binary:
        return value
    return math.log2(value) if 0 < value < math.inf else math.nan


def _ends(heights: Sequence[float], *, binary: bool) -> tuple[float, float]:
    low, high = min(heights), max(heights)
    if binary:
        return math.floor(low) - 1.0, math.ceil(high) + 1.0
    return min(0.0, low), high * 1.04 if high > 0 else low + 1.0


def _grid(low: float, high: float, y: Callable[[float], float], *, binary: bool) -> Iterator[str]:
    """Lines and numbers of the vertical axis."""
    every = 2 ** max(0, math.ceil(math.log2((high - low) / 7))) if binary else _round_part((high - low) / 4)
    tick = math.ceil(low / every) * every
    while tick <= high:
        at = y(tick)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="currentColor" opacity="0.15"/>'
        label = binary_power(round(tick)) if binary else f"{tick:.3g}"
        yield f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>'
        tick += every


def _round_part(value: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is at most `value`."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * each for each in (5, 2, 1) if unit * each <= value)


def _marks(first: float, last: float) -> tuple[tuple[float, str], ...]:
    return (first, "start"), ((first + last) // 2, "middle"), (last, "end")


def _changes(
    changes: Iterable[tuple[int, str]], x: Callable[[float], float], first: float, last: float
) -> Iterator[str]:
    """A line at each change, and its label where there is room."""
    labeled = -math.inf
    for step, label in changes:
        at = x(min(max(step, first), last))
        if step > first:
            yield (
                f'<line x1="{at}" x2="{at}" y1="{_TOP - 4}" y2="{_HEIGHT - _BOTTOM}" stroke="currentColor" '
                f'opacity="0.5" stroke-dasharray="2 3"><title>{escape(label)}</title></line>'
            )
        if at - labeled >= _APART and at < _WIDTH - _APART:
            labeled = at
            yield f'<text x="{at + 3}" y="{_TOP + 2}" font-size="10">{escape(label)}</text>'


def _points(
    pairs: Sequence[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float], *, holds: bool
) -> Iterator[str]:
    before = None
    for step, height in pairs:
        if not math.isfinite(height):
            continue
        at = y(height)
        if holds and before is not None and before != at:
            yield f"{x(step)},{before}"
        if not holds or before != at or step == pairs[-1][0]:
            yield f"{x(step)},{at}"
        before = at


def _triangle(at: float, said: str) -> str:
    return (
        f'<path d="M{at - 4} {_TOP - 6}h8l-4 7z" fill="#c04f00" style="fill:var(--amp-warning, #c04f00)">'
        f"<title>{said}</title></path>"
    )
