"""The gradients' tab as plain values: a histogram over powers of two, one row for each layer, and a heat map.

A loss scale of 2^k multiplies every gradient by 2^k. float16 then loses what it would lose of the unscaled gradients if
its own range lay k powers of two lower. So the histogram stays where it is, and the ranges of float16 slide over it.
Shares are of the finite non-zero elements: a gradient that is exactly zero (a blank pixel, a dead unit) does not count
as underflow. No widget here; histogram.js and heat_map.js draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from amplab.display.numbers import percent, power
from amplab.formats import FLOAT16, ExponentHistogram
from amplab.lab import GradientRecord, GradientSample, History, LayerShares
from amplab.scalers import overflow_limits

__all__ = [
    "HIGH",
    "LOW",
    "curves",
    "fitting_words",
    "float16_edges",
    "gradients_payload",
    "heat_map",
    "layer_rows",
    "stored_payload",
    "summary",
]

LOW, HIGH = -58, 19
"""Exponents that are drawn; elements beyond them are counted in the first and the last bin."""


_COLUMNS = 120  # of the heat map
_LAYERS = 40  # rows of the heat map


def gradients_payload(record: GradientRecord, history: History) -> dict[str, object]:
    """Return all that the tab shows of the present gradients, as JSON values.

    Args:
        record: The gradients of the next batch.
        history: The run, for the heat map and the largest static scale that fits.
    """
    total = _all_layers(record)
    return {
        "summary": summary(record),
        "fits": fitting_words(history),
        "description": _description(total, record.loss_scale),
        "curves": curves(total, record.loss_scale),
        "layers": [_texts(row) for row in layer_rows(record)],
        "heat": heat_map(history.gradient_samples),
    }


def stored_payload(history: History, step: int, *, named: str = "Selected step") -> dict[str, object] | None:
    """Return what the tab shows for one step, named so: the nearest stored histogram.

    All of it is at the scale of the step whose histogram it is: what each layer loses is stored for this scale only.

    Returns:
        None if the run has no such step, or no histogram.
    """
    steps = history.column("step")
    row = int(np.searchsorted(steps, step))
    samples = history.gradient_samples
    if row == len(steps) or not samples:
        return None
    sample = min(samples, key=lambda each: abs(each.step - step))
    scale, used = sample.loss_scale, history.record(row).loss_scale
    of_step = f"step {step:,} used the scale {power(used, raised=True)}"
    other = "" if used == scale else f", at the scale of that step; {of_step}"
    when = "" if sample.step == step else f" (histogram of step {sample.step:,}, the nearest that is stored{other})"
    return {
        "summary": f"{named} {step:,}{when}, scale {power(scale, raised=True)}: {_lost(sample.histogram, scale)}",
        "fits": fitting_words(history),
        "description": _description(sample.histogram, scale),
        "curves": curves(sample.histogram, scale),
        "layers": [_stored_texts(layer) for layer in sample.layers],
        "heat": heat_map(samples),
    }


def curves(unscaled: ExponentHistogram, loss_scale: float) -> dict[str, object]:
    """Return the histogram in percent, log2 of the scale, and the edges of float16's ranges for unscaled values."""
    return {
        "low": LOW,
        "unscaled": _percent(unscaled),
        "scale": math.log2(loss_scale) if 0.0 < loss_scale < math.inf else 0.0,
        "edges": float16_edges(),
    }


def float16_edges() -> list[float]:
    """Return log2 of where float16's subnormals, its normal numbers and its overflow begin; lower values become 0."""
    kept = math.log2(FLOAT16.smallest_subnormal) - 1  # half of the smallest subnormal rounds to zero
    return [kept, math.log2(FLOAT16.smallest_normal), FLOAT16.max_exponent + 1.0]


def fitting_words(history: History) -> str:
    """Return in words the largest static scale that fits the gradients of every step so far.

    It is the largest power of two below the least scale under which a measured step overflows.
    """
    exponents = history.column("grad_exponent")
    measured = np.flatnonzero(np.isfinite(exponents))
    if not len(measured):
        return ""
    largest = measured[np.argmax(exponents[measured])]
    limit = overflow_limits(exponents[[largest]], np.ones(1))[0]
    fits, exponent = 2.0 ** math.floor(math.log2(limit)), int(exponents[largest])
    low, high = (power(2.0**each, raised=True) for each in (exponent, exponent + 1))
    return (
        f"Largest static scale that fits every step so far: {power(fits, raised=True)}; the largest gradient, at step "
        f"{history.record(int(largest)).step:,}, is between {low} and {high}."
    )


