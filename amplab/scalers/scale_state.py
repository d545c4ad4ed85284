"""Where a loss-scaling rule stands: the scale in use, and what the rule has counted.

The rules, which go from one state to the next, are in ``rules.py``, ``published_rules.py`` and
``deepspeed_rule.py``.
"""

import struct
from dataclasses import dataclass

__all__ = ["HysteresisState", "ScaleState", "float32"]


@dataclass(frozen=True)
class ScaleState:
    """Where a rule stands: the loss scale in use, and the clean steps since it last moved or overflowed."""

    scale: float
    clean_steps: int = 0


@dataclass(frozen=True)
class HysteresisState(ScaleState):
    """A state with patience: how many overflows are let pass before the scale backs off (Megatron, DeepSpeed)."""

    hysteresis: int = 1


def float32(value: float) -> float:
    """``value`` rounded to float32, inf where it overflows: the arithmetic of a scale that is a tensor.

    >>> float32(1e39), float32(0.1) == 0.1
    (inf, False)
    """
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
