"""Read the events of a run log from JSON, and tell whole ones from damaged ones.

An event is read completely or not at all, so that what a log is accepted with, every tool can use: its step is a whole
number, its numbers are finite, and it has the fields that its kind is written with. Events and fields of later versions
are kept or ignored. The lines themselves are in `run_log`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeGuard

import numpy as np

from amplab.amp import MemoryUse
from amplab.formats import ExponentHistogram
from amplab.lab.events import GradientSample, LayerShares, MixedScales
from amplab.lab.findings import finding_from_log
from amplab.lab.skip_explanation import SkipExplanation
from amplab.parallel.rank_state import RankState

__all__ = ["Event", "is_count", "is_number", "read_event", "read_number"]

Event = GradientSample | MixedScales | SkipExplanation | dict[str, Any]

_MOST = 2**53  # whole numbers up to here are exact as float64, in which charts take them
_WIDEST = 4096  # exponents of float64 are in ±1100


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a number of things, or of a step."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_number(value: Any) -> float | None:
    """Return a number of a log, in which inf and NaN are words; None if it is damaged."""
    return float(value) if is_number(value) or value in ("nan", "inf", "-inf") else None


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
    """Return what `RunLog.keep` wrote."""
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
    """Return what `RunLog.keep_scales` wrote."""
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
