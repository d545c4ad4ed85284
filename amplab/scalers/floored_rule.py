"""`floored`: a rule with a lower bound that the rule itself does not have.

    next(state, found_inf) = rule.next(state, found_inf),  but its scale at least  min(floor, the rule's first scale)

A rule's own bounds, ``floor`` and ``ceiling``, are arguments of the rule. The rules in ``published_rules.py`` follow
their sources, some of which let the scale reach 0; a `GradScaler` adds this floor to any rule it is given.
"""

from dataclasses import dataclass, replace

from amplab.formats.kept_property import kept_property
from amplab.scalers.rules import Recurrence, RecurrentRule, ScaleRule, ScaleState, require_rule, require_scale

__all__ = ["floored", "name_of_rule"]


def floored(rule: ScaleRule, floor: float | None) -> ScaleRule:
    """Return a rule with a floor.

    Args:
        rule: any rule.
        floor: the scale never backs off below it; None for no floor.

    Returns:
        ``rule`` itself if its own floor is as high, or ``floor`` is None; else one with the floor, in the same device
        form.

    Raises:
        TypeError: ``rule`` is not a scaling rule.
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
    """Return the name of the class of ``rule``, without the floor that `floored` added.

    >>> from amplab.scalers import KerasScale
    >>> name_of_rule(floored(KerasScale(), 1.0))
    'KerasScale'
    """
    return type(rule.rule if isinstance(rule, _FlooredRecurrence | _FlooredRule) else rule).__name__


@dataclass(frozen=True)
class _FlooredRecurrence(RecurrentRule):
    """The shared recurrence with a higher floor; its first scale is the rule's, even below the floor."""

    rule: RecurrentRule
    floor: float

    @property
    def skips_on_overflow(self) -> bool:
        return self.rule.skips_on_overflow

    @kept_property
    def recurrence(self) -> Recurrence:
        constants = self.rule.recurrence
        return replace(constants, floor=min(self.floor, constants.init_scale))


@dataclass(frozen=True)
class _FlooredRule:
    """A rule that runs on the host, its next scale raised to the floor."""

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
