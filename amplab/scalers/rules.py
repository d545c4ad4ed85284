"""How the loss scale moves. A rule and its state are frozen values; a transition returns the next state.

    state = rule.start()
    state = rule.next(state, found_inf)      # after every backward (apex) or step (torch)

One recurrence is shared by torch, apex, Ascend, jmp, Keras and Megatron; only the constants differ (`Recurrence`)::

    on inf:    hysteresis -= 1;  clean_steps = 0
               if hysteresis <= 0:  scale = max(floor, round(scale * backoff_factor))
    on clean:  clean_steps += 1
               if clean_steps >= growth_interval:
                   grown = min(ceiling, round(scale * growth_factor))
                   scale = grown if it is finite, or if the source does not check
                   clean_steps = 0;  hysteresis is reset

``round`` is to float32 if the source keeps its scale in a float32 tensor; a Python float is not rounded.

This module uses no tensors and no device, so a history of states can be plotted, tested and replayed under another
rule (``replay.py``). The rules of the other libraries are in ``published_rules.py``, the form that runs on a device in
``device_scale.py``. Gradients are unscaled in ``unscaler.py``.
"""

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from amplab.formats.kept_property import kept_property

__all__ = [
    "APEX_DYNAMIC",
    "TORCH_DYNAMIC",
    "DynamicScale",
    "HysteresisState",
    "Recurrence",
    "RecurrentRule",
    "ScaleRule",
    "ScaleState",
    "StaticScale",
    "float32",
    "hysteresis_of",
    "require_factors",
    "require_interval",
    "require_rule",
    "require_scale",
]


@dataclass(frozen=True)
class ScaleState:
    """State of a rule: the loss scale in use, and the clean steps since it last moved or overflowed."""

    scale: float
    clean_steps: int = 0


@dataclass(frozen=True)
class HysteresisState(ScaleState):
    """State of a rule that tolerates some overflows before it backs off (Megatron, DeepSpeed); how many are left."""

    hysteresis: int = 1


class ScaleRule(Protocol):
    """The members of a rule; your own rule needs no others.

    ``next`` is a pure function: the same state and found_inf give the same next state. A rule that counts more than
    clean steps defines its own state class, frozen and derived from `ScaleState`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class HalveAndCreep:
    ...     '''Halve at an overflow, grow by a thousandth at every clean step.'''
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
        """Whether the optimizer step is skipped if a gradient is not finite."""

    def start(self) -> ScaleState:
        """Return the state before the first backward."""

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Return the state after a backward with ``found_inf``."""


@dataclass(frozen=True)
class Recurrence:
    """The constants of the shared recurrence.

    Attributes:
        init_scale: the scale at the start.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps.
        backoff_factor: multiplies the scale at an overflow, or divides it if ``divides``.
        growth_interval: clean steps before the scale grows; None: the scale never moves.
        divides: divide by ``backoff_factor``; for 3 that is not the same as multiplying by 1/3.
        floor, ceiling: bounds of backoff and of growth; 0 and inf: none.
        single: the scale and all constants are float32, else float64.
        keeps_finite: drop growth that is not finite.
        hysteresis: overflows before the scale backs off; None: the rule does not count them.
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
        """Return ``scale`` rounded to the precision of the original library (float32, or a Python float)."""
        return float32(scale) if self.single else scale


class RecurrentRule(ABC):
    """The base of rules that are the shared recurrence with other constants; they also run on a device.

    Your own rule needs no base class (see `ScaleRule`). With this one it gets `start`, `next` and a device form from
    the one property that it defines. The property is read at every step: cache it if it does any work.

    >>> class Patient(RecurrentRule):
    ...     recurrence = Recurrence(init_scale=1024.0, growth_interval=10, floor=1.0, hysteresis=3)
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
        """Whether the optimizer step is skipped if a gradient is not finite."""
        return True

    def start(self) -> ScaleState:
        """Return the state before the first backward."""
        constants = self.recurrence
        return _state(constants.round(float(constants.init_scale)), 0, constants.hysteresis)

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """Return the state after a backward with ``found_inf``: back off, count, or grow."""
        constants = self.recurrence
        interval, left = constants.growth_interval, constants.hysteresis
        if left is not None:
            left = hysteresis_of(state, left) - bool(found_inf)
        if found_inf:
            waits = interval is None or (left is not None and left > 0)
            return _state(state.scale if waits else _backed_off(constants, state.scale), 0, left)
        clean_steps = state.clean_steps + 1
        if interval is None or clean_steps < interval:
            return _state(state.scale, clean_steps, left)
        return _state(_grown(constants, state.scale), 0, constants.hysteresis)


def _backed_off(constants: Recurrence, scale: float) -> float:
    factor = constants.backoff_factor
    return max(
        constants.round(constants.floor), constants.round(scale / factor if constants.divides else scale * factor)
    )


def _grown(constants: Recurrence, scale: float) -> float:
    grown = min(constants.round(constants.ceiling), constants.round(scale * constants.growth_factor))
    return scale if constants.keeps_finite and not math.isfinite(grown) else grown


