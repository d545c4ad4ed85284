"""One loss scaler of a session: a rule, where it stands, and apex's way of writing that down.

The rules themselves are in `amplab.scalers.rules`.
"""

import re
from numbers import Real
from typing import Any

import torch

from amplab.amp.apex.opt_levels import scale_value
from amplab.scalers import DynamicScale, ScaleRule, ScaleState, StaticScale

__all__ = ["SMALLEST_SCALE", "LossScaler", "checked_entry", "scale_rule"]

# Where a dynamic scale stops when no floor is given: 1 / scale is still finite in float32.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_SMALLEST_SUBNORMAL = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps

_ARGUMENTS = {  # of DynamicScale, and what they are called in initialize
    "init_scale": "dynamic_init_scale",
    "growth_factor": "scale_growth_factor",
    "backoff_factor": "scale_backoff_factor",
    "growth_interval": "scale_window",
    "floor": "min_loss_scale",
    "ceiling": "max_loss_scale",
    "DynamicScale": 'loss_scale="dynamic"',
    "StaticScale": "a number as loss_scale",
}


class LossScaler:
    """Own the scale of one ``loss_id``.

    Args:
        rule: how the scale moves.
    """

    def __init__(self, rule: ScaleRule) -> None:
        self.rule = rule
        self.state: ScaleState = rule.start()

    @property
    def scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self.state.scale

    @property
    def dynamic(self) -> bool:
        """Whether overflows skip the step and move the scale."""
        return self.rule.skips_on_overflow

    def update(self, found_inf: bool) -> None:
        """Move on after a backward; once for each exit of `scale_loss`, as apex counts."""
        self.state = self.rule.next(self.state, found_inf)

    def state_dict(self) -> dict[str, float | int]:
        """Return apex's entry: the scale, and the clean steps since it last moved."""
        return {"loss_scale": self.state.scale, "unskipped": self.state.clean_steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take up a saved scale, not below the floor; a static scaler keeps its own.

        Raises:
            ValueError: as `checked_entry`.
        """
        scale, clean_steps = checked_entry(saved)
        if isinstance(self.rule, DynamicScale):
            # Of a longer window: the next clean backward lets the scale grow.
            clean_steps = min(clean_steps, self.rule.growth_interval - 1)
            self.state = ScaleState(max(scale, self.rule.floor or SMALLEST_SCALE), clean_steps)


def checked_entry(saved: Any) -> tuple[float, int]:
    """Return the scale and the clean steps of an entry of apex's.

    Raises:
        ValueError: the entry is not apex's; its scale is negative or none that float32 holds, or its count is no
            whole number >= 0.
    """
    try:
        scale, clean_steps = float(saved["loss_scale"]), int(saved["unskipped"])
        count = float(saved["unskipped"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{saved!r}: expected {{'loss_scale': float, 'unskipped': int}}, as amp.state_dict() writes."
        ) from None
    if clean_steps < 0 or count != clean_steps:
        raise ValueError(
            f"unskipped={saved['unskipped']!r}: expected a whole number >= 0, the backwards since the scale last "
            "moved; 0 begins to count anew."
        )
    # apex checkpoints of a collapsed run hold 0.0; training can go on from the floor.
    return scale if scale == 0.0 else _scale_of_float32("loss_scale", scale), clean_steps


def scale_rule(loss_scale: float | str, **arguments: float | None) -> ScaleRule:
    """Make the rule of a call of `initialize`, its errors in the words of that call.

    Args:
        loss_scale: "dynamic", or the scale of a static rule, which takes nothing from ``arguments``.
        arguments: as `DynamicScale`; ``floor`` None or 0 becomes `SMALLEST_SCALE`.

    Raises:
        ValueError: an argument out of its range.
        TypeError: one that is no number.
    """
    if not isinstance(loss_scale, str):
        return StaticScale(_scale_of_float32("loss_scale", loss_scale))
    for name, value in arguments.items():
        left_out = value is None and name in ("floor", "ceiling")
        if not left_out and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{_ARGUMENTS[name]}={value!r}: expected a number; leave it out for that of apex.")
    try:
        return DynamicScale(**{**arguments, "floor": arguments["floor"] or SMALLEST_SCALE})
    except ValueError as error:
        words = "|".join(_ARGUMENTS)
        raise ValueError(re.sub(rf"\b({words})\b", lambda word: _ARGUMENTS[word.group()], str(error))) from None


def _scale_of_float32(name: str, value: float) -> float:
    scale = scale_value(name, value)
    if not _SMALLEST_SUBNORMAL <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{name}={scale}: expected a number that float32 can hold, from 2^-149 to 2^128, since losses are "
            "multiplied by it there; 65536.0 is where a dynamic scale starts."
        )
    return scale
