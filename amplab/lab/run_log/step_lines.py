"""The lines of the steps in a run log: written, read one by one, and read many at once, as columns of steps.

Lines that are not the regular ones of the present format, one after the other, are read one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, cast

from amplab.lab.events import StepRow
from amplab.lab.history import COLUMNS
from amplab.lab.run_log.json_lines import is_count, json_line, json_number, read_number, refuse_constant

__all__ = ["OLD_NAMES", "read_step", "read_steps", "step_line"]

OLD_NAMES = {"score": "accuracy"}
"""Columns that had another name up to format 3."""

_NEW_NAMES = {old: new for new, old in OLD_NAMES.items()}

_WORDS = {"nan", "inf", "-inf"}
_NUMBERS = ("loss", "loss_scale", "next_loss_scale", "score", "seconds", "grad_exponent")
_MISSING = ("loss", "score", "grad_exponent")  # may be null
_KINDS: dict[str, set[type]] = {
    "step": {int},
    "skipped": {bool},
    "opt_level": {str},
    "first_nonfinite": {str, type(None)},
    "injected": {str, type(None)},
}


_decode = json.JSONDecoder(parse_constant=refuse_constant).decode


def step_line(row: StepRow) -> str:
    """Return the line of a step."""
    return json_line([json_number(value) if isinstance(value, float) else value for value in row])


def read_step(values: dict[str, Any]) -> StepRow | None:
    """Return the row of a step from the values of its line; None if it is damaged."""
    values = {_NEW_NAMES.get(name, name): value for name, value in values.items()}
    sound = is_count(values["step"]) and all(type(values[name]) in kinds for name, kinds in _KINDS.items())
    unmeasured = [name for name in _MISSING if values.get(name) is None]
    numbers = {name: read_number(values[name]) for name in _NUMBERS if name not in unmeasured}
    exponent = numbers.get("grad_exponent") or 0.0
    if not sound or None in numbers.values() or (math.isfinite(exponent) and not exponent.is_integer()):
        return None
    row = {**values, **dict.fromkeys(unmeasured), **numbers}
    return cast(StepRow, tuple(row[name] for name in COLUMNS))


def read_steps(lines: Sequence[bytes], first: int) -> dict[str, Sequence[Any]] | None:
    """Return the columns of lines that hold the steps from `first` on, as `History.extend` takes them.

    Returns:
        None unless every line is that of a regular step: read them one by one.
    """
    entries = _arrays(lines)
    if entries is None:
        return None
    values: dict[str, Sequence[Any]] = dict(zip(COLUMNS, zip(*entries, strict=True), strict=True))
    if any(not set(map(type, values[name])) <= kinds for name, kinds in _KINDS.items()):
        return None
    if list(values["step"]) != list(range(first, first + len(lines))):
        return None
    for name in _NUMBERS:
        numbers = _numbers(values[name], may_miss=name in _MISSING)
        if numbers is None:
            return None
        values[name] = numbers
    exponents = set(values["grad_exponent"]) - {None, math.inf, -math.inf}
    return values if all(math.isnan(each) or each.is_integer() for each in exponents) else None


def _arrays(lines: Sequence[bytes]) -> list[list[Any]] | None:
    """Return one array with a value for each of `COLUMNS` for every line, None if a line holds something else."""
    text = b"[" + b",".join(lines) + b"]"
    # Each line begins with one bracket: no array spans two lines, and no line holds two.
    if not lines or text.count(b"[") != len(lines) + 1:
        return None
    try:
        entries = _decode(text.decode())
    except (ValueError, RecursionError):
        return None
    if len(entries) != len(lines) or set(map(type, entries)) != {list} or set(map(len, entries)) != {len(COLUMNS)}:
        return None
    return cast(list[list[Any]], entries)


def _numbers(values: Sequence[Any], *, may_miss: bool) -> Sequence[float | None] | None:
    """Return numbers, with NaN and inf for their words; None if there is something else among them."""
    kinds = set(map(type, values))
    if not kinds <= {float, int, str} | ({type(None)} if may_miss else set()):
        return None
    words = {each for each in values if type(each) is str} if str in kinds else set()
    if not words <= _WORDS or math.inf in values or -math.inf in values:  # such as 1e999
        return None
    try:
        return values if kinds == {float} else [each if each is None else float(each) for each in values]
    except OverflowError:
        return None
