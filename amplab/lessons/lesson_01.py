"""Lesson 1, number formats: the checks of its exercises. The formats are in `amplab.formats`."""

from __future__ import annotations

from collections.abc import Iterable

from amplab.formats import FLOAT8_E5M2, FORMATS, FloatFormat
from amplab.lessons.exercises import exercise

__all__ = ["check_formats_with_eps", "check_overflow_from", "check_reserved_share"]

_EPS = 1e-12


@exercise("01-1")
def check_overflow_from(answer: float) -> str | None:
    """Ask for the smallest number that overflows in float8 e5m2.

    Right:
        It is halfway between the largest number, 57344, and 65536, which would have been the next.
    """
    largest = FLOAT8_E5M2.max
    halfway = largest + FLOAT8_E5M2.ulp(largest) / 2
    if answer == halfway:
        return None
    if answer == largest:
        return f"{answer:g} is the largest number of e5m2; some larger ones round down to it."
    if answer == 2 * halfway - largest:
        return f"{answer:g} would be the next number, and it overflows, but smaller ones do too."
    return f"{answer!r} is not halfway between the largest number and the one that would have been the next."


@exercise("01-2")
def check_formats_with_eps(answer: str | Iterable[str]) -> str | None:
    """Ask for the names of the formats in which 1e-12 is not zero.

    Form:
        write a list of names, such as ["half", "float32"].

    Right:
        1e-12 is about 2^-40. The three formats with 8 exponent bits reach far below it.
    """
    said = {answer} if isinstance(answer, str) else set(answer)
    unknown = sorted(said - set(FORMATS))
    if unknown:
        return f"{unknown[0]!r} is not a format; the names are {', '.join(FORMATS)}."
    right = {name for name, fmt in FORMATS.items() if fmt.value(fmt.bits(_EPS)) != 0}
    if said - right:
        name = sorted(said - right)[0]
        return f"{name} rounds 1e-12 to zero: its smallest number is {FORMATS[name].smallest_subnormal:.1g}."
    if right - said:
        return f"there are {len(right)} such formats; compare 1e-12 with the column *smallest* of the table."
    return None


@exercise("01-3")
def check_reserved_share(answer: float) -> str | None:
    """Ask which share of the 32 non-negative patterns of e3m2 means infinity or NaN.

    Right:
        Four of 32: one whole exponent. That is why the smallest formats have no infinity.
    """
    tiny = FloatFormat("e3m2", 3, 2)
    values = [tiny.value(bits) for bits in range(32)]
    reserved = sum(not abs(value) <= tiny.max for value in values)
    if answer == reserved:
        return f"{answer!r} is the number of the patterns; divide it by 32."
    if abs(answer - reserved / 32) > 1e-9:
        return f"it is not {answer!r}; list the 32 values and count inf and nan."
    return None
