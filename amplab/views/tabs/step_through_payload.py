"""One recorded step as plain values: a picture before and after each stage, and one sentence with the step's numbers.

    stages: cast · forward · scale · backward · unscale · clip · step · update

A picture has the chosen element (its value, its bits, its neighbors), the statistics of the whole tensor, and its
exponents over the range of float16. The sentences are in `step_through_sentences.py`. No widget here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amplab.display.numbers import binary_power, count, percent
from amplab.formats import FLOAT16, FORMATS, LOW_PRECISION_DTYPES, FloatFormat
from amplab.lab import ParameterStages, Snapshot, StepStages
from amplab.views.tabs.step_through_sentences import Told, check_of, say, tell

__all__ = ["ELEMENTS", "HIGH", "LOW", "Chosen", "choose_element", "element_of", "picture", "step_through_payload"]

LOW, HIGH = -44, 24
"""Exponents that are drawn; elements beyond them are counted in the first and the last bin."""

ELEMENTS = {
    "nonfinite": "first inf or NaN",
    "largest": "largest gradient",
    "rescued": "gradient that needs the scale",
    "median": "median gradient",
    "smallest": "smallest gradient, not 0",
}
"""Rules that choose an element by its scaled gradient."""

_NEIGHBORS = 2  # values shown on each side of the chosen element
_PATTERNS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class Chosen:
    """What is looked at.

    Attributes:
        parameter: Its name; None for the first weight.
        element: A key of `ELEMENTS`, the index of an element in memory order, or None for the default.
    """

    parameter: str | None = None
    element: str | int | None = None


def step_through_payload(stages: StepStages, chosen: Chosen) -> dict[str, Any]:
    """Return all that the tab shows of a step, as JSON values."""
    seen = stages.parameters[_parameter(stages, chosen)]
    element, rule = choose_element(seen, chosen.element, check_of(stages, seen).scale.before)
    told = tell(stages, seen, element)
    return {
        "step": stages.record.step,
        "level": stages.record.opt_level,
        "skipped": stages.record.skipped,
        "parameter": seen.name,
        "parameters": [[name, f"{name} · {each.kind}"] for name, each in stages.parameters.items()],
        "index": element,
        "shape": " × ".join(map(str, seen.stored.shape)),
        "element": rule,
        "elements": _element_options(seen, element, rule),
        "note": _note(stages),
        "stages": [_stage(each, seen, element) for each in told],
    }


def _parameter(stages: StepStages, chosen: Chosen) -> str:
    """The chosen parameter, the one that overflowed, or the first weight that 16-bit ops read."""
    names = list(stages.parameters)
    for wanted in (chosen.parameter, stages.record.first_nonfinite):
        if wanted in stages.parameters:
            return wanted
    weights = [name for name in names if len(stages.parameters[name].stored.shape) > 1]
    halves = [name for name in weights if stages.parameters[name].used.dtype in LOW_PRECISION_DTYPES]
    return next(iter([*halves, *weights, *names]))


def _element_options(seen: ParameterStages, element: int, rule: str) -> list[list[str]]:
    sometimes = {"nonfinite": _nonfinite(seen) > 0, "rescued": rule == "rescued"}
    options = [[name, text] for name, text in ELEMENTS.items() if sometimes.get(name, True)]
    return options if rule != "picked" else [*options, ["picked", _place(seen.stored.kept_shape, element)]]


def _note(stages: StepStages) -> str:
    """What could not be recorded, "" if everything was."""
    notes = [f"Not recorded: {problem}." for problem in stages.problems[:1]]
    if stages.left_out:
        notes.append(f"{count(len(stages.left_out), 'parameter')} left out: the model is too large to record at once.")
    return " ".join(notes)


# The element


def choose_element(seen: ParameterStages, element: str | int | None, scale: float = 1.0) -> tuple[int, str]:
    """Return the index of the element to show, and the rule that chose it, "picked" if it was given by its index.

    Without a choice: the first inf or NaN among the gradients, else the median of those that need the scale (normal
    in their 16-bit format, and subnormal or 0 without the scale), else the median of those that are not 0.
    """
    if isinstance(element, int):
        return min(max(element, 0), len(seen.stored.kept) - 1), "picked"
    gradients = seen.computed or seen.scaled
    if gradients is None:
        return 0, "median"
    values = gradients.kept.double().abs().numpy()
    broken = np.flatnonzero(~np.isfinite(values))
    if len(broken) and element in (None, "nonfinite"):
        return int(broken[0]), "nonfinite"
    order = np.argsort(np.where(np.isfinite(values), values, 0.0), kind="stable")
    order = order[(values[order] > 0) & np.isfinite(values[order])]
    if element in (None, "rescued"):
        needy = order[_needs_scale(gradients, values[order], scale)]
        if len(needy):
            return int(needy[len(needy) // 2]), "rescued"
    rule = element if element in ("largest", "smallest") else "median"
    if not len(order):
        return 0, rule
    return int(order[{"smallest": 0, "median": (len(order) - 1) // 2, "largest": -1}[rule]]), rule


def _needs_scale(gradients: Snapshot, values: np.ndarray, scale: float) -> np.ndarray:
    """Whether each scaled gradient is normal in its format, and would be subnormal or 0 without the scale."""
    fmt = FORMATS.get(str(gradients.dtype).removeprefix("torch."))
    smallest = 0.0 if fmt is None else fmt.smallest_normal
    needy: np.ndarray = (values >= smallest) & (values / scale < smallest)
    return needy


def _nonfinite(seen: ParameterStages) -> int:
    gradients = seen.computed or seen.scaled
    return 0 if gradients is None else gradients.nonfinite


def element_of(seen: ParameterStages, element: int, shown: Snapshot) -> int:
    """Return the element of an input, an output or its gradient that belongs to an element of the parameter.

    A weight connects one feature of the input with one of the output. In tensors with more dimensions than features,
    such as images, it is the middle one.
    """
    shape, place = shown.kept_shape, np.unravel_index(element, seen.stored.kept_shape or (1,))
    if not shape:
        return 0
    is_input = shown is seen.inputs
    feature = _feature(seen.kind, [int(each) for each in place], is_input=is_input)
    channels_first = seen.kind.startswith(("Conv", "BatchNorm", "InstanceNorm", "GroupNorm")) and len(shape) > 1
    middle = [size // 2 for size in shape]
    axis = 0 if channels_first else len(shape) - 1
    middle[axis] = feature % shape[axis]
    return min(int(np.ravel_multi_index(middle, shape)), len(shown.kept) - 1)


def _feature(kind: str, place: list[int], *, is_input: bool) -> int:
    """The feature of the input or of the output that a place in the parameter belongs to."""
    if len(place) < 2:
        return place[0]
    turned = kind.startswith(("ConvTranspose", "Embedding"))  # (in, out), where others are (out, in)
    return place[int(is_input != turned)]


def _place(shape: tuple[int, ...], index: int) -> str:
    """Write the place of an element: "[3, 7]"; "" for a scalar."""
    return str([int(each) for each in np.unravel_index(index, shape)]) if shape else ""


# Pictures


def _stage(told: Told, seen: ParameterStages, element: int) -> dict[str, Any]:
    before, after = (None if each is None else _shown(each, seen, element) for each in (told.before, told.after))
    if before and after and told.compares:
        _compare_bits(before, after)
    return {
        "name": told.name,
        "title": told.title,
        "brief": told.brief,
        "tone": told.tone,
        "operator": told.operator,
        "compares": told.compares,
        "sentence": told.sentence,
        "before": before,
        "after": after,
    }


def _shown(taken: Snapshot, seen: ParameterStages, element: int) -> dict[str, Any]:
    if taken in (seen.inputs, seen.outputs, seen.output_gradient):
        return picture(taken, element_of(seen, element, taken), sample=True)
    return picture(taken, 0 if len(taken.kept) == 1 else element)


def picture(taken: Snapshot, element: int, *, sample: bool = False) -> dict[str, Any]:
    """Return what is drawn of a tensor.

    Args:
        taken: The tensor.
        element: Index of the chosen element among the kept ones.
        sample: Whether only one sample is kept, so that a place begins with its number, 0.
    """
    value = taken.value(element)
    place = _place(((1, *taken.kept_shape) if sample else taken.kept_shape), element)
    dtype = str(taken.dtype).removeprefix("torch.")
    shares, fmt = _shares(taken), FORMATS.get(dtype)
    return {
        "name": taken.name,
        "dtype": dtype,
        "shape": " × ".join(map(str, taken.shape)),
        "place": place,
        "index": element,
        "value": say(value, 4),
        "exponent": math.frexp(value)[1] - 1 if value and math.isfinite(value) else None,
        "bits": None if fmt is None else _bits(taken, element, fmt),
        "values": _neighbors(taken, element),
        "figures": _figures(taken),
        "shares": shares,
        "description": _description(taken, place, value, shares),
    }


def _bits(taken: Snapshot, element: int, fmt: FloatFormat) -> dict[str, Any]:
    pattern = int(taken.kept[element : element + 1].view(_PATTERNS[taken.dtype]).item()) % (1 << fmt.total_bits)
    sign, exponent, fraction = fmt.fields(pattern)
    return {
        "sign": str(sign),
        "exponent": f"{exponent:0{fmt.exponent_bits}b}",
        "fraction": f"{fraction:0{fmt.mantissa_bits}b}",
        "kind": fmt.kind(pattern),
        "hex": f"0x{pattern:0{fmt.total_bits // 4}x}",
        "changed": [],
        "cut": 0,
    }


def _compare_bits(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Mark the bits that a stage changed, or the trailing bits of the fraction that a narrower dtype has not."""
    old, new = before["bits"], after["bits"]
    if not old or not new:
        return
    if before["dtype"] != after["dtype"]:
        old["cut"] = max(0, len(old["fraction"]) - len(new["fraction"]))
        return
    fields = ("sign", "exponent", "fraction")
    pairs = zip("".join(old[each] for each in fields), "".join(new[each] for each in fields), strict=True)
    new["changed"] = [position for position, (one, other) in enumerate(pairs) if one != other]


