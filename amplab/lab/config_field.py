"""What one field of a config is: the values that it accepts, its texts, and how a value is spelled, read and shown.

    Values         the values that a field accepts, in words too: `one_of`, `count`, `number`, `FLAG`, `NAMES`
    ConfigField    the declaration of a field; refuses with `SettingRefused`
    spell, read    a value as text, and back

Which fields there are is in `config.py`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from amplab.display.numbers import binary_power, parse_number, short_text

__all__ = [
    "FLAG",
    "NAMES",
    "Change",
    "ConfigField",
    "SettingRefused",
    "Values",
    "count",
    "echo",
    "listed",
    "number",
    "one_of",
    "spell",
]

_LONGEST_ECHO = 40  # characters of a refused value
_WHOLE = re.compile(r"[+-]?\d{1,30}")
_LISTED_NAMES = re.compile(r"[\w.*?\[\]!-]+(,[\w.*?\[\]!-]+)*")
_WORDS = {"none": None, "true": True, "false": False}
_SPELLED_POWER = re.compile(r"2\*\*(-?\d{1,5})")


class SettingRefused(ValueError):
    """A config that is not allowed: the message names fields and values, `shown` the labels of the dashboard.

    >>> raise SettingRefused("lr=-1: expected a number > 0.", shown="Learning rate: -1 is not allowed.")
    Traceback (most recent call last):
    amplab.lab.config_field.SettingRefused: lr=-1: expected a number > 0.
    """

    def __init__(self, message: str, *, shown: str) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True)
class Values:
    """The values that a field accepts.

    Attributes:
        kind: Type of a value that is neither None nor a word: str, int, float or bool.
        accepts: Whether a value is one of them.
        allowed: Returns the words that name them in an error message.
        entry: The words that name them to a person who types one; empty: the labels of the choices.
        choices: Returns the label of each value, where a field has only a few; empty elsewhere.
        is_power: Whether the dashboard shows a value as a power of two, and takes its exponent.
    """

    kind: type
    accepts: Callable[[object], bool]
    allowed: Callable[[], str]
    entry: str = ""
    choices: Callable[[], dict[str, str]] = dict
    is_power: bool = False

    def or_none(self) -> Values:
        """Return the same values and None."""
        return replace(self, accepts=lambda value: value is None or self.accepts(value))


class _Labeled(Protocol):
    @property
    def label(self) -> str: ...


def one_of(table: Mapping[str, _Labeled]) -> Values:
    """Return the names of a table, read whenever they are needed: an entry may be added later."""
    return Values(
        str,
        lambda value: isinstance(value, str) and value in table,
        lambda: f"one of {', '.join(table)}",
        choices=lambda: {name: entry.label for name, entry in table.items()},
    )


def count(low: int, high: int, note: str) -> Values:
    """Return the whole numbers from `low` to `high`; the note says what they count."""
    return Values(
        int,
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
        lambda: f"a whole number from {low} to {high} (a plain int), {note}",
        f"a whole number from {low:,} to {high:,}" if high <= 10**9 else f"a whole number of at least {low:,}",
    )


def number(is_allowed: Callable[[float], bool], allowed: str, entry: str) -> Values:
    """Return the numbers that a condition allows, in the words of an error and of an entry."""
    # Compared, not converted: a whole number may be beyond every float.
    return Values(
        float,
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
            and is_allowed(value)
        ),
        lambda: allowed,
        entry,
    )


FLAG = Values(bool, lambda value: isinstance(value, bool), lambda: "True, False", "True or False")
NAMES = Values(
    str,
    lambda value: isinstance(value, str) and _LISTED_NAMES.fullmatch(value) is not None,
    lambda: "names separated by commas, without spaces",
    "names separated by commas",
)


class Change(Enum):
    """What a changed field requires of an experiment that has begun."""

    NEW_WEIGHTS = "a reset, because the model or the data change"
    NEW_SESSION = "amp to be initialized again at a step boundary, with weights and optimizer state kept"
    IN_PLACE = "nothing: the next step uses the new value"


@dataclass(frozen=True)
class ConfigField:
    """Everything that the lab knows about one field of `ExperimentConfig`.

    Attributes:
        name: Its name.
        default: Its default.
        values: What it accepts.
        label: Its name in the dashboard.
        help: A phrase that says what it is, for the command line and the dashboard.
        change: What a new value requires of an experiment that has begun.
        none_means: The meaning of None; empty if None is not accepted.
        example: A value as it is typed on the command line.
        overrides_level: Whether it overrides what the opt_level sets.
        changes_dtypes: Whether a new value may change the dtype of an operation, so that a trace is out of date.
        is_always_named: Whether the string of a config names it even where it has its default.
    """

    name: str
    default: object
    values: Values
    label: str
    help: str
    change: Change
    none_means: str = ""
    example: str = ""
    overrides_level: bool = False
    changes_dtypes: bool = False
    is_always_named: bool = False

    @property
    def allowed(self) -> str:
        """What the field accepts, in words."""
        return self.values.allowed() + (f", or None for {self.none_means}" if self.none_means else "")

    @property
    def default_text(self) -> str:
        """The default as it is typed, or its meaning if it is None."""
        return self.none_means if self.default is None else spell(self.default)

    @property
    def example_text(self) -> str:
        """Values as they are typed on the command line: all of them where they are few."""
        if self.values.kind is bool:
            return "true|false"
        return "|".join(self.values.choices()) or self.example or spell(self.default)

    def accepted(self, value: object) -> Any:
        """Return `value` in the plain type of the field: one of a subclass may have another text, which nothing reads.

        >>> from amplab.lab.config import FIELDS
        >>> import numpy as np
        >>> FIELDS["lr"].accepted(np.float64(0.05)), FIELDS["model"].accepted(np.str_("cnn"))
        (0.05, 'cnn')

        Raises:
            ValueError: The field does not accept it.
        """
        value = _plain(value)
        if not self.values.accepts(value):
            raise self.refusal(spell(value))
        return float(value) if self.values.kind is float and type(value) is int else value

    def read(self, text: str) -> Any:
        """Return the value that `text` spells.

        >>> from amplab.lab.config import FIELDS
        >>> FIELDS["init_scale"].read("2**20"), FIELDS["hidden"].read("64"), FIELDS["master_weights"].read("true")
        (1048576.0, 64, True)

        Raises:
            ValueError: The text spells no value that the field accepts.
        """
        value = text if self.values.kind is str and text.lower() not in _WORDS else _read(text)
        if isinstance(value, float) and value.is_integer() and not self.values.accepts(value):
            value = int(value)  # 1e3 and 2**5 are counts too
        if not self.values.accepts(value):
            raise self.refusal(text)
        return value

    def shown(self, value: object) -> str:
        """Return a value as the dashboard shows it.

        >>> from amplab.lab.config import FIELDS
        >>> FIELDS["init_scale"].shown(65536.0), FIELDS["model"].shown("cnn"), FIELDS["min_loss_scale"].shown(None)
        ('2¹⁶', 'CNN', 'no lower limit')
        """
        if value is None:
            return self.none_means
        if isinstance(value, bool):
            return str(value)
        mantissa, exponent = math.frexp(value) if isinstance(value, int | float) else (0.0, 0)
        if self.values.is_power and mantissa == 0.5:
            return binary_power(exponent - 1)
        text = short_text(value, digits=6) if isinstance(value, float) else str(value)
        return self.values.choices().get(text, text)

    def refusal(self, given: str) -> SettingRefused:
        """Return the error for a value, as it is spelled, that the field does not accept."""
        enter = self.values.entry or " or ".join(self.values.choices().values())
        spelled = _SPELLED_POWER.fullmatch(given)
        value = binary_power(int(spelled[1])) if spelled else echo(given)
        shown = f"{self.label}: no value was entered" if given == "none" else f"{self.label}: {value} is not allowed"
        return SettingRefused(f"{self.name}={echo(given)}: expected {self.allowed}.", shown=f"{shown}; enter {enter}.")


def listed(names: str | None) -> tuple[str, ...]:
    """Return the names that `float32_ops` or `float32_modules` lists.

    >>> listed("linear,softmax"), listed(None)
    (('linear', 'softmax'), ())
    """
    return tuple(dict.fromkeys(names.split(","))) if names else ()


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


def _plain(value: object) -> object:
    """Return the built-in number or text of a value of a subclass, as of NumPy or of an enum; another value itself."""
    if isinstance(value, float):
        return float.__float__(value)  # float(value) may be the subclass's own
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    return str.__str__(value) if isinstance(value, str) else value


def _read(text: str) -> object:
    """Return the word or the number that `text` spells (none, 128, 1e-3, 2**16, 2^16), or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return parse_number(text)
    except ValueError:
        return text


def echo(text: str) -> str:
    """Return a refused text for a message, shortened to 40 characters."""
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}…"
