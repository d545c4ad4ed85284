"""The one recurrence that torch, apex, Ascend, jmp, Keras and Megatron share; only the constants differ.

    on inf:    hysteresis -= 1;  clean_steps = 0
               if hysteresis <= 0:  scale = max(floor, round(scale * backoff_factor))
    on clean:  clean_steps += 1
               if clean_steps >= growth_interval:
                   grown = min(ceiling, round(scale * growth_factor))
                   scale = grown if finite, or if the source does not ask;  clean_steps = 0;  hysteresis is refilled

``round`` is to float32 where the source keeps its scale in a float32, to nothing where it is a Python float.
`Recurrence.next` is the pure form; the same recurrence on tensors is in ``device_rule.py``. DeepSpeed's rule is
another one: ``deepspeed_rule.py``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real

from amplab.scalers.scale_state import HysteresisState, ScaleState, float32

__all__ = ["Recurrence", "RecurrentRule", "patience_of", "require_factors", "require_interval", "require_scale"]


@dataclass(frozen=True)
class Recurrence:
    """The constants of one rule, and the step from one state to the next.

    Attributes:
        init_scale: where the scale starts.
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean steps.
        backoff_factor: what the scale is multiplied by at an overflow, or divided by where ``divides``.
        growth_interval: clean steps before the scale grows; None: it never moves.
        divides: the scale is divided by ``backoff_factor``, which for 3 is not the same as times a third.
        floor, ceiling: bounds of backing off and of growing; 0 and inf: none.
        single: the scale is a float32, and so are all constants; else a float64.
        keeps_finite: growth that is not finite is dropped.
        hysteresis: overflows before the scale backs off; None: the rule has no such count.
    """

    init_scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | None = 2000
    divides: bool = False
    floor: float = 0.0
    ceiling: float = math.inf
    single: bool = True
    keeps_finite: bool = False
    hysteresis: int | None = None

    def round(self, scale: float) -> float:
        """Return ``scale`` as the source holds it."""
        return float32(scale) if self.single else scale

    def start(self) -> ScaleState:
        """Return the state before the first step."""
        return self._state(self.round(float(self.init_scale)), 0, self.hysteresis)

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Return the state after a step whose gradients were finite (``found_inf=False``) or not."""
        patience = None if self.hysteresis is None else patience_of(state, self.hysteresis)
        if found_inf:
            patience = None if patience is None else patience - 1
            waits = self.growth_interval is None or (patience is not None and patience > 0)
            return self._state(state.scale if waits else self._backed_off(state.scale), 0, patience)
        clean_steps = state.clean_steps + 1
        if self.growth_interval is None or clean_steps < self.growth_interval:
            return self._state(state.scale, clean_steps, patience)
        return self._state(self._grown(state.scale), 0, self.hysteresis)

    def _backed_off(self, scale: float) -> float:
        backed_off = scale / self.backoff_factor if self.divides else scale * self.backoff_factor
        return max(self.round(self.floor), self.round(backed_off))

    def _grown(self, scale: float) -> float:
        grown = min(self.round(self.ceiling), self.round(scale * self.growth_factor))
        return scale if self.keeps_finite and not math.isfinite(grown) else grown

    def _state(self, scale: float, clean_steps: int, patience: int | None) -> ScaleState:
        if self.hysteresis is None or patience is None:
            return ScaleState(scale, clean_steps)
        return HysteresisState(scale, clean_steps, patience)


class RecurrentRule(ABC):
    """A rule that is the shared recurrence with constants of its own, so that it also runs on the device.

    A rule of your own needs no base class (see `ScaleRule`); with this one it gets `start`, `next` and a device
    form for the one property that it defines.

    >>> class Patient(RecurrentRule):
    ...     @property
    ...     def recurrence(self):
    ...         return Recurrence(init_scale=1024.0, growth_interval=10, floor=1.0, hysteresis=3)
    >>> rule = Patient()
    >>> rule.next(rule.start(), found_inf=True)
    HysteresisState(scale=1024.0, clean_steps=0, hysteresis=2)
    """

    @property
    @abstractmethod
    def recurrence(self) -> Recurrence:
        """The constants."""

    @property
    def skips_on_overflow(self) -> bool:
        """Yes."""
        return True

    def start(self) -> ScaleState:
        """The state before the first backward."""
        return self.recurrence.start()

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Back off, count, or grow."""
        return self.recurrence.next(state, found_inf)


def patience_of(state: ScaleState, full: int) -> int:
    """Return the patience that a state has left; ``full`` where it does not say, as one from another rule."""
    return state.hysteresis if isinstance(state, HysteresisState) else full


def require_scale(name: str, value: float | None, *, optional: bool = False) -> None:
    """Refuse a scale, a floor or a ceiling that no loss can be multiplied by in float32.

    Raises:
        TypeError: not a number. ValueError: not finite, not > 0, or beyond float32.
    """
    if value is None and optional:
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number, such as 65536.0; for a dynamic scale use DynamicScale.")
    if not 0.0 < value < math.inf:
        expected = f"{name}={value}: expected a finite number > 0" + (f" or None for no {name}" if optional else "")
        raise ValueError(f"{expected}; powers of two, such as 128.0 or 65536.0, scale without rounding.")
    if not 0.0 < float32(value) < math.inf:
        raise ValueError(f"{name}={value}: expected a number that float32 can hold, from 2^-149 to 2^128.")


def require_factors(growth_factor: float, backoff_factor: float) -> None:
    """Refuse factors that do not grow and shrink. Raises: ValueError."""
    if not 1.0 < growth_factor < math.inf:
        raise ValueError(
            f"growth_factor={growth_factor}: expected a finite value > 1; use backoff_factor to shrink the scale."
        )
    if not 0.0 < backoff_factor < 1.0:
        raise ValueError(
            f"backoff_factor={backoff_factor}: expected a value between 0 and 1; use growth_factor to grow the scale."
        )


def require_interval(name: str, value: int) -> None:
    """Refuse a count of steps that is not a whole number >= 1. Raises: ValueError."""
    if not value >= 1 or value % 1 != 0:
        remedy = "for a scale that never moves use StaticScale" if name == "growth_interval" else "1 is the least"
        raise ValueError(f"{name}={value}: expected a whole number of steps >= 1; {remedy}.")
