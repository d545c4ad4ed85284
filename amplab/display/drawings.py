"""Small SVG drawings in the cells of a table: losses and exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amplab.display.html import Markup

if TYPE_CHECKING:
    from amplab.formats import ExponentHistogram, FloatFormat

__all__ = ["exponent_drawing", "loss_drawing", "range_edges"]

_SMALL_WIDTH, _SMALL_HEIGHT = 120, 26
_MOST_POINTS = 120  # points; more are thinned evenly


def loss_drawing(losses: Sequence[float], of_all: Sequence[Sequence[float]]) -> Markup:
    """Draw losses step by step; a cross marks the first that is not finite.

    Args:
        losses: the losses of one run.
        of_all: the losses of every run of the table, which share an axis; the last one, the reference, is drawn
            faintly behind.
    """
    finite = [loss for run in of_all for loss in run if math.isfinite(loss)]
    if not finite or not losses:
        return Markup("–")
    low, high, steps = min(finite), max(finite), max(map(len, of_all))
    reference = _line(of_all[-1], low, high, steps, "stroke:currentColor; opacity:0.4; stroke-width:1.5")
    own = _line(losses, low, high, steps, "stroke:currentColor; stroke-width:1.5")
    shown = [loss for loss in losses if math.isfinite(loss)]
    said = f"loss from {shown[0]:.4g} to {shown[-1]:.4g}" if shown else "no finite loss"
    size = f'viewBox="0 0 {_SMALL_WIDTH} {_SMALL_HEIGHT}" width="{_SMALL_WIDTH}" height="{_SMALL_HEIGHT}"'
    return Markup(
        f'<svg class="small" {size} role="img" aria-label="{said}">'
        f"<title>{said}</title>{reference}{own}{_end(losses, low, high, steps)}</svg>"
    )


def _line(losses: Sequence[float], low: float, high: float, steps: int, style: str) -> str:
    every = len(losses) // _MOST_POINTS + 1
    points = (_point(step, losses[step], low, high, steps) for step in range(0, len(losses), every))
    return f'<polyline points="{" ".join(filter(None, points))}" style="fill:none; {style}"/>'


def _end(losses: Sequence[float], low: float, high: float, steps: int) -> str:
    """A cross after the last finite loss, if a loss that is not finite follows."""
    broken = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if broken is None:
        return ""
    before = losses[broken - 1] if broken else high
    x, y = _point(broken, before, low, high, steps).split(",")
    return f'<path d="M{x} {y}m-3-3l6 6m0-6l-6 6" style="stroke:var(--amp-error); stroke-width:2"/>'


def _point(step: int, loss: float, low: float, high: float, steps: int) -> str:
    if not math.isfinite(loss):
        return ""
    across = 4 + (_SMALL_WIDTH - 8) * step / max(steps - 1, 1)
    return f"{across:.1f},{3 + (_SMALL_HEIGHT - 6) * (high - loss) / ((high - low) or 1.0):.1f}"


_RANGE_WIDTH, _RANGE_HEIGHT = 240, 22  # pixels
_BIN, _BEYOND = 4, 8  # units for each power of two; powers of two shown on either side of the format's range


def exponent_drawing(histogram: ExponentHistogram, fmt: FloatFormat) -> Markup:
    """Draw how often each exponent occurs, as bars on a logarithmic scale, over the range of a format.

    The shaded frame is the range of the format, its lighter part the subnormals. Bars outside of it have the color of
    an error: the format flushes those on the left to zero, and those on the right overflow.
    """
    lost, normal, top = range_edges(fmt)
    low, high = lost - _BEYOND, top + _BEYOND
    largest = max(int(histogram.counts.max()), 1)
    bars: dict[str, str] = {}
    for exponent, times in zip(histogram.exponents.tolist(), histogram.counts.tolist(), strict=True):
        if times:
            left = _BIN * (min(max(exponent, low), high - 1) - low)
            tall = max(2.0, _RANGE_HEIGHT * math.log1p(times) / math.log1p(largest))
            kind = "float16" if lost <= exponent < top else "error"
            bars[kind] = bars.get(kind, "") + f"M{left} {_RANGE_HEIGHT}v{-tall:.1f}h{_BIN - 1}v{tall:.1f}z"
    paths = "".join(f'<path d="{drawn}" style="fill:var(--amp-{kind})"/>' for kind, drawn in bars.items())
    span = "only zeros" if histogram.span is None else f"from 2^{histogram.span[0]} to 2^{histogram.span[1]}"
    return Markup(
        f'<svg class="small" viewBox="0 0 {_BIN * (high - low)} {_RANGE_HEIGHT}" width="{_RANGE_WIDTH}" '
        f'height="{_RANGE_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="exponents {span}">'
        f"<title>{span}</title>{_frame(lost - low, normal - low, 0.07)}{_frame(normal - low, top - low, 0.13)}"
        f"{paths}</svg>"
    )


def range_edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return the first exponent that `fmt` does not flush, the first normal one, and the first that overflows."""
    kept = round(math.log2(fmt.smallest_subnormal)) - 1
    return kept, round(math.log2(fmt.smallest_normal)), fmt.max_exponent + 1


def _frame(start: int, end: int, opacity: float) -> str:
    size = f'width="{_BIN * (end - start)}" height="{_RANGE_HEIGHT}"'
    return f'<rect x="{_BIN * start}" {size} opacity="{opacity}"/>'
