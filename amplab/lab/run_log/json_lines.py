"""A line of a run log as JSON, in which NaN and inf are words, and the numbers that it may hold."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, TypeGuard

__all__ = [
    "LONGEST_LINE",
    "is_count",
    "is_number",
    "json_line",
    "json_number",
    "read_json",
    "read_number",
    "refuse_constant",
]

LONGEST_LINE = 2**24
"""Bytes of a line; the longest ones of a real run, the states of ranks, have some hundred thousand."""

_MOST = 2**53  # whole numbers up to here are exact as float64, in which charts take them

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


def json_line(values: object) -> str:
    """Return the line of a value, with its end."""
    return _encode(values) + "\n"


def json_number(value: float) -> float | str:
    """Return a number, NaN and inf as words."""
    return value if math.isfinite(value) else str(value)


def read_json(line: bytes) -> object:
    """Return the value of a line, None if it is not JSON."""
    try:
        value = json.loads(line, parse_constant=refuse_constant)
        if b"\\ud" in line.lower():  # half of a pair, which no file and no page can hold
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def refuse_constant(word: str) -> None:
    """Raise a ValueError for NaN or Infinity, which Python's decoder accepts."""
    raise ValueError(f"{word}: expected JSON, which has no such number.")


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a number of things, or of a step."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_number(value: Any) -> float | None:
    """Return a number of a log, in which inf and NaN are words; None if it is damaged."""
    return float(value) if is_number(value) or value in ("nan", "inf", "-inf") else None