def _state(scale: float, clean_steps: int, hysteresis: int | None) -> ScaleState:
    return ScaleState(scale, clean_steps) if hysteresis is None else HysteresisState(scale, clean_steps, hysteresis)


@dataclass(frozen=True)
class StaticScale(RecurrentRule):
    """A constant scale; gradients that overflow go into the step.

    ::

        on inf:    clean_steps = 0
        on clean:  clean_steps += 1

    Args:
        scale: > 0 and finite; 1.0 leaves the loss as it is.

    Raises:
        ValueError: the scale is not a positive finite number.
        TypeError: the scale is not a number.

    Reference: apex ``LossScaler(loss_scale=128.0)``, which never skips. (apex does not reset the count at an
    overflow; here it is the number of steps since the last one. The scale does not depend on it.)

    >>> rule = StaticScale(128.0)
    >>> rule.next(rule.start(), found_inf=True)
    ScaleState(scale=128.0, clean_steps=0)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        require_scale("scale", self.scale)

    @property
    def skips_on_overflow(self) -> bool:
        """Whether the optimizer step is skipped if a gradient is not finite: never."""
        return False

    @kept_property
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
    a row take 2^16 to exactly 0.0. (`ApexScale`, in float64, takes 1091.)

    Args:
        init_scale: > 0 and finite.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: clean steps before the scale grows, >= 1.
        floor: the scale never backs off below it; None for no floor.
        ceiling: the scale never grows above it; None for no ceiling.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``torch.amp.GradScaler`` (no floor, no ceiling). With a ceiling of 2^24 the scales are those of apex's
    ``LossScaler`` within the range of float32 (`ApexScale` follows apex below it).

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

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants given; ``init_scale`` clamped between floor and ceiling."""
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


def float32(value: float) -> float:
    """Return ``value`` rounded to float32; inf if it is too large. A scale in a float32 tensor rounds the same way.

    >>> float32(1e39), float32(0.1) == 0.1
    (inf, False)
    """
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return rounded


def hysteresis_of(state: ScaleState, full: int) -> int:
    """Return the overflows that a state still tolerates; ``full`` if it does not count them (another rule's state)."""
    return state.hysteresis if isinstance(state, HysteresisState) else full


def require_rule(rule: object) -> None:
    """Raise TypeError unless ``rule`` is a `ScaleRule`."""
    if isinstance(rule, type) or not all(hasattr(rule, name) for name in ("skips_on_overflow", "start", "next")):
        given = rule.__name__ if isinstance(rule, type) else repr(rule)
        call = f"{given}()" if isinstance(rule, type) else "DynamicScale()"
        raise TypeError(f"rule={given}: expected an instance of a scaling rule; pass one such as {call}.")


def require_scale(name: str, value: float | None, *, optional: bool = False) -> None:
    """Raise unless ``value`` is a finite float32 > 0, or None if ``optional``.

    Raises:
        TypeError: not a number. ValueError: not finite, not > 0, or outside the range of float32.
    """
    if value is None and optional:
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number, such as 65536.0; for a dynamic scale use DynamicScale.")
    if not 0.0 < value < math.inf:
        expected = f"{name}={value}: expected a finite number > 0" + (f" or None for no {name}" if optional else "")
        raise ValueError(f"{expected}; powers of two, such as 128.0 or 65536.0, scale without rounding.")
    if not 0.0 < float32(value) < math.inf:
        raise ValueError(f"{name}={value}: expected a number in the range of float32, from 2^-149 to 2^128.")


def require_number(name: str, value: Any, such: str) -> None:
    """Raise TypeError unless ``value`` is a real number; the message says "such as ``such``"."""
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number, such as {such}.")


def require_factors(growth_factor: float, backoff_factor: float) -> None:
    """Raise ValueError unless the one factor is > 1 and the other in (0, 1), TypeError unless both are numbers."""
    require_number("growth_factor", growth_factor, "2.0")
    require_number("backoff_factor", backoff_factor, "0.5")
    if not 1.0 < growth_factor < math.inf:
        raise ValueError(
            f"growth_factor={growth_factor}: expected a finite value > 1; use backoff_factor to shrink the scale."
        )
    if not 0.0 < backoff_factor < 1.0:
        raise ValueError(
            f"backoff_factor={backoff_factor}: expected a value between 0 and 1; use growth_factor to grow the scale."
        )


def require_interval(name: str, value: int) -> None:
    """Raise ValueError unless ``value`` is a whole number of steps >= 1, TypeError unless it is a number."""
    require_number(name, value, "2000")
    if not value >= 1 or value % 1 != 0:
        remedy = "for a constant scale use StaticScale" if name == "growth_interval" else "1 is the smallest value"
        raise ValueError(f"{name}={value}: expected a whole number of steps >= 1; {remedy}.")


TORCH_DYNAMIC = DynamicScale()
APEX_DYNAMIC = DynamicScale(ceiling=2.0**24)
