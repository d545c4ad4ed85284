"""What each field of a config may hold, as a table, and how its values are spelt and read.

One row per field: the values it accepts, the sentence that says so, and the reader of its text form. The config itself
is in `config.py`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = ["MODELS", "OPTIMIZERS", "RULES", "TASKS", "FieldRule", "check", "parse_number", "read", "spell"]

TASKS = ("digits",)
MODELS = ("mlp", "cnn")
OPTIMIZERS = ("sgd", "adam", "adamw")
LEVELS = ("O0", "O1", "O2", "O3")

_LARGEST_SCALE = 2.0**127  # the largest power of two in float32, the type of a scaled loss
_SMALLEST_SCALE = 2.0**-126  # the smallest whose inverse float32 can hold, which unscaling needs
_LONGEST_ECHO = 40  # characters of a refused value
_POWER = re.compile(r"(?P<base>\d+(?:\.\d+)?)(?:\*\*|\^)(?P<exponent>[+-]?\d+)")
_WHOLE = re.compile(r"[+-]?\d{1,30}")
_WORDS = {"none": None, "true": True, "false": False}


@dataclass(frozen=True)
class FieldRule:
    """One field of a config.

    Attributes:
        accepts: Whether a value is one of the field's.
        allowed: What is accepted and what to do, the end of an error's sentence.
    """

    accepts: Callable[[object], bool]
    allowed: str


def _is_number(value: object) -> bool:
    # Compared, not converted: a whole number may be beyond every float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_rate(value: object) -> bool:
    return _is_number(value) and 0 < value <= _LARGEST_SCALE


def _is_scale(value: object) -> bool:
    return _is_number(value) and _SMALLEST_SCALE <= value <= _LARGEST_SCALE


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _one_of(words: tuple[str, ...], *, note: str = "") -> FieldRule:
    return FieldRule(lambda value: isinstance(value, str) and value in words, f"one of {', '.join(words)}{note}")


def _count(low: int, high: int, what: str) -> FieldRule:
    allowed = f"a whole number from {low} to {high} (a plain int), {what}"
    return FieldRule(lambda value: _is_count(value, low, high), allowed)


_OVERRIDE = FieldRule(
    lambda value: value is None or isinstance(value, bool),
    "True, False, or None for what the opt_level prescribes",
)

RULES: dict[str, FieldRule] = {
    "task": _one_of(TASKS),
    "model": _one_of(MODELS),
    "hidden": _count(1, 8192, "the width of the hidden layers"),
    "opt_level": _one_of(LEVELS, note=" (the letter O and a digit)"),
    "optimizer": _one_of(OPTIMIZERS),
    "lr": FieldRule(
        lambda value: value is None or _is_rate(value),
        "a number > 0 and at most 2**127, or None for the optimizer's default",
    ),
    "momentum": FieldRule(lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1); 0 switches it off"),
    "batch_size": _count(1, 65536, "the images per step"),
    "seed": _count(0, 2**63 - 1, "the same seed gives the same run"),
    "loss_scale": FieldRule(
        lambda value: value is None or value == "dynamic" or _is_scale(value),
        "'dynamic', a number > 0, at least 2**-126 and at most 2**127 (128 is a usual static scale), "
        "or None for what the opt_level prescribes",
    ),
    "init_scale": FieldRule(_is_scale, "a number > 0, at least 2**-126 and at most 2**127; 2**16 is a usual start"),
    "growth_interval": _count(1, 10**9, "the clean steps until the scale doubles"),
    "min_loss_scale": FieldRule(
        lambda value: value is None or _is_scale(value),
        "a number > 0, at least 2**-126 and at most 2**127, or None for no floor of your own",
    ),
    "max_loss_scale": FieldRule(_is_scale, "a number > 0, at least 2**-126 and at most 2**127; 2**24 is the default"),
    "keep_batchnorm_fp32": _OVERRIDE,
    "master_weights": _OVERRIDE,
}


def check(name: str, value: object) -> None:
    """Raise ValueError unless `value` is one that the field `name` may hold."""
    rule = _rule(name)
    if not rule.accepts(value):
        raise ValueError(_refusal(name, spell(value)))


def spell(value: object) -> str:
    """Return the text form of a field's value: powers of two from 2**10 on as such, words in lower case.

    >>> spell(65536.0), spell(128.0), spell(0.1), spell(None)
    ('2**16', '128', '0.1', 'none')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return value if isinstance(value, str) else repr(value)
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not -10 < exponent - 1 < 10:
        return f"2**{exponent - 1}"
    return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def read(name: str, text: str) -> object:
    """Return the value that `text` spells for the field `name`, and check it.

    >>> read("init_scale", "2**20"), read("hidden", "64"), read("master_weights", "true")
    (1048576.0, 64, True)

    Raises:
        ValueError: An unknown field, or a text that spells none of its values.
    """
    rule = _rule(name)
    value = _value(text)
    if isinstance(value, float) and value.is_integer() and not rule.accepts(value):
        value = int(value)  # 1e3 and 2**5 are counts too
    if not rule.accepts(value):
        raise ValueError(_refusal(name, text))
    return value


def _refusal(name: str, given: str) -> str:
    echo = given if len(given) <= _LONGEST_ECHO else f"{given[:_LONGEST_ECHO]}…"
    return f"{name}={echo}: expected {RULES[name].allowed}."


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    number = parse_number(text)
    return text if number is None else number


def parse_number(text: str) -> float | None:
    """Return the number that `text` spells (128, 1e-3, 2**16, 2^16), None when it spells none."""
    power = _POWER.fullmatch(text)
    try:
        return float(power["base"]) ** int(power["exponent"]) if power else float(text)
    except OverflowError:
        return math.inf
    except (ValueError, ZeroDivisionError):
        return None


def _rule(name: str) -> FieldRule:
    if name in RULES:
        return RULES[name]
    close = get_close_matches(name, RULES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(RULES)}."
    raise ValueError(f"{name[:_LONGEST_ECHO]}: not a field of an experiment; {hint}")
