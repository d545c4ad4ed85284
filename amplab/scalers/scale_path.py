"""The loss scale of a whole recorded run under any rule.

    limits = overflow_limits(exponents, recorded_scales)     step i overflows  ⟺  scale >= limits[i]
    path = scale_path(rule, limits)                          path.scales, path.found_infs

A rule changes its scale rarely. Between two changes the state only counts clean steps, so that one search in the limits
replaces thousands of transitions: a run of a million steps takes some milliseconds. The same holds for overflows that
leave the state as it is, as at a floor. `replay` adds what the record does not decide.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from amplab.scalers.published_rules import DeepSpeedScale, LossScaleAtMinimumError
from amplab.scalers.rules import HysteresisState, RecurrentRule, ScaleRule, ScaleState, require_rule

__all__ = ["ScalePath", "recorded_path", "scale_path", "steps_lost"]

_FIRST_LOOK = 64  # steps


@dataclass(frozen=True, eq=False)
class ScalePath:
    """The scale at every step of a run, up to the step at which the rule ended it.

    Attributes:
        scales: float64 ``(steps,)``.
        found_infs: bool ``(steps,)``: whether the gradients of the step overflow under this scale.
        skips: whether the rule skips these steps; one that does not loses the run at the first of them.
        end: the state after the last step.
        stopped: the message of the rule that ended the run (DeepSpeed at its floor), else None.
    """

    scales: np.ndarray
    found_infs: np.ndarray
    skips: bool
    end: ScaleState
    stopped: str | None = None

    @property
    def lost_from(self) -> int | None:
        """The first overflow that is taken, which leaves inf or NaN in the weights; None without one."""
        taken = np.flatnonzero(self.found_infs)
        return None if self.skips or not len(taken) else int(taken[0])


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

    def overflows(start: int, end: int, scale: float, lost: bool) -> np.ndarray:
        if lost or not 0.0 < scale < math.inf:
            return np.ones(end - start, dtype=np.bool_)
        return limits[start:end] <= scale

    return _follow(rule, len(limits), overflows)


def recorded_path(rule: ScaleRule, found_infs: np.ndarray) -> ScalePath:
    """Return the scales of a run under a rule whose steps overflow as recorded, bool ``(steps,)``, at every scale.

    Raises:
        TypeError: ``rule`` is not a scaling rule.

    Sync: none.
    """
    return _follow(rule, len(found_infs), lambda start, end, *_: found_infs[start:end])


def _follow(rule: ScaleRule, total: int, overflows: Callable[[int, int, float, bool], np.ndarray]) -> ScalePath:
    """Follow a rule over `total` steps.

    Args:
        overflows: (start, end, scale, whether an overflow was taken before) -> whether each step from start to before
            end overflows under this scale.
    """
    require_rule(rule)
    scales, found = np.empty(total), np.zeros(total, dtype=np.bool_)
    state, step, lost = rule.start(), 0, False

    def first(wanted: bool, end: int) -> int:
        """Return the first step from `step` on that overflows, or that does not; `end` if there is none."""
        start, look = step, _FIRST_LOOK
        while start < end:
            seen = overflows(start, min(start + look, end), state.scale, lost)
            position = int(seen.argmax() if wanted else seen.argmin())
            if seen[position] == wanted:
                return start + position
            start, look = start + len(seen), 4 * look
        return end

    while step < total:
        end = min(step + _clean_steps_until_change(rule, state), total)
        last = first(True, end)
        found_inf, last = last < end, min(last, end - 1)
        scales[step : last + 1], found[last] = state.scale, found_inf
        state, step = _after_clean_steps(rule, state, last - step), last + 1
        try:
            after = rule.next(state, found_inf)
        except LossScaleAtMinimumError as error:
            return ScalePath(scales[:step], found[:step], rule.skips_on_overflow, state, str(error))
        lost |= found_inf and not rule.skips_on_overflow
        if found_inf and _is_at_rest(rule, state, after):
            last = first(False, total)
            scales[step:last], found[step:last] = state.scale, True
            after, step = _after_overflows(state, after, last - step), last
        state = after
    return ScalePath(scales, found, rule.skips_on_overflow, state)


def _clean_steps_until_change(rule: ScaleRule, state: ScaleState) -> int:
    """Return the number of clean steps until the scale grows, the one at which it does included."""
    if _is_recurrent(rule):
        interval = rule.recurrence.growth_interval
        return 2**62 if interval is None else max(int(interval) - state.clean_steps, 1)
    if type(rule) is DeepSpeedScale:
        waits = -state.clean_steps % rule.growth_interval
        return int(1 + (waits if waits or state.clean_steps else rule.growth_interval))
    return 1


def _is_recurrent(rule: ScaleRule) -> TypeGuard[RecurrentRule]:
    """Whether the shared recurrence, and nothing else, moves the scale."""
    return isinstance(rule, RecurrentRule) and type(rule).next is RecurrentRule.next


def _after_clean_steps(rule: ScaleRule, state: ScaleState, clean_steps: int) -> ScaleState:
    """Return the state after some clean steps that do not change the scale."""
    if clean_steps > 0:
        state = rule.next(state, False)  # the first one may reset the hysteresis
        state = replace(state, clean_steps=state.clean_steps + clean_steps - 1)
    return state


def _is_at_rest(rule: ScaleRule, state: ScaleState, after: ScaleState) -> bool:
    """Whether further overflows change nothing but a hysteresis that is used up."""
    if not _is_recurrent(rule) and type(rule) is not DeepSpeedScale:
        return False  # a rule of one's own may count what its state does not hold
    used_up = isinstance(state, HysteresisState) and state.hysteresis <= 0
    return after == state or (used_up and (after.scale, after.clean_steps) == (state.scale, state.clean_steps))


def _after_overflows(before: ScaleState, state: ScaleState, overflows: int) -> ScaleState:
    """Return the state after some more overflows of a rule at rest, of which the last one changed `before`."""
    if isinstance(before, HysteresisState) and isinstance(state, HysteresisState):
        return replace(state, hysteresis=state.hysteresis + overflows * (state.hysteresis - before.hysteresis))
    return state


def steps_lost(path: ScalePath, recorded_skips: Sequence[bool] | np.ndarray) -> int:
    """Return how many more steps than in the recorded run are lost; negative: fewer."""
    lost = int(path.found_infs.sum()) if path.lost_from is None else len(path.scales) - path.lost_from
    return lost + len(recorded_skips) - len(path.scales) - int(np.count_nonzero(recorded_skips))