def heat_map(samples: Sequence[GradientSample]) -> dict[str, object]:
    """Return the share in percent that each layer loses at each stored step, to zero and to infinity.

    The columns are spread over the run, each the worst of the samples that it stands for. Of many layers those that
    lose most are shown, in the model's order.
    """
    known = [sample for sample in samples if sample.layers]
    if not known:
        return {"steps": [], "layers": [], "underflow": [], "overflow": [], "nonfinite": [], "left_out": 0}
    names = [layer.name for layer in known[-1].layers]
    known = [sample for sample in known if len(sample.layers) == len(names)]
    parts = np.array_split(np.arange(len(known)), min(_COLUMNS, len(known)))
    lost = np.array([[_layer_loss(layer) for layer in sample.layers] for sample in known])  # (steps, layers, 3)
    shown = sorted(np.argsort(-lost.sum(axis=(0, 2)), kind="stable")[:_LAYERS].tolist())
    worst = np.array([lost[part].max(axis=0) for part in parts])  # (columns, layers, 3)
    rows = [worst[:, layer].T.round(2).tolist() for layer in shown]
    return {
        "steps": [known[part[0]].step for part in parts],
        "layers": [names[layer] for layer in shown],
        "underflow": [row[0] for row in rows],
        "overflow": [row[1] for row in rows],
        "nonfinite": [row[2] for row in rows],
        "left_out": len(names) - len(shown),
    }


def _layer_loss(layer: LayerShares) -> tuple[float, float, float]:
    return 100 * layer.underflow, 100 * layer.overflow, 100 * layer.nonfinite


def layer_rows(record: GradientRecord) -> list[dict[str, Any]]:
    """Return the shares of each layer: flushed without and with the scale, overflowed with it, zeros, non-finite."""
    return [_layer(name, histogram, record.loss_scale) for name, histogram in record.layers]


def summary(record: GradientRecord) -> str:
    """Return in one line how much of the gradients float16 loses without the scale and with it."""
    total = _all_layers(record)
    scale = power(record.loss_scale, raised=True)
    return f"Step {record.step:,}, scale {scale}: {_lost(total, record.loss_scale)}"


def _lost(total: ExponentHistogram, loss_scale: float) -> str:
    scaled = _scaled(total, loss_scale)
    before, after = (percent(each.underflow_fraction(FLOAT16)) for each in (total, scaled))
    overflowed = percent(scaled.overflow_fraction(FLOAT16))
    broken = _nonfinite(total)
    return f"flushed to zero {before} unscaled, {after} scaled; overflowed {overflowed}" + (
        f"; {percent(broken)} are NaN or inf" if broken else ""
    )


def _description(total: ExponentHistogram, loss_scale: float) -> str:
    """The histogram in words, for a screen reader."""
    if not total.finite_nonzero:
        return "Histogram of gradient magnitudes: no element is finite and non-zero."
    kept, _, top = (edge - math.log2(loss_scale) for edge in float16_edges())
    return (
        "Histogram of unscaled gradient magnitudes over powers of two, below the range of float16 without a scale and "
        f"with it. The gradients peak at {_peak(_percent(total))}. With the scale {power(loss_scale)}, float16 holds "
        f"magnitudes from 2^{kept:.0f} to 2^{top:.0f}."
    )


def _peak(shares: list[float]) -> str:
    return f"2^{LOW + shares.index(max(shares))} with {percent(max(shares) / 100)} of the elements"


def _all_layers(record: GradientRecord) -> ExponentHistogram:
    return reduce(add, (histogram for _, histogram in record.layers))


def _scaled(histogram: ExponentHistogram, loss_scale: float) -> ExponentHistogram:
    return histogram.shifted(math.log2(loss_scale)) if 0.0 < loss_scale < math.inf else histogram


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


def _stored_texts(layer: LayerShares) -> dict[str, str]:
    """A stored layer's row as the table writes it; without the scale and without zeros, which are not stored."""
    overflowed = f"{percent(layer.nonfinite)} NaN" if layer.nonfinite else percent(layer.overflow)
    return {"name": layer.name, "flushed": percent(layer.underflow), "overflowed": overflowed, "zeros": "–"}
