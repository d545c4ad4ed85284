"""What a GradScaler takes for a saved state: torch's five entries, their values looked at before anything is changed.

scale, growth_factor, backoff_factor   numbers; scale >= 0, and 0 becomes the floor
growth_interval, _growth_tracker       whole numbers
rule_state                             what a rule of `amplab.scalers` has counted, and the rule's name
"""

import math
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

__all__ = ["checked_state", "warn_of_another_rule"]

ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_SAME = {None: "DynamicScale"}  # torch's own rule, in two forms


def checked_state(saved: Any, floor: float | None) -> dict[str, Any]:
    """Return a saved state, its scale a float.

    Args:
        saved: of `GradScaler.state_dict`, of this class or of torch's.
        floor: what a saved scale of 0 becomes; None leaves it.

    Raises:
        TypeError: no mapping. RuntimeError: an empty one, as a disabled scaler saves it. KeyError: an entry is missing.
        ValueError: an entry whose value no scaler can have.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"load_state_dict got an object of type {type(saved).__name__}: expected the dict that state_dict() "
            'returned; with a checkpoint pass checkpoint["scaler"].'
        )
    if not saved:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load one that an enabled scaler has saved, or go on without loading."
        )
    missing = [name for name in ENTRIES if name not in saved]
    if missing:
        raise KeyError(_what_is_missing(missing[0], saved))
    scale = saved["scale"].item() if isinstance(saved["scale"], Tensor) else saved["scale"]
    _require("scale", scale, _is_number(scale) and 0.0 <= scale < math.inf, "a finite number >= 0, such as 65536.0")
    for name in ("growth_factor", "backoff_factor"):
        _require(name, saved[name], _is_number(saved[name]), "a number, such as 2.0 or 0.5")
    for name in ("growth_interval", "_growth_tracker"):
        whole = _is_number(saved[name]) and saved[name] >= 0 and saved[name] % 1 == 0
        _require(name, saved[name], whole, "a whole number >= 0")
    rule_state = saved.get("rule_state", {})
    _require("rule_state", rule_state, isinstance(rule_state, Mapping), "the dict that state_dict() wrote")
    return {**saved, "scale": float(scale) or floor or 0.0}


def warn_of_another_rule(saved: Mapping[str, Any], rule: str | None) -> None:
    """Warn where a state was counted by another rule than ``rule``, by their classes' names; None is torch's own."""
    other = saved.get("rule_state", {}).get("rule")
    if other is not None and other != (rule or _SAME[None]):
        own = rule or "torch's own rule"
        warnings.warn(
            f"The state is of a GradScaler under {other}, and this one is under {own}: the scale goes on from "
            f"{saved['scale']}, moved by {own} from here on. Make it with rule={other}(...) to go on as before.",
            stacklevel=4,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"state_dict[{name!r}] = {value!r}: expected {expected}; load one that state_dict() returned.")


def _what_is_missing(name: str, saved: Mapping[str, Any]) -> str:
    if any(str(key).startswith("loss_scaler") for key in saved):
        return f"{name}: expected the state of a GradScaler, and amp.state_dict() wrote this: use amp.load_state_dict."
    return f"{name}: expected {', '.join(ENTRIES)}, as state_dict() returns them; got {', '.join(map(str, saved))}."
