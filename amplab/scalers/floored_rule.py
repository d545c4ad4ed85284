"""A floor under a rule that has none: the same rule, whose scale never backs off below a given number.

    next(state, found_inf) = rule.next(state, found_inf),  but no lower than  min(floor, where the rule starts)

The rules themselves are faithful to their sources (``published_rules.py``); the floor is what a face adds.
"""

from dataclasses import dataclass, replace

from amplab.scalers.recurrence import Recurrence, RecurrentRule, require_scale
from amplab.scalers.rules import ScaleRule, require_rule
from amplab.scalers.scale_state import ScaleState

__all__ = ["floored", "name_of_rule"]


def floored(rule: ScaleRule, floor: float | None) -> ScaleRule:
    """Put a floor under a rule.

    Args:
        rule: any rule.
        floor: the scale never backs off below it; None for none.

    Returns:
        ``rule`` itself where its own floor is as high, or where ``floor`` is None; else one with the floor, in the
        same device form.

    Raises:
        TypeError: no rule.
        ValueError: a floor that is not a finite number > 0, or above the ceiling of the rule.

    Sync: none.

    >>> from amplab.scalers import KerasScale
    >>> rule = floored(KerasScale(init_scale=2.0), 1.0)
    >>> state = rule.next(rule.start(), found_inf=True)
    >>> rule.next(state, found_inf=True)
    ScaleState(scale=1.0, clean_steps=0)
    """
    require_rule(rule)
    require_scale("floor", floor, optional=True)
    if floor is None:
        return rule
    if not isinstance(rule, RecurrentRule):
        return _FlooredRule(rule, float(floor))
    if rule.recurrence.floor >= floor or rule.recurrence.growth_interval is None:
        return rule
    if rule.recurrence.ceiling < floor:
        raise ValueError(f"floor={floor} is above the ceiling of {rule!r}: expected floor <= ceiling.")
    return _FlooredRecurrence(rule, float(floor))


def name_of_rule(rule: ScaleRule) -> str:
    """Return the name of the class of ``rule``, whatever floor is under it.

    >>> from amplab.scalers import KerasScale
    >>> name_of_rule(floored(KerasScale(), 1.0))
    'KerasScale'
    """
    return type(rule.rule if isinstance(rule, _FlooredRecurrence | _FlooredRule) else rule).__name__


@dataclass(frozen=True)
class _FlooredRecurrence(RecurrentRule):
    """The shared recurrence, its floor raised; it starts where the rule starts, even below the floor."""

    rule: RecurrentRule
    floor: float

    @property
    def skips_on_overflow(self) -> bool:
        return self.rule.skips_on_overflow

    @property
    def recurrence(self) -> Recurrence:
        constants = self.rule.recurrence
        return replace(constants, floor=min(self.floor, constants.init_scale))


@dataclass(frozen=True)
class _FlooredRule:
    """A rule that only the host can ask, its next scale lifted to the floor."""

    rule: ScaleRule
    floor: float

    @property
    def skips_on_overflow(self) -> bool:
        return self.rule.skips_on_overflow

    def start(self) -> ScaleState:
        return self.rule.start()

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        after = self.rule.next(state, found_inf)
        lowest = min(self.floor, self.start().scale)
        return after if after.scale >= lowest else replace(after, scale=lowest)
