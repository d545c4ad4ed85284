"""The gradients' exponents as plain values: two curves over powers of two, and one row for each layer.

A loss scale of 2^k moves the histogram k places to the right and changes nothing else; so the scaled gradients are the
unscaled ones, shifted. Shares are of the finite non-zero elements: a gradient that is exactly zero (a blank pixel, a
dead unit) is no underflow. No widget and no plotly here.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np

from amplab.display.numbers import power
from amplab.formats import FLOAT16, ExponentHistogram
from amplab.lab import GradientRecord

__all__ = ["HIGH", "LOW", "Curves", "curves", "float16_zones", "layer_rows", "layers_html", "sentence"]

LOW, HIGH = -44, 24
"""Exponents that are drawn; what lies beyond counts at the edge."""


@dataclass(frozen=True, eq=False)
class Curves:
    """Shares in percent of all finite non-zero gradient elements, one per power of two.

    Attributes:
        exponents: int32 `(HIGH - LOW + 1,)`.
        unscaled, scaled: float32 of the same shape.
    """

    exponents: np.ndarray
    unscaled: np.ndarray
    scaled: np.ndarray


def curves(record: GradientRecord) -> Curves:
    """Return both curves of all layers together."""
    unscaled = reduce(add, (histogram for _, histogram in record.layers))
    exponents = np.arange(LOW, HIGH + 1, dtype=np.int32)  # int64 has no typed array in a page
    return Curves(exponents, _percent(unscaled), _percent(_scaled(unscaled, record.loss_scale)))


def float16_zones() -> list[tuple[float, float, str]]:
    """Return (from, to, name) of the ranges of float16 on the exponent axis, from bin edges."""
    kept = math.log2(FLOAT16.smallest_subnormal) - 1  # half of the smallest rounds away
    normal = math.log2(FLOAT16.smallest_normal)
    top = FLOAT16.max_exponent + 1
    names = ("→ 0", "subnormal", "normal", "→ inf")
    return [(*edges, name) for edges, name in zip(pairwise((LOW, kept, normal, top, HIGH + 1)), names, strict=True)]


def layer_rows(record: GradientRecord) -> list[dict]:
    """Return for each layer the shares flushed without and with the scale, overflowed with it, and its zeros."""
    return [_layer(name, histogram, record.loss_scale) for name, histogram in record.layers]


def layers_html(record: GradientRecord) -> str:
    """Return the layers as an HTML table."""
    heads = ("Layer", "flushed: raw → scaled", "overflow", "zeros")
    columns = "".join(f'<th scope="col"{_NUMBER if place else ""}>{head}</th>' for place, head in enumerate(heads))
    rows = "".join(_html_row(row) for row in layer_rows(record))
    return (
        '<div class="amplab amp-scroll amp-narrow" tabindex="0" role="region" aria-label="Gradients by layer">'
        '<table><caption class="amp-sr">Share of each layer\'s gradient that float16 would lose</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def sentence(record: GradientRecord) -> str:
    """Return the finding in one line: what the scale saves and what it costs."""
    total = reduce(add, (histogram for _, histogram in record.layers))
    scaled = _scaled(total, record.loss_scale)
    before, after = (percent_text(each.underflow_fraction(FLOAT16)) for each in (total, scaled))
    overflowed = percent_text(scaled.overflow_fraction(FLOAT16))
    broken = _nonfinite(total)
    return (
        f"Step {record.step:,}, scale {power(record.loss_scale, raised=True)}: flushed to zero {before} unscaled, "
        f"{after} scaled; overflowed {overflowed}" + (f"; {percent_text(broken)} are NaN or inf" if broken else "")
    )


def percent_text(share: float) -> str:
    """Return a share in percent, small ones told apart from none.

    >>> percent_text(0.0), percent_text(0.0004), percent_text(0.25), percent_text(1.0)
    ('0 %', '<0.1 %', '25.0 %', '100 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


def _scaled(histogram: ExponentHistogram, loss_scale: float) -> ExponentHistogram:
    return histogram.shifted(math.log2(loss_scale))


def _nonfinite(histogram: ExponentHistogram) -> float:
    """The share of elements that are NaN or inf before any scaling: no loss scale is to blame for them."""
    return (histogram.nans + histogram.infs) / max(histogram.total, 1)


def _percent(histogram: ExponentHistogram) -> np.ndarray:
    bins = np.clip(histogram.exponents, LOW, HIGH) - LOW
    counts = np.bincount(bins, weights=histogram.counts, minlength=HIGH - LOW + 1)
    return (100 * counts / max(histogram.finite_nonzero, 1)).astype(np.float32)


def _layer(name: str, histogram: ExponentHistogram, loss_scale: float) -> dict:
    scaled = _scaled(histogram, loss_scale)
    return {
        "name": name,
        "flushed_unscaled": histogram.underflow_fraction(FLOAT16),
        "flushed": scaled.underflow_fraction(FLOAT16),
        "overflowed": scaled.overflow_fraction(FLOAT16),
        "zeros": histogram.zeros / max(histogram.total, 1),
        "nonfinite": _nonfinite(histogram),
    }


def _html_row(row: dict) -> str:
    flushed = f"{percent_text(row['flushed_unscaled'])} → {percent_text(row['flushed'])}"
    overflowed = f"{percent_text(row['nonfinite'])} NaN" if row["nonfinite"] else percent_text(row["overflowed"])
    cells = (flushed, overflowed, percent_text(row["zeros"]))
    numbers = "".join(f"<td{_NUMBER}>{html.escape(cell)}</td>" for cell in cells)
    return f"<tr><td><code>{html.escape(row['name'])}</code></td>{numbers}</tr>"


_NUMBER = ' class="amp-num"'
