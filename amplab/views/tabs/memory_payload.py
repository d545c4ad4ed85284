"""The tab of memory as plain values. The page adds up the bytes for the batch size it shows. No widget here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amplab.lab import ExperimentConfig
from amplab.lab.memory_fit import CARDS, NOT_COUNTED, LevelMemory

__all__ = ["memory_payload"]

KINDS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("masters", "masters"),
    ("optimizer_state", "optimizer state"),
    ("buffers", "buffers"),
    ("weight_casts", "16-bit weights"),
    ("activations", "activations"),
)
"""Kinds of bytes, in the order of a bar, and their names."""


def memory_payload(counted: Sequence[LevelMemory], levels: int, config: ExperimentConfig) -> dict[str, Any]:
    """Return the bytes of each level that was counted, and the cards to choose from.

    Args:
        counted: The levels so far.
        levels: How many there will be.
        config: The experiment.
    """
    waits = len(counted) < levels
    return {
        "levels": [_level(each) for each in counted],
        "kinds": [list(each) for each in KINDS],
        "cards": [list(each) for each in CARDS],
        "batch": config.batch_size,
        "present": config.opt_level,
        "note": NOT_COUNTED,
        "summary": f"Counting: {len(counted)} of {levels} levels …" if waits else "",
    }


def _level(counted: LevelMemory) -> dict[str, Any]:
    fixed = {name: getattr(counted, name) for name, _ in KINDS if name != "activations"}
    return {
        "name": counted.opt_level,
        "label": counted.label,
        "fixed": fixed,
        "activations": counted.activations,
        "perExample": counted.per_example,
        "batch": counted.batch_size,
    }
