"""The rules of apex, Ascend's apex, jmp, Keras, Megatron and DeepSpeed, each as in its source, with or without a floor.

torch's rule is `DynamicScale()` in ``rules.py``; `PUBLISHED_RULES` names them all. A scale is a Python float here if it
is one in the source (apex, Ascend, DeepSpeed), else a float32. An argument has the same name in every rule; each
docstring gives the name in the source.

All but DeepSpeed's are the shared recurrence of ``rules.py``. DeepSpeed's count is not reset by growth, and the step
that grows is the one after ``growth_interval`` clean ones; so that rule runs on the host and reads found_inf once per
step.
"""

import math
from dataclasses import dataclass

from amplab.formats.kept_property import kept_property
from amplab.scalers.rules import (
    DynamicScale,
    HysteresisState,
    Recurrence,
    RecurrentRule,
    ScaleRule,
    ScaleState,
    float32,
    hysteresis_of,
    require_factors,
    require_interval,
    require_scale,
)

__all__ = [
    "PUBLISHED_RULES",
    "ApexScale",
    "AscendScale",
    "DeepSpeedScale",
    "JmpScale",
    "KerasScale",
    "LossScaleAtMinimumError",
    "MegatronScale",
]


@dataclass(frozen=True)
class ApexScale(RecurrentRule):
    """NVIDIA apex: halve and double a Python float.

    ::

        start:     scale = min(ceiling, init_scale);  clean_steps = 0
        on inf:    scale = max(floor, scale / 2);  clean_steps = 0
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       scale = min(ceiling, scale * 2);  clean_steps = 0

    A step is one exit of ``scale_loss``. The scale is a Python float (float64): without a floor, 1091 overflows in a
    row take 2^16 to exactly 0.0.

    Args:
        init_scale: apex's ``init_scale``.
        growth_interval: ``scale_window``.
        floor: ``min_loss_scale``; None for none.
        ceiling: ``max_loss_scale``.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``apex.amp.scaler.LossScaler.update_scale``.

    >>> rule = ApexScale()
    >>> rule.next(rule.start(), found_inf=True)
    ScaleState(scale=32768.0, clean_steps=0)
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000
    floor: float | None = None
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        require_interval("growth_interval", self.growth_interval)
        require_scale("floor", self.floor, optional=True)
        require_scale("ceiling", self.ceiling)

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants of apex."""
        return _apex_recurrence(self.init_scale, 2.0, 0.5, self.growth_interval, self.floor, self.ceiling)


@dataclass(frozen=True)
class AscendScale(RecurrentRule):
    """Ascend's apex: apex with adjustable factors.

    ::

        start:     scale = min(ceiling, init_scale);  clean_steps = 0
        on inf:    scale = max(floor, scale * backoff_factor);  clean_steps = 0
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       scale = min(ceiling, scale * growth_factor);  clean_steps = 0

    Args:
        init_scale: ``dynamic_init_scale`` of ``amp.initialize``.
        growth_factor: ``scale_growth_factor``, > 1.
        backoff_factor: ``scale_backoff_factor``, in (0, 1).
        growth_interval: ``scale_window``.
        floor: ``min_loss_scale``; None for none.
        ceiling: ``max_loss_scale``.

    Raises:
        ValueError: an argument out of its range.

    Reference: Ascend apex patch, ``apex.amp.scaler.LossScaler.update_scale``.

    >>> rule = AscendScale(backoff_factor=0.25)
    >>> rule.next(rule.start(), found_inf=True)
    ScaleState(scale=16384.0, clean_steps=0)
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float | None = None
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        require_factors(self.growth_factor, self.backoff_factor)
        require_interval("growth_interval", self.growth_interval)
        require_scale("floor", self.floor, optional=True)
        require_scale("ceiling", self.ceiling)

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants of this rule, as passed to the constructor."""
        factors = (self.growth_factor, self.backoff_factor)
        return _apex_recurrence(self.init_scale, *factors, self.growth_interval, self.floor, self.ceiling)


