"""The rules of apex, Ascend's apex, jmp, Keras and Megatron, each as its source has it, floor or no floor.

torch's is `DynamicScale()` in ``rules.py``, DeepSpeed's is in ``deepspeed_rule.py``; `PUBLISHED_RULES` names them
all. Where a scale is a Python float in the source it is one here (apex, Ascend), else a float32. The same thing has
the same name in every rule; each docstring says how the source calls it.
"""

import math
from dataclasses import dataclass

from amplab.scalers.deepspeed_rule import DeepSpeedScale
from amplab.scalers.recurrence import (
    Recurrence,
    RecurrentRule,
    require_factors,
    require_interval,
    require_scale,
)
from amplab.scalers.rules import DynamicScale, ScaleRule
from amplab.scalers.scale_state import float32

__all__ = ["PUBLISHED_RULES", "ApexScale", "AscendScale", "JmpScale", "KerasScale", "MegatronScale"]


@dataclass(frozen=True)
class ApexScale(RecurrentRule):
    """NVIDIA apex: halve and double a Python float.

    ::

        start:     scale = min(ceiling, init_scale);  clean_steps = 0
        on inf:    scale = max(floor, scale / 2);  clean_steps = 0
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       scale = min(ceiling, scale * 2);  clean_steps = 0

    A step here is an exit of ``scale_loss``. From 2^16, 1091 overflows in a row without a floor end at exactly 0.0.

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

    @property
    def recurrence(self) -> Recurrence:
        """apex's constants."""
        return _apex_recurrence(self.init_scale, 2.0, 0.5, self.growth_interval, self.floor, self.ceiling)


@dataclass(frozen=True)
class AscendScale(RecurrentRule):
    """Ascend's apex: apex with factors to choose.

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

    @property
    def recurrence(self) -> Recurrence:
        """The constants given."""
        factors = (self.growth_factor, self.backoff_factor)
        return _apex_recurrence(self.init_scale, *factors, self.growth_interval, self.floor, self.ceiling)


@dataclass(frozen=True)
class JmpScale(RecurrentRule):
    """DeepMind jmp: one factor both ways, and a floor of 1.

    ::

        on inf:    scale = max(floor, scale / factor);  clean_steps = 0
        on clean:  if clean_steps == growth_interval - 1 and scale * factor is finite:  scale = scale * factor
                   clean_steps = (clean_steps + 1) mod growth_interval

    Args:
        init_scale: ``loss_scale``; jmp has no default, its pages use 2^15.
        factor: > 1.
        growth_interval: ``period``.
        floor: ``min_loss_scale``.

    Raises:
        ValueError: an argument out of its range.

    Reference: ``jmp.DynamicLossScale.adjust``. (There the floor is lost across ``jax.jit`` and is 1 again.)

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
            raise ValueError(f"factor={self.factor}: expected a finite value > 1; it shrinks the scale as well.")
        require_interval("growth_interval", self.growth_interval)
        require_scale("floor", self.floor)

    @property
    def recurrence(self) -> Recurrence:
        """jmp's constants, in float32."""
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
    """Keras 3: halve and double without bounds, and without a look at what grew.

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

    @property
    def recurrence(self) -> Recurrence:
        """Keras's constants."""
        return Recurrence(self.init_scale, growth_interval=self.growth_interval)


@dataclass(frozen=True)
class MegatronScale(RecurrentRule):
    """Megatron-LM: some overflows are forgiven first.

    ::

        start:     scale = init_scale;  clean_steps = 0;  h = hysteresis
        on inf:    clean_steps = 0;  h -= 1
                   if h <= 0:  scale = max(floor, scale * backoff_factor)
        on clean:  clean_steps += 1
                   if clean_steps == growth_interval:
                       clean_steps = 0;  h = hysteresis;  scale = scale * growth_factor

    Clean steps alone do not refill ``h``; only growth does. So once it is used up every overflow backs off.

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

    @property
    def recurrence(self) -> Recurrence:
        """Megatron's constants: float32 tensors there, so rounded to float32 here."""
        return Recurrence(
            init_scale=self.init_scale,
            growth_factor=float32(self.growth_factor),
            backoff_factor=float32(self.backoff_factor),
            growth_interval=self.growth_interval,
            floor=self.floor,
            hysteresis=self.hysteresis,
        )


def _apex_recurrence(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    floor: float | None,
    ceiling: float,
) -> Recurrence:
    """Bounds and Python floats as apex has them: the ceiling holds from the start, the floor at overflows."""
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
