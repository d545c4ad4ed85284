"""The tab of the loss scale as plain values: how it moves now, what the run costs, and other rules over the same run.

`dynamics` has the steps until the scale grows, the skipped steps, steps/s and bytes over time. `what_if_payload` has
one line and one row for each rule: the one of the person, and the published ones. No widget here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from amplab.amp import MemoryUse
from amplab.display.numbers import count, percent, power
from amplab.formats import FLOAT16
from amplab.lab import GradientSample, History
from amplab.lab.scale_growth import ScaleGrowth
from amplab.lab.thinning import extreme_rows
from amplab.scalers import PUBLISHED_RULES, DynamicScale, ScalePath, ScaleState, steps_lost

__all__ = [
    "OWN",
    "FollowedScale",
    "ScaleSetting",
    "dynamics",
    "nearest_exponent",
    "own_rule",
    "what_if_payload",
]

OWN = "your rule"
"""The name of the rule that the controls describe."""

NO_MEMORY = "The bytes of a run are counted for the lab's own experiments only."

_LEAST, _LARGEST = -24, 40  # log2 of the first scale of a rule
_CORNERS = 300  # of one line
_SKIPS = 150  # marks on one line
_SAMPLES = 40  # histograms from which the lost gradients are estimated
_RATES = 80  # points of steps/s
_MOST_TIMED = 256  # steps whose median time is one of these points


class ScaleSetting(Protocol):
    """What a scale moves by, as the lab's config says it."""

    @property
    def is_dynamic(self) -> bool:
        """Whether an overflow skips the step and moves the scale."""

    @property
    def growth_interval(self) -> int | None:
        """Steps without overflow until it grows; None if that is not known."""

    @property
    def init_scale(self) -> float:
        """The first scale."""

    @property
    def min_loss_scale(self) -> float | None:
        """Its floor."""

    @property
    def max_loss_scale(self) -> float | None:
        """Its ceiling."""


@dataclass(frozen=True)
class FollowedScale:
    """The setting of a run that the lab does not control, as far as it is known."""

    is_dynamic: bool
    growth_interval: int | None
    init_scale: float
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None


# How the scale moves now


def dynamics(history: History, config: ScaleSetting, scale: float, growth: ScaleGrowth | None) -> dict[str, Any]:
    """Return the figures and the two series of the tab.

    Args:
        history: The run.
        config: The setting in effect.
        scale: Scale that the next step will use.
        growth: When it grows, as what moves it says; None if that is not known, as of a run from a log.
    """
    rate, memory = _rates(history), _memory(history)
    return {
        "growth": _growth(config, scale, growth),
        "skips": _skips(history),
        "rate": rate,
        "memory": memory,
        "words": f"{_rate_words(rate)} {_memory_words(history)}".strip(),
    }


def _growth(config: ScaleSetting, scale: float, growth: ScaleGrowth | None) -> dict[str, Any]:
    """The steps that are counted, the interval, and both in words."""
    if not config.is_dynamic:
        text = f"The scale is static, {power(scale, raised=True)}: no step is skipped, and it does not grow."
        return {"counted": None, "interval": None, "text": text}
    if growth is None or not growth.interval:
        return {"counted": None, "interval": None, "text": _growth_words(scale, growth)}
    return {"counted": growth.clean_steps, "interval": growth.interval, "text": _growth_words(growth.scale, growth)}


def _growth_words(scale: float, growth: ScaleGrowth | None) -> str:
    """Say when a dynamic scale grows."""
    now = power(scale, raised=True)
    if scale == 0:
        return "The scale is 0, and stays 0: it was halved until no number was left, and each loss is multiplied by 0."
    if growth is None:
        return f"The next step uses {now}. When the scale grows is not known of this run."
    if not growth.interval:
        return f"The scale, {now}, does not grow; an overflow lowers it."
    if growth.left is None and growth.grown > torch.finfo(torch.float32).max:
        return f"The scale, {now}, does not grow: float32 has no larger one; an overflow lowers it."
    if growth.grown <= scale:
        return f"The scale is at its ceiling, {now}; an overflow halves it."
    if growth.left is None:  # its window was made shorter
        return f"The scale, {now}, does not grow before an overflow: more steps are counted than its window has."
    return f"Grows to {power(growth.grown, raised=True)} after {count(growth.left, 'more step')} without an overflow."


