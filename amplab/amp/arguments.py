"""Checks of arguments for both APIs: flags, numbers of losses, loss scales, and one object or a list of objects."""

import math
from typing import Any

import torch

__all__ = ["SMALLEST_SCALE", "as_list", "checked_flag", "checked_num_losses", "scale_value"]

# The floor of a dynamic scale if none is given: 1 / scale is still finite in float32.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, None as an empty list, anything else as a list of one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def checked_flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool. The strings "True" and "False" are accepted for use from a command line.

    Raises:
        TypeError: another value.
    """
    flag = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise TypeError(f"{name}={value!r}: expected True or False, or the string 'True' or 'False'.")
    return flag


def checked_num_losses(num_losses: Any) -> int:
    """Return the number of loss scales.

    Raises:
        ValueError: not an integer >= 1.
    """
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r}: expected a whole number >= 1; use 1 unless losses get a loss_id.")
    return num_losses


def scale_value(name: str, value: Any) -> float:
    """Return ``value`` as a loss scale: a float that is finite and > 0.

    Args:
        name: the argument's name, for the error message.
        value: a number, or a string that holds one.

    Raises:
        ValueError: not a number, not finite, or not > 0.
    """
    try:
        scale = float("no number" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f'{name}={value!r}: expected "dynamic" or a number > 0; try "dynamic", or 128.0 for a static scale.'
        ) from None
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"{name}={value!r}: expected a finite number > 0, since gradients are divided by it; 1.0 scales nothing."
        )
    return scale
