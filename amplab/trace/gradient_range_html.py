"""A `GradientRange` as HTML: the exponents of each layer drawn against the range of the format.

From left to right the powers of two, at the scale that is judged; the frame is what the format holds, its fainter part
the subnormals. What lies left of it is flushed to zero, what lies right of it becomes inf.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from amplab.display.html import Markup, html_table, markup, name, page
from amplab.display.numbers import percent, power
from amplab.formats import ExponentHistogram, FloatFormat

if TYPE_CHECKING:
    from amplab.trace.gradient_range import GradientRange

__all__ = ["html"]

_WIDTH, _HEIGHT = 240, 22  # of a drawing, in pixels
_BIN, _BEYOND = 4, 8  # units of a power of two; powers of two that are shown beside the format's


def html(found: "GradientRange") -> str:
    """Return the range as a piece of a page."""
    rows, scale = found.rows(), power(found.loss_scale)
    heads = (
        "parameter",
        "elements",
        f"exponents at {scale}",
        "lost at 1",
        f"lost at {scale}",
        "overflow",
        "fits up to",
    )
    lines = [
        _line(row, found.at_scale(histogram), found.format)
        for row, (_, histogram) in zip(rows, found.layers, strict=True)
    ]
    caption = f"Gradients by parameter against {found.format.name}"
    table = html_table(heads, lines, right={1, 3, 4, 5, 6}, caption=caption)
    return page(found.sentence, _key(found.format), table) if lines else page(found.sentence)


def _line(row: dict, scaled: ExponentHistogram, fmt: FloatFormat) -> tuple[str, ...]:
    shares = [_share(row[each]) for each in ("lost_unscaled", "lost", "overflowed")]
    fit = "–" if row["largest_fit"] is None else power(row["largest_fit"])
    broken = row["infs"] + row["nans"]
    elements = f"{row['total']:,}"
    if broken:
        elements = Markup(f'{elements}<br><span class="bad">{broken:,} inf or nan</span>')
    return name(row["name"]), elements, _drawing(scaled, fmt), *shares, fit


def _share(share: float) -> str:
    return Markup(f'<span class="bad">{percent(share)}</span>') if share >= 0.01 else percent(share)


def _drawing(scaled: ExponentHistogram, fmt: FloatFormat) -> Markup:
    """The layer's histogram, a bar for each power of two, over the format's range."""
    lost, normal, top = _edges(fmt)
    low, high = lost - _BEYOND, top + _BEYOND
    largest = max(int(scaled.counts.max()), 1)
    bars: dict[str, str] = {}
    for exponent, times in _occupied(scaled):
        place = _BIN * (min(max(exponent, low), high - 1) - low)
        tall = max(2.0, _HEIGHT * math.log1p(times) / math.log1p(largest))
        kind = "error" if not lost <= exponent < top else "float16"
        bars[kind] = bars.get(kind, "") + f"M{place} {_HEIGHT}v{-tall:.1f}h{_BIN - 1}v{tall:.1f}z"
    paths = "".join(f'<path d="{drawn}" style="fill:var(--amp-{kind})"/>' for kind, drawn in bars.items())
    span = "nothing but zeros" if scaled.span is None else f"from 2^{scaled.span[0]} to 2^{scaled.span[1]}"
    width = _BIN * (high - low)
    return Markup(
        f'<svg class="small" viewBox="0 0 {width} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" '
        f'aria-label="exponents {span}"><title>{span}</title>{_ground(low, lost, normal, top)}{paths}</svg>'
    )


def _occupied(histogram: ExponentHistogram) -> Iterator[tuple[int, int]]:
    """Exponents that occur, and how often."""
    pairs = zip(histogram.exponents.tolist(), histogram.counts.tolist(), strict=True)
    return ((exponent, times) for exponent, times in pairs if times)


def _ground(low: int, lost: int, normal: int, top: int) -> str:
    subnormals, normals = (f'x="{_BIN * (start - low)}" width="{_BIN * (end - start)}" height="{_HEIGHT}"'
                           for start, end in ((lost, normal), (normal, top)))  # fmt: skip
    return f'<rect {subnormals} opacity="0.07"/><rect {normals} opacity="0.13"/>'


def _edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """The first exponent that is not flushed, the first normal one, and the first that overflows."""
    kept = round(math.log2(fmt.smallest_subnormal)) - 1
    return kept, round(math.log2(fmt.smallest_normal)), fmt.max_exponent + 1


def _key(fmt: FloatFormat) -> str:
    lost, normal, top = _edges(fmt)
    said = (
        f"Each bar is a power of two, its height the logarithm of how many. The shaded range is what {fmt.name} holds: "
        f"subnormal from 2^{lost}, normal from 2^{normal}, inf from 2^{top}."
    )
    return f'<p class="faint">{markup(said)} <span class="bad">Red</span> is lost.</p>'
