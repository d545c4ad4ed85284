"""How the loss scale moves: a rule is a frozen value, its state is a frozen value, a transition returns the next one.

    state = rule.start()
    state = rule.next(state, found_inf)      # after every backward (apex) or step (torch)

No tensor and no device here: a history of states can be plotted, tested and replayed under another rule
(``replay.py``). Here are the protocol, the static scale and torch's rule with bounds; the rules of the other
libraries are in ``published_rules.py`` and ``deepspeed_rule.py``, their form on tensors in ``device_rule.py``.
Unscaling gradients is in ``unscaler.py``.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from amplab.scalers.recurrence import (
    Recurrence,
    RecurrentRule,
    require_factors,
    require_interval,
    require_scale,
)
from amplab.scalers.scale_state import ScaleState

__all__ = ["APEX_DYNAMIC", "TORCH_DYNAMIC", "DynamicScale", "ScaleRule", "ScaleState", "StaticScale", "require_rule"]


class ScaleRule(Protocol):
    """What every rule offers, and all that a rule of your own has to.

    ``next`` is a pure function: the same state and verdict give the same next state. A rule that counts more than
    clean steps returns states of its own, frozen and derived from `ScaleState`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class HalveAndCreep:
    ...     '''Halve at an overflow, creep up by a thousandth at every clean step.'''
    ...     skips_on_overflow: bool = True
    ...     def start(self):
    ...         return ScaleState(1024.0)
    ...     def next(self, state, found_inf):
    ...         scale = state.scale / 2 if found_inf else state.scale * 1.001
    ...         return ScaleState(max(1.0, scale), 0 if found_inf else state.clean_steps + 1)
    >>> rule = HalveAndCreep()
    >>> rule.next(rule.next(rule.start(), True), False)
    ScaleState(scale=512.512, clean_steps=1)
    """

    @property
    def skips_on_overflow(self) -> bool:
        """Whether the optimizer step is left out when a gradient is not finite."""

    def start(self) -> ScaleState:
        """The state before the first backward."""

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a backward whose gradients were finite (``found_inf=False``) or not."""


def require_rule(rule: Any) -> None:
    """Refuse what is no rule. Raises: TypeError."""
    if isinstance(rule, type) or not all(hasattr(rule, name) for name in ("skips_on_overflow", "start", "next")):
        given = rule.__name__ if isinstance(rule, type) else repr(rule)
        call = f"{given}()" if isinstance(rule, type) else "DynamicScale()"
        raise TypeError(f"rule={given}: expected a rule of the scale, an instance; pass one such as {call}.")


@dataclass(frozen=True)
class StaticScale(RecurrentRule):
    """The same scale for ever; gradients that overflow go into the step.

    ::

        on inf:    clean_steps = 0
        on clean:  clean_steps += 1

    Args:
        scale: > 0 and finite; 1.0 leaves the loss as it is.

    Raises:
        ValueError: the scale is not a positive finite number.
        TypeError: it is not a number at all.

    Reference: apex ``LossScaler(loss_scale=128.0)``, which never skips. (apex counts on over an overflow; the
    count decides nothing here, so it tells how long all was well.)

    >>> rule = StaticScale(128.0)
    >>> rule.next(rule.start(), found_inf=True)
    ScaleState(scale=128.0, clean_steps=0)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require_scale("scale", self.scale)

    @property
    def skips_on_overflow(self) -> bool:
        """No: what overflowed goes into the step."""
        return False

    @property
    def recurrence(self) -> Recurrence:
        """A scale that never moves."""
        return Recurrence(self.scale, growth_interval=None, single=False)


@dataclass(frozen=True)
class DynamicScale(RecurrentRule):
    """Back off at every overflow, grow after a run of clean steps.

    ::

        start:     scale = clamp(init_scale, floor, ceiling);  clean_steps = 0
        on inf:    scale = max(floor, scale * backoff_factor);  clean_steps = 0
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       grown = min(ceiling, scale * growth_factor)
                       scale = grown if it is finite in float32 else scale
                       clean_steps = 0

    The scale is a float32, as it is on the device: every value is rounded to it. Without a floor, 166 overflows in
    a row take 2^16 to exactly 0.0.

    Args:
        init_scale: > 0 and finite.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: clean steps before the scale grows, >= 1.
        floor: the scale never backs off below it; None for no floor.
        ceiling: the scale never grows above it; None for no ceiling.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``torch.amp.GradScaler`` (no floor, no ceiling); with a ceiling of 2^24 the scales of apex's
    ``LossScaler`` down to float32's range (`ApexScale` follows apex below it).

    >>> rule = DynamicScale(growth_interval=2)
    >>> after_overflow = rule.next(rule.start(), found_inf=True)
    >>> rule.next(rule.next(after_overflow, found_inf=False), found_inf=False)
    ScaleState(scale=65536.0, clean_steps=0)
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float | None = None
    ceiling: float | None = None

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        require_scale("floor", self.floor, optional=True)
        require_scale("ceiling", self.ceiling, optional=True)
        require_factors(self.growth_factor, self.backoff_factor)
        require_interval("growth_interval", self.growth_interval)
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor={self.floor} is above ceiling={self.ceiling}: expected floor <= ceiling.")

    @property
    def recurrence(self) -> Recurrence:
        """torch's constants, or those given; ``init_scale`` brought between floor and ceiling."""
        floor = 0.0 if self.floor is None else float(self.floor)
        ceiling = math.inf if self.ceiling is None else float(self.ceiling)
        return Recurrence(
            init_scale=max(floor, min(ceiling, self.init_scale)),
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            floor=floor,
            ceiling=ceiling,
            keeps_finite=True,
        )


TORCH_DYNAMIC = DynamicScale()
APEX_DYNAMIC = DynamicScale(ceiling=2.0**24)