def _neighbors(taken: Snapshot, element: int) -> list[dict[str, Any]]:
    first = max(0, min(element - _NEIGHBORS, len(taken.kept) - 2 * _NEIGHBORS - 1))
    indices = range(first, min(first + 2 * _NEIGHBORS + 1, len(taken.kept)))
    return [
        {"index": index, "place": _place(taken.kept_shape, index), "value": say(taken.value(index), 2)}
        for index in indices
    ]


def _figures(taken: Snapshot) -> list[list[str]]:
    """Magnitudes of the whole tensor: the smallest that is not 0, the mean, the largest; zeros, or inf and NaN."""
    stats = taken.stats
    has_values = stats.exponents.finite_nonzero > 0
    share = stats.zeros / max(stats.numel, 1)
    zeros = ["zeros", f"{100 * share:.0f} %" if 0.1 <= share < 0.995 else percent(share)]
    return [
        ["min", say(stats.smallest_nonzero, 2) if has_values else "–"],
        ["mean", say(taken.mean, 2)],
        ["max", say(stats.absmax, 2) if has_values else "–"],
        ["inf, NaN", f"{taken.nonfinite:,}"] if taken.nonfinite else zeros,
    ]


def _shares(taken: Snapshot) -> list[float]:
    """The share of the finite elements that are not 0 in each power of two from 2^LOW to 2^HIGH, in percent."""
    histogram = taken.stats.exponents
    bins = np.clip(histogram.exponents, LOW, HIGH) - LOW
    counts = np.bincount(bins, weights=histogram.counts, minlength=HIGH - LOW + 1)
    shares: list[float] = np.round(100 * counts / max(histogram.finite_nonzero, 1), 3).tolist()
    return shares


def _description(taken: Snapshot, place: str, value: float, shares: list[float]) -> str:
    """A picture in words, for a screen reader."""
    dtype = str(taken.dtype).removeprefix("torch.")
    peak = f"Most magnitudes are near {binary_power(LOW + int(np.argmax(shares)))}." if any(shares) else "All are 0."
    zones = _zones_in_words(taken)
    return f"{taken.name}{place} is {say(value, 4)} in {dtype}. {peak}{zones}"


def _zones_in_words(taken: Snapshot) -> str:
    histogram = taken.stats.exponents
    low = percent(histogram.underflow_fraction(FLOAT16))
    high = percent(histogram.overflow_fraction(FLOAT16))
    return f" Below the range of float16: {low}; above: {high}." if histogram.finite_nonzero else ""
