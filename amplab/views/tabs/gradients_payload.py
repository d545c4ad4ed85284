"""The gradients' tab as plain values: two histograms over powers of two, and one row for each layer.

A loss scale of 2^k moves the histogram k bins to the right and changes nothing else, so the scaled gradients are the
unscaled ones, shifted. Shares are of the finite non-zero elements: a gradient that is exactly zero (a blank pixel, a
dead unit) does not count as underflow. No widget here; histogram.js draws the curves.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from amplab.display.numbers import percent, power
from amplab.formats import FLOAT16, ExponentHistogram
from amplab.lab import GradientRecord

__all__ = ["HIGH", "LOW", "curves", "float16_zones", "gradients_payload", "layer_rows", "summary"]

LOW, HIGH = -44, 24
"""Exponents that are drawn; elements beyond them are counted in the first and the last bin."""


def gradients_payload(record: GradientRecord) -> dict[str, object]:
    """Return all that the tab shows, as JSON values."""
    return {
        "summary": summary(record),
        "description": _description(record),
        "curves": curves(record),
        "layers": [_texts(row) for row in layer_rows(record)],
    }


def curves(record: GradientRecord) -> dict[str, object]:
    """Return both histograms of all layers together, in percent, and the ranges of float16."""
    unscaled = _all_layers(record)
    return {
        "low": LOW,
        "unscaled": _percent(unscaled),
        "scaled": _percent(_scaled(unscaled, record.loss_scale)),
        "zones": float16_zones(),
    }


def float16_zones() -> list[tuple[float, float, str]]:
    """Return (from, to, name) of the ranges of float16 on the exponent axis, from bin edges."""
    kept = math.log2(FLOAT16.smallest_subnormal) - 1  # half of the smallest subnormal rounds to zero
    normal = math.log2(FLOAT16.smallest_normal)
    top = FLOAT16.max_exponent + 1
    names = ("→ 0", "subnormal", "normal", "→ inf")
    return [(*edges, name) for edges, name in zip(pairwise((LOW, kept, normal, top, HIGH + 1)), names, strict=True)]


def layer_rows(record: GradientRecord) -> list[dict[str, Any]]:
    """Return the shares of each layer: flushed without and with the scale, overflowed with it, zeros, non-finite."""
    return [_layer(name, histogram, record.loss_scale) for name, histogram in record.layers]


def summary(record: GradientRecord) -> str:
    """Return in one line how much of the gradients float16 loses without the scale and with it."""
    total = _all_layers(record)
    scaled = _scaled(total, record.loss_scale)
    before, after = (percent(each.underflow_fraction(FLOAT16)) for each in (total, scaled))
    overflowed = percent(scaled.overflow_fraction(FLOAT16))
    broken = _nonfinite(total)
    return (
        f"Step {record.step:,}, scale {power(record.loss_scale, raised=True)}: flushed to zero {before} unscaled, "
        f"{after} scaled; overflowed {overflowed}" + (f"; {percent(broken)} are NaN or inf" if broken else "")
    )


def _description(record: GradientRecord) -> str:
    """The histogram in words, for a screen reader."""
    total = _all_layers(record)
    if not total.finite_nonzero:
        return "Histogram of gradient magnitudes: no element is finite and non-zero."
    unscaled, scaled = (_peak(_percent(each)) for each in (total, _scaled(total, record.loss_scale)))
    return (
        "Histogram of gradient magnitudes over powers of two, with the ranges of float16. "
        f"The unscaled gradients peak at {unscaled}, the scaled gradients at {scaled}."
    )


def _peak(shares: list[float]) -> str:
    return f"2^{LOW + shares.index(max(shares))} with {percent(max(shares) / 100)} of the elements"


def _all_layers(record: GradientRecord) -> ExponentHistogram:
    return reduce(add, (histogram for _, histogram in record.layers))


def _scaled(histogram: ExponentHistogram, loss_scale: float) -> ExponentHistogram:
    return histogram.shifted(math.log2(loss_scale))


def _nonfinite(histogram: ExponentHistogram) -> float:
    """The share of elements that are NaN or inf before any scaling, which no loss scale causes."""
    return (histogram.nans + histogram.infs) / max(histogram.total, 1)


def _percent(histogram: ExponentHistogram) -> list[float]:
    bins = np.clip(histogram.exponents, LOW, HIGH) - LOW
    counts = np.bincount(bins, weights=histogram.counts, minlength=HIGH - LOW + 1)
    shares: list[float] = np.round(100 * counts / max(histogram.finite_nonzero, 1), 4).tolist()
    return shares


def _layer(name: str, histogram: ExponentHistogram, loss_scale: float) -> dict[str, Any]:
    scaled = _scaled(histogram, loss_scale)
    return {
        "name": name,
        "flushed_unscaled": histogram.underflow_fraction(FLOAT16),
        "flushed": scaled.underflow_fraction(FLOAT16),
        "overflowed": scaled.overflow_fraction(FLOAT16),
        "zeros": histogram.zeros / max(histogram.total, 1),
        "nonfinite": _nonfinite(histogram),
    }


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """A layer's row as the table writes it."""
    return {
        "name": row["name"],
        "flushed": f"{percent(row['flushed_unscaled'])} → {percent(row['flushed'])}",
        "overflowed": f"{percent(row['nonfinite'])} NaN" if row["nonfinite"] else percent(row["overflowed"]),
        "zeros": percent(row["zeros"]),
    }
