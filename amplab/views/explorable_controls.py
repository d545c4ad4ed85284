"""The controls of an `Explorable`: what a slider and a choice accept, and what the page is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amplab.display.numbers import binary_power

__all__ = ["Choice", "Slider"]

_POWER = "2^"


@dataclass(frozen=True)
class Slider:
    """A number between two ends.

    >>> Slider(0, 32, value=8, label="loss scale 2^").text(8)
    '2⁸'

    Args:
        low, high: the ends, both included.
        value: the number at the start; None takes `low`.
        step: the distance of two numbers.
        label: what the number is; the name of the argument if empty. A label that ends with "2^" shows powers of two.

    Raises:
        ValueError: the ends, the step or the value do not fit together.
    """

    low: float
    high: float
    value: float | None = None
    step: float = 1
    label: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (self.low < self.high and 0 < self.step <= self.high - self.low):
            raise ValueError(f"Slider({self.low}, {self.high}, step={self.step}): expected low < high and a step > 0.")
        self.accept(self.start)

    @property
    def start(self) -> float:
        """The number at the start."""
        return self.low if self.value is None else self.value

    def accept(self, value: Any) -> float:
        """Return `value` as a number of the slider: an int if the ends and the step are ints.

        Raises:
            ValueError: it is not a number, not between the ends, or between two steps.
        """
        steps = round((value - self.low) / self.step) if _is_number(value) and self.low <= value <= self.high else None
        near = None if steps is None else self.low + steps * self.step
        if near is None or abs(near - value) > 1e-6 * self.step:
            raise ValueError(f"{value!r}: expected {self.low:g} to {self.high:g} in steps of {self.step:g}.")
        return near if isinstance(near, int) else float(f"{near:.12g}")  # 0.1 + 2 * 0.1 is 0.3

    def text(self, value: float) -> str:
        """Return a number as the page shows it."""
        return binary_power(round(value)) if self.is_power else f"{value:g}"

    @property
    def is_power(self) -> bool:
        """Whether the number is shown as the exponent of a power of two."""
        return self.label.endswith(_POWER) and all(float(each).is_integer() for each in (self.low, self.step))

    def payload(self, name: str, value: float) -> dict[str, Any]:
        """Return what the page draws."""
        label = self.label.removesuffix(_POWER).strip() if self.is_power else self.label
        numbers = {"low": self.low, "high": self.high, "step": self.step, "value": value}
        return {"kind": "slider", "name": name, "label": label or name, "power": self.is_power, **numbers}


@dataclass(frozen=True)
class Choice:
    """One of several values; the page shows them as text.

    Args:
        options: the values, at least one.
        value: the one at the start; None takes the first.
        label: what is chosen; the name of the argument if empty.

    Raises:
        ValueError: there are no options, two have the same text, or `value` is none of them.
    """

    options: Sequence[Any]
    value: Any = None
    label: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Check the options."""
        texts = [str(option) for option in self.options]
        if not texts or len(set(texts)) < len(texts):
            raise ValueError(f"Choice({texts}): expected one or more options that differ in their text.")
        self.accept(self.start)

    @property
    def start(self) -> Any:
        """The value at the start."""
        return self.options[0] if self.value is None else self.value

    def accept(self, value: Any) -> Any:
        """Return the option that equals `value`, or whose text is `value`.

        Raises:
            ValueError: there is none.
        """
        for option in self.options:
            if option == value or str(option) == value:
                return option
        raise ValueError(f"{value!r}: expected one of {', '.join(map(str, self.options))}.")

    def text(self, value: Any) -> str:
        """Return an option as the page shows it."""
        return str(value)

    def payload(self, name: str, value: Any) -> dict[str, Any]:
        """Return what the page draws."""
        options = [str(option) for option in self.options]
        return {"kind": "choice", "name": name, "label": self.label or name, "options": options, "value": str(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