@dataclass(frozen=True)
class JmpScale(RecurrentRule):
    """DeepMind jmp: one factor for growth and backoff, and a floor of 1.

    ::

        on inf:    scale = max(floor, scale / factor);  clean_steps = 0
        on clean:  if clean_steps == growth_interval - 1 and scale * factor is finite:  scale = scale * factor
                   clean_steps = (clean_steps + 1) mod growth_interval

    Args:
        init_scale: ``loss_scale``; jmp has no default; its documentation uses 2^15.
        factor: > 1.
        growth_interval: ``period``.
        floor: ``min_loss_scale``.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``jmp.DynamicLossScale.adjust``. (In jmp, ``jax.jit`` resets the floor to 1.)

    >>> rule = JmpScale(init_scale=1.0)
    >>> rule.next(rule.start(), found_inf=True)
    ScaleState(scale=1.0, clean_steps=0)
    """

    init_scale: float = 2.0**15
    factor: float = 2.0
    growth_interval: int = 2000
    floor: float = 1.0

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        if not 1.0 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor}: expected a finite value > 1, for growth and backoff.")
        require_interval("growth_interval", self.growth_interval)
        require_scale("floor", self.floor)

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants of jmp, in float32."""
        factor = float32(self.factor)
        return Recurrence(
            init_scale=self.init_scale,
            growth_factor=factor,
            backoff_factor=factor,
            divides=True,
            growth_interval=self.growth_interval,
            floor=self.floor,
            keeps_finite=True,
        )


@dataclass(frozen=True)
class KerasScale(RecurrentRule):
    """Keras 3: halve and double without bounds and without a check of the grown scale.

    ::

        on inf:    scale = scale * 0.5;  clean_steps = 0
        on clean:  if clean_steps == growth_interval - 1:  scale = scale * 2;  clean_steps = 0
                   else:  clean_steps += 1

    A scale of 2^127 grows to inf, and stays there.

    Args:
        init_scale: ``initial_scale``.
        growth_interval: ``dynamic_growth_steps``.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``keras.optimizers.LossScaleOptimizer``.

    >>> rule = KerasScale(growth_interval=1)
    >>> rule.next(rule.start(), found_inf=False)
    ScaleState(scale=65536.0, clean_steps=0)
    """

    init_scale: float = 2.0**15
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        require_interval("growth_interval", self.growth_interval)

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants of Keras."""
        return Recurrence(self.init_scale, growth_interval=self.growth_interval)


@dataclass(frozen=True)
class MegatronScale(RecurrentRule):
    """Megatron-LM: tolerate some overflows before the first backoff.

    ::

        start:     scale = init_scale;  clean_steps = 0;  h = hysteresis
        on inf:    clean_steps = 0;  h -= 1
                   if h <= 0:  scale = max(floor, scale * backoff_factor)
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       clean_steps = 0;  h = hysteresis;  scale = scale * growth_factor

    Only growth resets ``h``, clean steps do not. So once ``h`` is 0 every overflow backs off.

    Args:
        init_scale: ``initial_scale``.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: clean steps before the scale grows.
        hysteresis: overflows until the first backoff, >= 1.
        floor: ``min_scale``, at most ``init_scale``.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``megatron.core.optimizer.grad_scaler.DynamicGradScaler``.

    >>> rule = MegatronScale()
    >>> rule.next(rule.start(), found_inf=True)
    HysteresisState(scale=4294967296.0, clean_steps=0, hysteresis=1)
    """

    init_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    floor: float = 1.0

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        require_scale("floor", self.floor)
        if self.floor > self.init_scale:
            raise ValueError(f"floor={self.floor} is above init_scale={self.init_scale}: expected floor <= init_scale.")
        require_factors(self.growth_factor, self.backoff_factor)
        require_interval("growth_interval", self.growth_interval)
        require_interval("hysteresis", self.hysteresis)

    @kept_property
    def recurrence(self) -> Recurrence:
        """The constants of Megatron, rounded to float32: they are float32 tensors there."""
        return Recurrence(
            init_scale=self.init_scale,
            growth_factor=float32(self.growth_factor),
            backoff_factor=float32(self.backoff_factor),
            growth_interval=self.growth_interval,
            floor=self.floor,
            hysteresis=self.hysteresis,
        )


class LossScaleAtMinimumError(RuntimeError):
    """The scale should back off but is at its floor: DeepSpeed ends the run here."""


