"""SVG charts of one run: a value over its steps, with the changes and the skipped steps marked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from amplab.display.axes import Area
from amplab.display.html import Markup
from amplab.display.text import escape

__all__ = ["run_chart"]

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
    area = Area(first=steps[0], last=max(steps[-1], steps[0] + 1), low=low, high=high)
    pairs = list(zip(steps, heights, strict=True))
    parts = [
        *area.grid(binary=binary),
        *area.across(),
        *_changes(changes, area),
        f'<polyline points="{" ".join(_points(pairs, area, holds=binary))}" fill="none" stroke="#0b6bb8" '
        'style="stroke:var(--amp-accent, #0b6bb8)" stroke-width="1.8"/>',
        *(area.triangle(step, "not finite") for step, height in pairs if not math.isfinite(height)),
        *(area.triangle(step, "skipped") for step in skips if area.first <= step <= area.last),
    ]
    said = f"{title} over steps {area.first:,.0f} to {area.last:,.0f}, from {values[0]:.4g} to {values[-1]:.4g}"
    return area.svg([f'<text x="2" y="12" font-weight="600">{escape(title)}</text>', *parts], said)


def _height_of(value: float, *, binary: bool) -> float:
    if not binary:
        return value
    return math.log2(value) if 0 < value < math.inf else math.nan


def _ends(heights: Sequence[float], *, binary: bool) -> tuple[float, float]:
    low, high = min(heights), max(heights)
    if binary:
        return math.floor(low) - 1.0, math.ceil(high) + 1.0
    return min(0.0, low), high * 1.04 if high > 0 else low + 1.0


def _changes(changes: Iterable[tuple[int, str]], area: Area) -> Iterator[str]:
    """A line at each change, and its label where there is room."""
    labeled = -math.inf
    for step, label in changes:
        at = area.x(min(max(step, area.first), area.last))
        if step > area.first:
            yield (
                f'<line x1="{at}" x2="{at}" y1="{area.top - 4}" y2="{area.height - area.bottom}" stroke="currentColor" '
                f'opacity="0.5" stroke-dasharray="2 3"><title>{escape(label)}</title></line>'
            )
        if at - labeled >= _APART and at < area.width - _APART:
            labeled = at
            yield f'<text x="{at + 3}" y="{area.top + 2}" font-size="10">{escape(label)}</text>'


def _points(pairs: Sequence[tuple[float, float]], area: Area, *, holds: bool) -> Iterator[str]:
    before = None
    for step, height in pairs:
        if not math.isfinite(height):
            continue
        at = area.y(height)
        if holds and before is not None and before != at:
            yield f"{area.x(step)},{before}"
        if not holds or before != at or step == pairs[-1][0]:
            yield f"{area.x(step)},{at}"
        before = at
