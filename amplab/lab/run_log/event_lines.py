"""The events of a run log: the fields of those that have a type, and the reader of all, which refuses damaged ones.

An event is read completely or not at all, so that what a log is accepted with, every tool can use: its step is a whole
number, its numbers are finite, and it has the fields that its kind is written with. Events and fields of later versions
are kept or ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from amplab.amp import MemoryUse
from amplab.formats import ExponentHistogram
from amplab.lab.events import GradientSample, LayerShares, MixedScales
from amplab.lab.findings import finding_from_log
from amplab.lab.run_log.json_lines import is_count, is_number, json_number, read_number
from amplab.lab.skip_explanation import SkipExplanation
from amplab.parallel.rank_state import RankState

__all__ = ["Event", "mixed_scales_event", "read_event", "sample_event"]

Event = GradientSample | MixedScales | SkipExplanation | dict[str, Any]

_WIDEST = 4096  # exponents of float64 are in ±1100


def sample_event(sample: GradientSample) -> dict[str, Any]:
    """Return a histogram of the gradients as the fields of an event."""
    layers = {each.name: [each.underflow, each.overflow, each.nonfinite] for each in sample.layers}
    known = {"layers": layers} if layers else {}
    return {"step": sample.step, "loss_scale": json_number(sample.loss_scale), **_bins(sample.histogram), **known}


def mixed_scales_event(mixed: MixedScales) -> dict[str, Any]:
    """Return the scales of a step whose backwards had different ones as the fields of an event."""
    return {"step": mixed.step, "scales": [json_number(scale) for scale in mixed.scales]}


def _bins(histogram: ExponentHistogram) -> dict[str, object]:
    """Return a histogram as JSON: its occupied bins, and the numbers of zeros, infs and NaNs."""
    low, high = histogram.span or (0, -1)
    counts = histogram.counts[low - histogram.low : high - histogram.low + 1].tolist() if low <= high else []
    return {"low": low, "counts": counts, "zeros": histogram.zeros, "infs": histogram.infs, "nans": histogram.nans}


def read_event(entry: dict[str, Any]) -> Event | None:
    """Return the histogram, the scales, the explanation or the event of a line; None if it is damaged."""
    kind = entry.get("event")
    if not isinstance(kind, str) or not is_count(entry.get("step")):
        return None
    if kind in _READERS:
        try:
            return _READERS[kind](entry)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            return None
    return entry if kind not in _CHECKS or _CHECKS[kind](entry) else None


def _read_sample(entry: dict[str, Any]) -> GradientSample | None:
    """Return the sample of which these are the fields."""
    given, low = entry["counts"], entry["low"]
    rest = {name: entry[name] for name in ("zeros", "infs", "nans")}
    if not all(map(is_count, [*given, *rest.values()])) or type(low) is not int:
        return None
    if max(abs(low), len(given)) > _WIDEST:
        return None
    counts = np.array(given, dtype=np.int64)
    histogram = ExponentHistogram(counts=counts, low=low, total=sum(given) + sum(rest.values()), **rest)
    layers = tuple(LayerShares(name, *map(_share, shares)) for name, shares in entry.get("layers", {}).items())
    scale = read_number(entry["loss_scale"])
    return None if scale is None else GradientSample(entry["step"], scale, histogram, layers)


def _share(value: Any) -> float:
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(value)
    return float(value)


def _read_scales(entry: dict[str, Any]) -> MixedScales | None:
    """Return the scales of which these are the fields."""
    scales = tuple(map(read_number, entry["scales"]))
    return None if None in scales else MixedScales(entry["step"], tuple(each for each in scales if each is not None))


_READERS: dict[str, Callable[[dict[str, Any]], Event | None]] = {
    "gradients": _read_sample,
    "scales": _read_scales,
    "explanation": SkipExplanation.from_dict,
}


def _has_finding(entry: dict[str, Any]) -> bool:
    try:
        found = finding_from_log(entry["finding"])
        texts = (found.symptom, found.cause, found.remedy, found.op, found.module, found.tensor, found.line)
        evidence = found.evidence.items()
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    numbers = all(isinstance(name, str) and (isinstance(value, str) or is_number(value)) for name, value in evidence)
    return numbers and all(isinstance(text, str) for text in texts)


_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "config": lambda entry: isinstance(entry.get("config"), str),
    "inject": lambda entry: isinstance(entry.get("fault"), str) and isinstance(entry.get("on"), bool),
    "finding": _has_finding,
    "memory": lambda entry: all(is_count(entry.get(each.name)) for each in fields(MemoryUse)),
    "state": lambda entry: RankState.from_dict(entry) is not None,
    "end": lambda entry: isinstance(entry.get("raised", ""), str),
}