def _skips(history: History) -> str:
    skips, steps = history.skip_count, len(history)
    if not skips:
        return "No step was skipped."
    last = history.skips(skips - 1)[-1].step
    return f"{count(skips, 'step')} skipped, {percent(skips / steps)} of all; the last one is step {last:,}."


def _rates(history: History) -> dict[str, list[float]]:
    """Steps per second over the run: of each part the median in its middle, so that a pause does not show."""
    taken = len(history) - 1  # times between two steps
    if taken < 2:
        return {"steps": [], "values": []}
    parts = min(_RATES, taken // 2)
    lengths = taken // parts + (np.arange(parts) < taken % parts)
    wide = min(taken // parts, _MOST_TIMED)
    middles = np.cumsum(lengths) - lengths + lengths // 2
    rows = (middles - wide // 2)[:, None] + np.arange(wide + 1)  # (parts, rows)
    medians = np.median(np.diff(history.column("seconds", rows.ravel()).reshape(rows.shape)), axis=1)
    return {
        "steps": history.column("step", middles + 1).tolist(),
        "values": [round(1.0 / median, 2) if median > 0 else 0.0 for median in medians.tolist()],
    }


def _rate_words(rate: Mapping[str, list[float]]) -> str:
    values = rate["values"]
    if not values:
        return ""
    return f"Steps per second: {values[-1]:,.0f} now, from {min(values):,.0f} to {max(values):,.0f} over the run."


def _memory(history: History) -> dict[str, Any]:
    """Bytes by kind from each step on, for the kinds that the run has; its last entry holds until now."""
    held = history.memory
    if not held and len(history):
        return {"steps": [], "end": len(history) - 1, "kinds": [], "note": NO_MEMORY}
    kinds = [
        each.name
        for each in fields(MemoryUse)
        if each.default is MISSING or any(getattr(memory, each.name) for _, memory in held)
    ]
    return {
        "steps": [step for step, _ in held],
        "end": max(len(history) - 1, 0),
        "kinds": [
            {"name": kind.replace("_", " "), "values": [getattr(memory, kind) for _, memory in held]} for kind in kinds
        ],
    }


def _memory_words(history: History) -> str:
    if not history.memory:
        return ""
    memory = history.memory[-1][1]
    parts = ", ".join(f"{each.name.replace('_', ' ')} {getattr(memory, each.name):,} B" for each in fields(MemoryUse))
    return f"Memory now: {parts}."


# Other rules over the same run


def nearest_exponent(scale: float) -> int:
    """Return log2 of the first scale of a rule that begins as near as possible to a scale.

    >>> nearest_exponent(2.0**16), nearest_exponent(0.0), nearest_exponent(math.inf)
    (16, -24, 40)
    """
    return round(math.log2(min(max(scale, 2.0**_LEAST), 2.0**_LARGEST)))


def own_rule(config: ScaleSetting, *, init: float, window: float, backoff: float) -> DynamicScale:
    """Return the rule of the controls.

    Args:
        config: The setting, whose floor and ceiling also hold for the rule.
        init: log2 of the first scale.
        window: Steps without overflow until the scale doubles.
        backoff: What an overflow multiplies the scale with.

    Raises:
        ValueError: A value that no rule has.
    """
    if not _LEAST <= init <= _LARGEST:
        raise ValueError(f"init 2^{init:g}: enter an exponent from {_LEAST} to {_LARGEST}.")
    if not (float(window).is_integer() and window >= 1):
        raise ValueError(f"window {window:g}: enter a whole number of steps from 1 on.")
    if not 0.0 < backoff < 1.0:
        raise ValueError(f"backoff {backoff:g}: enter a number between 0 and 1.")
    ceiling = None if config.max_loss_scale is None else max(config.max_loss_scale, 2.0**init)
    floor = None if config.min_loss_scale is None else min(config.min_loss_scale, 2.0**init)
    return DynamicScale(
        init_scale=2.0**init,
        growth_interval=int(window),
        backoff_factor=float(backoff),
        floor=floor,
        ceiling=ceiling,
    )


def what_if_payload(history: History, own: DynamicScale) -> dict[str, Any]:
    """Return the lines and the rows of the recorded scale and of each rule over the same run."""
    rules = {OWN: own, **PUBLISHED_RULES}
    paths = history.scale_paths(rules)
    used, skipped = history.column("loss_scale"), history.column("skipped")
    last = history.last
    recorded = ScalePath(used, skipped, skips=True, end=ScaleState(1.0 if last is None else last.next_loss_scale))
    samples = _spread_samples(history)
    runs = [
        _run("recorded", recorded, skipped, samples),
        *(_run(name, path, skipped, samples, doubt) for name, (path, doubt) in paths.items()),
    ]
    return {"steps": len(history), "runs": runs, "words": _what_if_words(runs, len(history))}


def _run(
    name: str,
    path: ScalePath,
    recorded_skips: np.ndarray,
    samples: list[GradientSample],
    doubt: tuple[int, str] | None = None,
) -> dict[str, Any]:
    over = np.flatnonzero(path.found_infs)
    lost = None if name == "recorded" else steps_lost(path, recorded_skips)
    share = _gradients_lost(path, samples)
    return {
        "name": name,
        "corners": _corners(path.scales),
        "skips": over[:: max(1, -(-len(over) // _SKIPS))].tolist(),
        "skipped": f"{len(over):,}" if path.lost_from is None else "none",
        "lost": "–" if lost is None else _signed(lost),
        "gradients": "–" if share is None else percent(share),
        "last": power(path.end.scale, raised=True) if len(path.scales) else "–",
        "ended": None if len(path.scales) == len(recorded_skips) else len(path.scales) - 1,
        "doubt": None if doubt is None else f"a guess from step {doubt[0]:,} on: {doubt[1]}",
    }


def _corners(scales: np.ndarray) -> list[list[float]]:
    """Return (step, log2) where the scale changes, and at the end; a line with too many keeps its extremes."""
    if not len(scales):
        return []
    rows = np.flatnonzero(np.diff(scales, prepend=np.nan) != 0)
    if len(rows) > _CORNERS:
        starts = np.unique(np.linspace(0, len(rows), _CORNERS // 4, endpoint=False).astype(np.int64))
        rows = rows[extreme_rows(scales[rows], starts)]
    rows = np.append(rows, len(scales) - 1)
    return [[int(row), math.log2(scales[row])] for row in rows if 0.0 < scales[row] < math.inf]


def _spread_samples(history: History) -> list[GradientSample]:
    samples = history.gradient_samples
    return list(samples[:: max(1, -(-len(samples) // _SAMPLES))])


def _gradients_lost(path: ScalePath, samples: list[GradientSample]) -> float | None:
    """Return the mean share of the gradients' elements that float16 turns into zero at these scales."""
    shares = [
        sample.histogram.lost_share(float(path.scales[sample.step]), FLOAT16)
        for sample in samples
        if sample.step < len(path.scales)
    ]
    known = [1.0 if share is None else share for share in shares]
    return sum(known) / len(known) if known else None


def _signed(number: int) -> str:
    return f"{number:+,}".replace("-", "−") if number else "0"


def _what_if_words(runs: list[dict[str, Any]], steps: int) -> str:
    if not steps:
        return "Train first: other rules are followed over the recorded run."
    own = next(run for run in runs if run["name"] == OWN)
    doubt = "" if own["doubt"] is None else f"; {own['doubt']}"
    others = " ≈ marks what is a guess." if any(run["doubt"] for run in runs) else ""
    counts = f"{own['skipped']} skipped, steps lost {own['lost']}{doubt}"
    return f"{count(steps, 'step')} replayed. {OWN.capitalize()}: {counts}.{others}"
