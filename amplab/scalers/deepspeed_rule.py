"""DeepSpeed's rule: hysteresis before it backs off, growth on a beat since the last overflow, an end at the floor.

Its growth is not the shared recurrence (``recurrence.py``): the count goes on over a growth, and the step that grows
is the one after ``growth_interval`` clean ones. It runs on the host: found_inf is read once for each step.
"""

import math
from dataclasses import dataclass

from amplab.scalers.recurrence import patience_of, require_interval, require_scale
from amplab.scalers.scale_state import HysteresisState, ScaleState

__all__ = ["DeepSpeedScale", "LossScaleAtMinimumError"]


class LossScaleAtMinimumError(RuntimeError):
    """The scale should back off and stands at its floor: DeepSpeed ends the run here."""


@dataclass(frozen=True)
class DeepSpeedScale:
    """DeepSpeed: an overflow uses up hysteresis first, then halves the scale; at the floor it raises.

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

    ``clean_steps`` is DeepSpeed's ``cur_iter - last_overflow_iter - 1``: it is not cleared by growth. The scale is a
    Python float, without a ceiling.

    Args:
        init_scale: 2 ** ``initial_scale_power``. (Without a configuration file DeepSpeed starts at 2^32.)
        factor: ``scale_factor``, > 1, both ways.
        growth_interval: ``loss_scale_window``.
        hysteresis: ``hysteresis`` (``delayed_shift`` inside), >= 1.
        consecutive_hysteresis: every clean step refills ``h``, not only growth.
        floor: ``min_loss_scale``.
        raises_at_floor: False: stay at the floor and go on (``raise_error_at_min_scale``).

    Raises:
        ValueError: an argument out of its range.

    Sync: one for each step, where the verdict lies on a device.

    Reference: ``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.update_scale``.

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
            raise ValueError(f"factor={self.factor}: expected a finite value > 1; it shrinks the scale as well.")
        require_interval("growth_interval", self.growth_interval)
        require_interval("hysteresis", self.hysteresis)
        require_scale("floor", self.floor)

    @property
    def skips_on_overflow(self) -> bool:
        """Yes, also while hysteresis holds the scale."""
        return True

    def start(self) -> HysteresisState:
        """``init_scale``, with all its patience."""
        return HysteresisState(float(self.init_scale), 0, self.hysteresis)

    def next(self, state: ScaleState, found_inf: bool) -> HysteresisState:
        """Wait, back off, count, or grow; a state from another rule has all its patience.

        Raises:
            LossScaleAtMinimumError: an overflow that should back off, at the floor.
        """
        state = HysteresisState(state.scale, state.clean_steps, patience_of(state, self.hysteresis))
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
        refills = grows or self.consecutive_hysteresis
        return HysteresisState(
            state.scale * self.factor if grows else state.scale,
            state.clean_steps + 1,
            self.hysteresis if refills else state.hysteresis,
        )