@dataclass(frozen=True)
class DeepSpeedScale:
    """DeepSpeed: overflows first use up the hysteresis, then halve the scale; at the floor it raises.

    ::

        start:     scale = init_scale;  clean_steps = 0;  h = hysteresis
        on inf:    if hysteresis == 1 or h == 1:
                       if scale == floor:  raise
                       scale = max(floor, scale / factor)
                   else:  h -= 1
                   clean_steps = 0
        on clean:  if consecutive_hysteresis:  h = hysteresis
                   if clean_steps > 0 and clean_steps mod growth_interval == 0:
                       h = hysteresis;  scale = scale * factor
                   clean_steps += 1

    ``clean_steps`` is DeepSpeed's ``cur_iter - last_overflow_iter - 1``: growth does not reset it. The scale is a
    Python float, without a ceiling.

    Args:
        init_scale: 2 ** ``initial_scale_power``. (Without a configuration file DeepSpeed starts at 2^32.)
        factor: ``scale_factor``, > 1, for growth and backoff.
        growth_interval: ``loss_scale_window``.
        hysteresis: ``hysteresis`` (``delayed_shift`` inside), >= 1.
        consecutive_hysteresis: reset ``h`` at every clean step, not only at growth.
        floor: ``min_loss_scale``.
        raises_at_floor: False: stay at the floor and continue (``raise_error_at_min_scale``).

    Raises:
        ValueError: an argument out of its range.

    Sync: one for each step, if found_inf is on a device.

    Reference: ``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.update_scale`` of DeepSpeed 0.19.8; older versions
    (0.15.4) grow one clean step earlier.

    >>> rule = DeepSpeedScale()
    >>> state = rule.next(rule.start(), found_inf=True)
    >>> state
    HysteresisState(scale=65536.0, clean_steps=0, hysteresis=1)
    >>> rule.next(state, found_inf=True).scale
    32768.0
    """

    init_scale: float = 2.0**16
    factor: float = 2.0
    growth_interval: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    floor: float = 1.0
    raises_at_floor: bool = True

    def __post_init__(self) -> None:
        require_scale("init_scale", self.init_scale)
        if not 1.0 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor}: expected a finite value > 1, for growth and backoff.")
        require_interval("growth_interval", self.growth_interval)
        require_interval("hysteresis", self.hysteresis)
        require_scale("floor", self.floor)

    @property
    def skips_on_overflow(self) -> bool:
        """Whether the optimizer step is skipped: always, also while hysteresis keeps the scale."""
        return True

    def start(self) -> HysteresisState:
        """Return the state before the first backward."""
        return HysteresisState(float(self.init_scale), 0, self.hysteresis)

    def next(self, state: ScaleState, found_inf: bool) -> HysteresisState:
        """Wait, back off, count, or grow; a state of another rule has the full hysteresis.

        Raises:
            LossScaleAtMinimumError: an overflow at the floor that should back off.
        """
        state = HysteresisState(state.scale, state.clean_steps, hysteresis_of(state, self.hysteresis))
        return self._after_overflow(state) if found_inf else self._after_clean_step(state)

    def _after_overflow(self, state: HysteresisState) -> HysteresisState:
        if self.hysteresis > 1 and state.hysteresis > 1:
            return HysteresisState(state.scale, 0, state.hysteresis - 1)
        if self.raises_at_floor and state.scale == self.floor:
            raise LossScaleAtMinimumError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. "
                f"The floor is {self.floor}: find the first tensor that is not finite, or set raises_at_floor=False."
            )
        return HysteresisState(max(float(self.floor), state.scale / self.factor), 0, state.hysteresis)

    def _after_clean_step(self, state: HysteresisState) -> HysteresisState:
        grows = state.clean_steps > 0 and state.clean_steps % self.growth_interval == 0
        resets = grows or self.consecutive_hysteresis
        return HysteresisState(
            state.scale * self.factor if grows else state.scale,
            state.clean_steps + 1,
            self.hysteresis if resets else state.hysteresis,
        )


def _apex_recurrence(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    floor: float | None,
    ceiling: float,
) -> Recurrence:
    """Return apex's bounds and Python floats: the ceiling holds from the start, the floor at overflows."""
    return Recurrence(
        init_scale=min(float(ceiling), float(init_scale)),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        floor=0.0 if floor is None else float(floor),
        ceiling=float(ceiling),
        single=False,
    )


PUBLISHED_RULES: dict[str, ScaleRule] = {
    "torch": DynamicScale(),
    "apex": ApexScale(),
    "Ascend": AscendScale(),
    "jmp": JmpScale(),
    "Keras": KerasScale(),
    "DeepSpeed": DeepSpeedScale(),
    "Megatron": MegatronScale(),
}
