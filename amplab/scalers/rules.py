"""How the loss scale moves: a rule is a frozen value, its state is a frozen value, a transition returns the next one.

    state = rule.start()
    state = rule.next(state, found_inf)      # after every backward (apex) or step (torch)

No tensor and no device here: a history of states can be plotted, tested and replayed under another rule.
Unscaling gradients is in ``unscaler.py``.
"""

import math
import struct
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

__all__ = ["APEX_DYNAMIC", "TORCH_DYNAMIC", "DynamicScale", "ScaleRule", "ScaleState", "StaticScale"]


@dataclass(frozen=True)
class ScaleState:
    """Where a rule stands: the loss scale in use, and the clean steps since it last moved or overflowed."""

    scale: float
    clean_steps: int = 0


class ScaleRule(Protocol):
    """What every rule offers."""

    @property
    def skips_on_overflow(self) -> bool:
        """Whether the optimizer step is left out when a gradient is not finite."""

    def start(self) -> ScaleState:
        """The state before the first backward."""

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a backward whose gradients were finite (``found_inf=False``) or not."""


@dataclass(frozen=True)
class StaticScale:
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
        _require_scale("scale", self.scale)

    @property
    def skips_on_overflow(self) -> bool:
        """No: what overflowed goes into the step."""
        return False

    def start(self) -> ScaleState:
        """The scale itself, no clean steps."""
        return ScaleState(float(self.scale))

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Keep the scale; count the clean steps."""
        return ScaleState(state.scale, 0 if found_inf else state.clean_steps + 1)


@dataclass(frozen=True)
class DynamicScale:
    """Back off at every overflow, grow after a run of clean steps.

    ::

        start:     scale = clamp(init_scale, floor, ceiling);  clean_steps = 0
        on inf:    scale = max(floor, scale * backoff_factor);  clean_steps = 0
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       grown = min(ceiling, scale * growth_factor)
                       scale = grown if it is finite in float32 else scale
                       clean_steps = 0

    The scale is a float32, as it is on the device: products are rounded to it. Without a floor, 166 overflows in
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

    Reference: ``torch.amp.GradScaler`` (no floor, no ceiling) and apex ``LossScaler`` (ceiling 2^24).

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
        _require_scale("init_scale", self.init_scale)
        for name, bound in (("floor", self.floor), ("ceiling", self.ceiling)):
            if bound is not None:
                _require_scale(name, bound, otherwise="or None for no " + name)
        self._require_factors()
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ValueError(f"floor={self.floor} is above ceiling={self.ceiling}: expected floor <= ceiling.")

    def _require_factors(self) -> None:
        if not 1.0 < self.growth_factor < math.inf:
            raise ValueError(
                f"growth_factor={self.growth_factor}: expected a finite value > 1; "
                "use backoff_factor to shrink the scale."
            )
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(
                f"backoff_factor={self.backoff_factor}: expected a value between 0 and 1; "
                "use growth_factor to grow the scale."
            )
        if not self.growth_interval >= 1 or self.growth_interval % 1 != 0:
            raise ValueError(
                f"growth_interval={self.growth_interval}: expected a whole number of steps >= 1; "
                "for a scale that never moves use StaticScale."
            )

    @property
    def skips_on_overflow(self) -> bool:
        """Yes."""
        return True

    def start(self) -> ScaleState:
        """``init_scale``, brought between floor and ceiling."""
        return ScaleState(self._at_least_floor(self._at_most_ceiling(float(self.init_scale))))

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Back off, count, or grow."""
        if found_inf:
            return ScaleState(self._at_least_floor(_float32(state.scale * self.backoff_factor)))
        if state.clean_steps + 1 < self.growth_interval:
            return ScaleState(state.scale, state.clean_steps + 1)
        grown = self._at_most_ceiling(_float32(state.scale * self.growth_factor))
        return ScaleState(grown if math.isfinite(grown) else state.scale)

    def _at_least_floor(self, scale: float) -> float:
        return scale if self.floor is None else max(float(self.floor), scale)

    def _at_most_ceiling(self, scale: float) -> float:
        return scale if self.ceiling is None else min(float(self.ceiling), scale)


def _float32(value: float) -> float:
    """``value`` rounded to float32, inf where it overflows."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _require_scale(name: str, value: float, *, otherwise: str = "") -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number, such as 65536.0; for a dynamic scale use DynamicScale.")
    if not 0.0 < value < math.inf:
        expected = f"{name}={value}: expected a finite number > 0" + (f" {otherwise}" if otherwise else "")
        raise ValueError(f"{expected}; powers of two, such as 128.0 or 65536.0, scale without rounding.")


TORCH_DYNAMIC = DynamicScale()
APEX_DYNAMIC = DynamicScale(ceiling=2.0**24)
