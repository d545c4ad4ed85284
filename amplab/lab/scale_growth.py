"""`ScaleGrowth`: when a loss scale grows next, by the count and the interval of what moves it.

A count from the recorded scales would be another one: a new window keeps the scaler's count, a static scale counts
too, and a loaded state brings its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from amplab.scalers import RecurrentRule, ScaleRule, ScaleState

__all__ = ["ScaleGrowth", "growth_of_rule", "growth_of_saved", "interval_of"]


@dataclass(frozen=True)
class ScaleGrowth:
    """When a loss scale grows next.

    Attributes:
        scale: The scale of the next step.
        grown: What it grows to; at its ceiling it is no higher.
        clean_steps: The steps without an overflow that count.
        interval: Those after which it grows; 0: it never does.
        left: Further steps without an overflow until then; None: it does not grow before an overflow.
    """

    scale: float
    grown: float
    clean_steps: int
    interval: int
    left: int | None


def interval_of(rule: ScaleRule) -> int | None:
    """Return the clean steps after which a rule lets its scale grow; None if it never does, or if that is not known."""
    return rule.recurrence.growth_interval if isinstance(rule, RecurrentRule) else None


def growth_of_rule(rule: ScaleRule, state: ScaleState, *, backwards: int = 1) -> ScaleGrowth | None:
    """Return when a scale grows that a rule of `amplab.scalers` moves; None if it never does, or is not known to.

    Args:
        rule: What moves it.
        state: Its present state.
        backwards: How often one step moves it, as apex's scale moves after each backward.

    Sync: none.

    >>> from amplab.scalers import DynamicScale
    >>> growth_of_rule(DynamicScale(growth_interval=50), ScaleState(65536.0, 45))
    ScaleGrowth(scale=65536.0, grown=131072.0, clean_steps=45, interval=50, left=5)
    """
    counted = interval_of(rule)
    if counted is None:
        return None
    grown = rule.next(replace(state, clean_steps=counted - 1), False).scale
    interval = -(-counted // backwards)
    left = max(1, -(-(counted - state.clean_steps) // backwards))  # a count past the interval grows at the next step
    return ScaleGrowth(state.scale, grown, interval - left, interval, left)


def growth_of_saved(rule: ScaleRule | None, saved: Mapping[str, Any]) -> ScaleGrowth | None:
    """Return when the scale of a GradScaler grows, of torch's class or of amplab's.

    Args:
        rule: What moves it instead of torch's four numbers; None for those.
        saved: Its `state_dict`.

    Sync: none.
    """
    scale, clean_steps = float(saved["scale"]), int(saved["_growth_tracker"])
    if rule is not None:
        return growth_of_rule(rule, ScaleState(scale, clean_steps))
    factor = saved["growth_factor"]
    interval = saved["growth_interval"] if factor > 1 else 0
    # torch compares the count with the interval for equality: one that is past it counts on until an overflow.
    # It keeps a scale that would grow to inf in float32.
    grown = scale * factor
    left = interval - clean_steps if clean_steps < interval and grown <= torch.finfo(torch.float32).max else None
    return ScaleGrowth(scale, grown, clean_steps, interval, left)
