"""The losses of one run as a line in a cell of a table, on the axis that all runs of the table share."""

import math
from collections.abc import Sequence

from amplab.trace.plain_html import Markup

__all__ = ["loss_drawing"]

_WIDTH, _HEIGHT = 120, 26
_MOST = 120  # points; more are thinned evenly


def loss_drawing(losses: Sequence[float], of_all: Sequence[Sequence[float]]) -> Markup:
    """Draw losses step by step; a cross stands where they stop being finite.

    Args:
        losses: of the run that is drawn.
        of_all: of every run of the table; the last one, the reference, lies faintly behind.
    """
    finite = [loss for run in of_all for loss in run if math.isfinite(loss)]
    if not finite or not losses:
        return Markup("–")
    low, high, steps = min(finite), max(finite), max(map(len, of_all))
    reference = _line(of_all[-1], low, high, steps, "stroke:currentColor; opacity:0.4; stroke-width:1.5")
    own = _line(losses, low, high, steps, "stroke:currentColor; stroke-width:1.5")
    shown = [loss for loss in losses if math.isfinite(loss)]
    said = f"loss from {shown[0]:.4g} to {shown[-1]:.4g}" if shown else "no finite loss"
    return Markup(
        f'<svg class="small" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{said}"><title>{said}</title>{reference}{own}{_end(losses, low, high, steps)}</svg>'
    )


def _line(losses: Sequence[float], low: float, high: float, steps: int, style: str) -> str:
    every = len(losses) // _MOST + 1
    points = (_point(step, losses[step], low, high, steps) for step in range(0, len(losses), every))
    return f'<polyline points="{" ".join(filter(None, points))}" style="fill:none; {style}"/>'


def _end(losses: Sequence[float], low: float, high: float, steps: int) -> str:
    """A cross after the last finite loss, where a loss that is not finite follows."""
    broken = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if broken is None:
        return ""
    before = losses[broken - 1] if broken else high
    x, y = _point(broken, before, low, high, steps).split(",")
    return f'<path d="M{x} {y}m-3-3l6 6m0-6l-6 6" style="stroke:var(--error, #c0123c); stroke-width:2"/>'


def _point(step: int, loss: float, low: float, high: float, steps: int) -> str:
    if not math.isfinite(loss):
        return ""
    across = 4 + (_WIDTH - 8) * step / max(steps - 1, 1)
    return f"{across:.1f},{3 + (_HEIGHT - 6) * (high - loss) / ((high - low) or 1.0):.1f}"
