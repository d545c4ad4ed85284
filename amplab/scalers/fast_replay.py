"""The loss scale of a whole run under any rule, in milliseconds: `replay` without its reasons.

    limits = overflow_limits(exponents, recorded_scales)     step i overflows  ⟺  scale >= limits[i]
    path = scale_path(rule, limits)                          path.scales, path.found_infs

A rule changes its scale rarely. Between two changes the state only counts clean steps, so that one search in the limits
replaces thousands of transitions: a run of 20,000 steps takes about a millisecond where `replay` takes a second. The
scales and the overflows are those of `replay` (``gradient_exponents``); which steps the record does not decide is not
in the path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amplab.formats import FLOAT16, FloatFormat
from amplab.scalers.published_rules import DeepSpeedScale, LossScaleAtMinimumError
from amplab.scalers.replay import exponents_around
from amplab.scalers.rules import RecurrentRule, ScaleRule, ScaleState, require_rule

__all__ = ["ScalePath", "overflow_limits", "scale_path", "steps_lost"]


@dataclass(frozen=True, eq=False)
class ScalePath:
    """The scale at every step of a run, up to the step at which the rule ended it.

    Attributes:
        scales: float64 ``(steps,)``.
        found_infs: bool ``(steps,)``: whether the gradients of the step overflow under this scale.
        skips: whether the rule skips these steps; one that does not loses the run at the first of them.
        next_scale: the scale that the step after the last would use.
    """

    scales: np.ndarray
    found_infs: np.ndarray
    skips: bool
    next_scale: float

    @property
    def lost_from(self) -> int | None:
        """The first overflow that is taken, which leaves inf or NaN in the weights; None without one."""
        taken = np.flatnonzero(self.found_infs)
        return None if self.skips or not len(taken) else int(taken[0])


def overflow_limits(exponents: np.ndarray, recorded_scales: np.ndarray, fmt: FloatFormat = FLOAT16) -> np.ndarray:
    """Return for each recorded step the least scale under which its gradients overflow.

    Args:
        exponents: float64 ``(steps,)``: floor(log2) of the largest unscaled gradient; -inf if all are zero, inf if one
            was not finite, NaN if all were finite and their size is unknown.
        recorded_scales: float64 ``(steps,)``: the scale of each recorded step.
        fmt: the format in which gradients overflow.

    Returns:
        float64 ``(steps,)``, inf for a step that never overflows.

    Sync: none.

    >>> overflow_limits(np.array([0.0, -3.0, -np.inf]), np.full(3, 1024.0))
    array([ 65520., 524160.,     inf])
    """
    largest = fmt.max + fmt.ulp(fmt.max) / 2  # the smallest number that rounds to inf
    finite = np.isfinite(exponents)
    limits = np.full(len(exponents), np.inf)
    limits[finite] = np.ldexp(largest, -exponents[finite].astype(np.int64))
    broken = exponents == np.inf
    if broken.any():
        limits[broken] = _broken_limits(exponents, recorded_scales, broken, largest)
    if np.isnan(exponents).any():
        known = [None if math.isnan(each) else each for each in exponents.tolist()]
        for step, (lowest, _) in exponents_around(known).items():
            # It was finite under the recorded scale, and so is it under a smaller one.
            limits[step] = max(math.ldexp(largest, -lowest), np.nextafter(recorded_scales[step], np.inf))
    return limits


def _broken_limits(
    exponents: np.ndarray, recorded_scales: np.ndarray, broken: np.ndarray, largest: float
) -> np.ndarray:
    """Return the limits of steps with inf or NaN: the gradients are taken to be as large as those of a step nearby."""
    measured = np.flatnonzero(np.isfinite(exponents))
    recorded = recorded_scales[broken]
    if not len(measured):
        return np.zeros(len(recorded))
    before = np.maximum(np.searchsorted(measured, np.flatnonzero(broken), side="right") - 1, 0)
    nearby = exponents[measured[before]]
    usable = (recorded > 0.0) & np.isfinite(recorded)
    at_least = np.where(usable, np.frexp(largest / np.where(usable, recorded, 1.0))[1] - 1, nearby)
    guessed = np.ldexp(largest, -np.maximum(nearby, at_least).astype(np.int64))
    limits: np.ndarray = np.minimum(recorded, guessed)
    return limits


def scale_path(rule: ScaleRule, limits: np.ndarray) -> ScalePath:
    """Return the scales of a run under a rule.

    Args:
        rule: any rule; one that is neither published nor a `RecurrentRule` is followed step by step.
        limits: of `overflow_limits`.

    Raises:
        TypeError: ``rule`` is not a scaling rule.

    Sync: none.

    >>> from amplab.scalers import DynamicScale
    >>> path = scale_path(DynamicScale(growth_interval=2), np.array([65520.0, 65520.0, 65520.0, 262080.0, 262080.0]))
    >>> path.scales.tolist(), path.found_infs.tolist()
    ([65536.0, 32768.0, 32768.0, 65536.0, 65536.0], [True, False, False, False, False])
    """
    require_rule(rule)
    total = len(limits)
    known: dict[tuple[ScaleState, int, bool], ScaleState] = {}  # a rule returns to the same states again and again
    scales, found = np.empty(total), np.zeros(total, dtype=np.bool_)
    state, step, lost = rule.start(), 0, False
    while step < total:
        end = min(step + _clean_steps_until_change(rule, state), total)
        bad = _first_overflow(limits[step:end], state.scale, lost=lost)
        clean = end - step if bad is None else bad
        last = step + clean - (bad is None)
        scales[step : last + 1] = state.scale
        found[last] = bad is not None
        lost |= bad is not None and not rule.skips_on_overflow
        transition = (state, last - step, bad is not None)
        try:
            if transition not in known:
                known[transition] = rule.next(_counted(rule, state, last - step), bad is not None)
            state = known[transition]
        except LossScaleAtMinimumError:
            return ScalePath(scales[: last + 1], found[: last + 1], rule.skips_on_overflow, state.scale)
        step = last + 1
    return ScalePath(scales, found, rule.skips_on_overflow, state.scale)


def _first_overflow(limits: np.ndarray, scale: float, *, lost: bool) -> int | None:
    """Return the position of the first step that overflows under `scale`."""
    if lost or not 0.0 < scale < math.inf:
        return 0
    over = limits <= scale
    first = int(over.argmax())
    return first if over[first] else None


def _clean_steps_until_change(rule: ScaleRule, state: ScaleState) -> int:
    """Return the number of clean steps until the scale grows, the one at which it does included."""
    if isinstance(rule, RecurrentRule) and type(rule).next is RecurrentRule.next:
        interval = rule.recurrence.growth_interval
        return 2**62 if interval is None else max(interval - state.clean_steps, 1)
    if type(rule) is DeepSpeedScale:
        waits = -state.clean_steps % rule.growth_interval
        return 1 + (waits if waits or state.clean_steps else rule.growth_interval)
    return 1


def _counted(rule: ScaleRule, state: Any, clean_steps: int) -> ScaleState:
    """Return the state after some clean steps that do not change the scale."""
    if clean_steps == 0:
        return state  # type: ignore[no-any-return]
    after = rule.next(state, False)  # the first one may reset the hysteresis
    return replace(after, clean_steps=after.clean_steps + clean_steps - 1)


def steps_lost(path: ScalePath, recorded_skips: Sequence[bool] | np.ndarray) -> int:
    """Return how many more steps than in the recorded run are lost; negative: fewer."""
    lost = int(path.found_infs.sum()) if path.lost_from is None else len(path.scales) - path.lost_from
    return lost + len(recorded_skips) - len(path.scales) - int(np.count_nonzero(recorded_skips))
