"""What the bit explorer shows, as plain values: a state, its transitions, and its payload.

    BitState --with_flipped, with_number, with_format, with_step--> BitState
    explorer_payload(BitState) -> dict of strings, booleans and percent positions

No widget here: `bit_explorer.py` holds one state and sends its payload, `bit_explorer.js` draws it.
How a number is read from text and written as text is in `display.numbers`. What was typed is read exactly and rounded
once, to the format: it need not be a float64.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from amplab.display.numbers import binary_power, parse_exact, short_text, value_text
from amplab.formats import FORMATS, FloatFormat

__all__ = ["FORMAT_LABELS", "BitState", "explorer_payload"]

FORMAT_LABELS = {
    "float32": "float32",
    "tf32": "tf32",
    "bfloat16": "bfloat16",
    "float16": "half · float16",
    "float8_e5m2": "float8 e5m2",
    "float8_e4m3": "float8 e4m3",
}
RULER_LOW, RULER_HIGH = -152.0, 131.0  # log2 at the ends of the ruler, a little beyond float32's range
MOST_TYPED_BITS = 32  # significant bits of a float that is written as a whole number and a power of two
NEIGHBOR_REACH = 36.0  # percent of the line between the value and its farther neighbor


@dataclass(frozen=True)
class BitState:
    """A pattern of a format, and the number that it was made from.

    Attributes:
        format_name: a name in `amplab.formats.FORMATS`.
        bits: the pattern.
        typed: the number as it was typed, or "" where the pattern was set by its bits.

    Raises:
        ValueError: if no format has that name.
    """

    format_name: str = "float16"
    bits: int = 0
    typed: str = ""

    def __post_init__(self) -> None:
        """Refuse an unknown format."""
        if self.format_name not in FORMATS:
            raise ValueError(
                f"format_name={self.format_name!r}: expected one of {', '.join(FORMATS)}; "
                "use amplab.formats.FloatFormat for any other format."
            )

    @property
    def fmt(self) -> FloatFormat:
        """The format itself."""
        return FORMATS[self.format_name]

    @property
    def value(self) -> float:
        """The number that the pattern stands for."""
        return self.fmt.value(self.bits)

    @property
    def problem(self) -> str:
        """Why `typed` is not a number, or "" if it is one."""
        try:
            if self.typed:
                self._read(self.typed)
        except ValueError as problem:
            return str(problem)
        return ""

    @property
    def number(self) -> Fraction | float:
        """The number that was typed, if it is one, else the value of the pattern: a float if no fraction is equal."""
        if self.typed and not self.problem:
            return parse_exact(self.typed)
        return Fraction(self.value) if self.value and math.isfinite(self.value) else self.value

    def with_flipped(self, position: int) -> "BitState":
        """Flip one bit, counted from the lowest (0).

        Raises:
            ValueError: if the format has no such bit.
        """
        if not 0 <= position < self.fmt.total_bits:
            raise ValueError(
                f"position={position}: {self.format_name} has bits 0 to {self.fmt.total_bits - 1}; "
                "bit 0 is the lowest fraction bit, the highest bit is the sign."
            )
        return replace(self, bits=self.bits ^ (1 << position), typed="")

    def with_number(self, text: str) -> "BitState":
        """Take the number nearest to what was typed; text that begins with 0x or 0b is a pattern.

        Text that is not a number changes only `typed`, and the payload then holds the reason.
        """
        try:
            bits = self._read(text)
        except ValueError:
            return replace(self, typed=text.strip())
        return replace(self, bits=bits, typed="" if _is_pattern(text) else text.strip())

    def with_value(self, value: float) -> "BitState":
        """Take the number nearest to `value`, which is typed."""
        return self.with_number(_typed_text(value))

    def _read(self, text: str) -> int:
        """Return the pattern of a text.

        Raises:
            ValueError: It is not a number, or not a pattern of the format.
        """
        if not _is_pattern(text):
            return self.fmt.bits(parse_exact(text))
        try:
            pattern = int(text, 0)
        except ValueError as problem:
            raise ValueError(f"{text.strip()!r} is not a pattern; write it like 0x3c00 or 0b1011.") from problem
        self.fmt.fields(pattern)  # raises where the format has no such pattern
        return pattern

    def with_format(self, format_name: str) -> "BitState":
        """Round the same number to another format."""
        state = BitState(format_name)
        return state.with_value(self.value) if self.problem or not self.typed else state.with_number(self.typed)

    def with_step(self, steps: int) -> "BitState":
        """Go up (steps > 0) or down by so many numbers of the format, at most to its last."""
        value = self.value
        for _ in range(abs(steps)):
            onward = self.fmt.next_up(value) if steps > 0 else self.fmt.next_down(value)
            value = value if math.isnan(onward) else onward
        return replace(self, bits=self.bits if math.isnan(value) else self.fmt.bits(value), typed="")


def _is_pattern(text: str) -> bool:
    return text.strip()[:2].lower() in ("0x", "0b")


def _typed_text(value: float) -> str:
    """Write a number as a person would type it, so that it reads as a number that rounds as `value` in every format.

    >>> _typed_text(0.1), _typed_text(0.0999755859375), _typed_text(2.0**-24), _typed_text(1 + 2.0**-24)
    ('0.1', '0.0999755859375', '2^-24', '16777217 × 2^-24')
    """
    if isinstance(value, int) and value != float(value):
        return str(value)
    value = float(value)  # numpy and torch have numbers of their own
    text = value_text(value)
    if not math.isfinite(value) or parse_exact(text) == value:
        return text
    numerator, denominator = value.as_integer_ratio()
    lowest = numerator & -numerator
    odd, exponent = numerator // lowest, lowest.bit_length() - denominator.bit_length()
    if odd.bit_length() > MOST_TYPED_BITS:
        return text  # no format has the number or a tie there
    sign = "-" if value < 0 else ""
    return f"{sign}2^{exponent}" if abs(odd) == 1 else f"{odd} × 2^{exponent}"


def explorer_payload(state: BitState) -> dict[str, Any]:
    """Return everything that the explorer draws, as JSON values without NaN and infinity."""
    fmt, value = state.fmt, state.value
    return {
        "format": state.format_name,
        "formats": [{"name": name, "label": FORMAT_LABELS[name]} for name in FORMATS],
        "layout": f"{fmt.exponent_bits} exponent bits, bias {fmt.bias} · {fmt.mantissa_bits} fraction bits",
        "bits": _bit_cells(state),
        "hex": f"0x{state.bits:0{-(-fmt.total_bits // 4)}x}",
        "kind": fmt.kind(state.bits),
        "value": value_text(value),
        "spacing": _spacing(fmt, value),
        "multiple": _multiple(fmt, value),
        "formula": _formula(fmt, state.bits),
        "note": _note(fmt, state.bits),
        "typed": state.typed,
        "rounding": _rounding(state),
        "landmarks": _landmarks(fmt),
        "neighbors": _neighbors(state),
        "ruler": _ruler(state),
    }


# ---- the pattern --------------------------------------------------------------------------------


def _bit_cells(state: BitState) -> list[dict[str, Any]]:
    """One cell per bit, the sign first."""
    fmt = state.fmt
    cells = []
    for position in reversed(range(fmt.total_bits)):
        if position == fmt.total_bits - 1:
            field, weight = "sign", "±"
        elif position >= fmt.mantissa_bits:
            field, weight = "exponent", str(2 ** (position - fmt.mantissa_bits))
        else:
            field, weight = "fraction", binary_power(position - fmt.mantissa_bits)
        name = "sign bit" if field == "sign" else f"{field} bit {position - fmt.mantissa_bits * (field == 'exponent')}"
        cells.append(
            {
                "position": position,
                "on": bool(state.bits >> position & 1),
                "field": field,
                "weight": weight,
                "name": name,
            }
        )
    return cells


def _formula(fmt: FloatFormat, bits: int) -> dict[str, Any] | None:
    """The parts of (-1)^sign x 2^(exponent - bias) x significand; None for infinity and NaN."""
    if fmt.kind(bits) in ("infinity", "nan"):
        return None
    sign, exponent, mantissa = fmt.fields(bits)
    leading = "1" if exponent else "0"
    return {
        "sign": str(sign),
        "exponent": f"{max(exponent, 1)} − {fmt.bias}",
        "power": f"{max(exponent, 1) - fmt.bias}".replace("-", "−"),
        "significand": f"{leading}.{mantissa:0{fmt.mantissa_bits}b}",
        "decimal": value_text((exponent > 0) + mantissa / 2**fmt.mantissa_bits),
    }


def _spacing(fmt: FloatFormat, value: float) -> str:
    """The spacing at the value as a power of two, "" at infinity and NaN."""
    return binary_power(round(math.log2(fmt.ulp(value)))) if math.isfinite(value) else ""


def _multiple(fmt: FloatFormat, value: float) -> str:
    """The value as a whole number of spacings, e.g. "1365 × 2⁻¹²"."""
    if not math.isfinite(value):
        return ""
    return f"{round(value / fmt.ulp(value))} × {_spacing(fmt, value)}"


def _note(fmt: FloatFormat, bits: int) -> str:
    smallest = binary_power(round(math.log2(fmt.smallest_subnormal)))
    return {
        "normal": "A normal number: the 1 before the point is implied, not stored.",
        "subnormal": "A subnormal number: the exponent field is 0, so no 1 is implied and the power stays at "
        f"{1 - fmt.bias}. The spacing stays {smallest}: smaller numbers have fewer significant bits.".replace("-", "−"),
        "zero": "Zero: exponent and fraction are 0. The sign bit makes two zeros, which compare equal.",
        "infinity": "Infinity: the exponent is all ones, the fraction is 0. A number that overflows becomes infinity.",
        "nan": "NaN, not a number: the exponent is all ones, the fraction is not 0."
        if fmt.has_infinity
        else "NaN, not a number: all bits but the sign are ones. This format has no other NaN and no infinity.",
    }[fmt.kind(bits)]


# ---- the number that was typed ------------------------------------------------------------------


def _rounding(state: BitState) -> dict[str, Any] | None:
    """How the typed number was rounded: {verdict, text}, or None if nothing was typed."""
    if not state.typed:
        return None
    if state.problem:
        return {"verdict": "unread", "text": state.problem}
    verdict = _verdict(state.fmt, state.number)
    return {"verdict": verdict, "text": _story(state.fmt, state.number, verdict)}


def _verdict(fmt: FloatFormat, number: Fraction | float) -> str:
    """exact, rounded, tie, underflow, overflow or clipped."""
    rounded = fmt.value(fmt.bits(number))
    if math.isnan(rounded) or rounded == number:
        return "exact"
    if rounded == 0:
        return "underflow"
    if math.isinf(rounded):
        return "overflow"
    edge = fmt.max + fmt.ulp(fmt.max) / 2
    if not -edge <= number <= edge:
        return "clipped"
    return "tie" if 2 * abs(_error(fmt, number)) == _gap_around(fmt, number) else "rounded"


def _error(fmt: FloatFormat, number: Fraction | float) -> Fraction:
    """What rounding adds to a number; it is finite before and after."""
    return Fraction(fmt.value(fmt.bits(number))) - Fraction(number)


def _gap_around(fmt: FloatFormat, number: Fraction | float) -> float:
    """The distance of the two numbers of the format between which `number` lies."""
    gap_below, gap_above = _gaps(fmt, fmt.value(fmt.bits(number)))
    return gap_below if _error(fmt, number) > 0 else gap_above


def _story(fmt: FloatFormat, number: Fraction | float, verdict: str) -> str:
    smallest = binary_power(round(math.log2(fmt.smallest_subnormal)))
    edge = _edge_text(fmt)
    said = {
        "exact": "Represented exactly.",
        "underflow": f"Underflows: at most half of the smallest number, {smallest}, so it rounds to 0.",
        "overflow": f"Overflows: every number from {edge} up, halfway to the next power of two, rounds to infinity.",
        "clipped": f"Clipped: numbers above {edge} become the largest number, because the format has no infinity.",
    }.get(verdict) or _error_text(fmt, number, verdict)
    if isinstance(number, float) and number != 0 and math.isfinite(number):
        return f"Computed in float64: {value_text(number)}. {said}"
    return said


def _edge_text(fmt: FloatFormat) -> str:
    """Halfway from the largest number to the next."""
    edge = fmt.max + fmt.ulp(fmt.max) / 2
    if parse_exact(value_text(edge)) == edge:
        return value_text(edge)
    return f"{binary_power(fmt.max_exponent + 1)} − {binary_power(fmt.max_exponent - fmt.mantissa_bits - 1)}"


def _error_text(fmt: FloatFormat, number: Fraction | float, verdict: str) -> str:
    error = _error(fmt, number)
    size = f"off by {short_text(error)} ({_relative_text(error / Fraction(number))} of the number)"
    if verdict == "tie":
        return f"A tie, halfway between two numbers: it rounds to the one whose last bit is 0, {size}."
    share = float(abs(error) / Fraction(_gap_around(fmt, number)))
    return f"Rounds to the nearest number, {size}, {share:.2f} of the spacing."


def _relative_text(share: Fraction) -> str:
    """A relative error in percent, or in scientific notation if it is tiny."""
    share = abs(share)
    return f"{short_text(100 * share, digits=2)} %" if share >= 1e-6 else short_text(share, digits=2)


def _landmarks(fmt: FloatFormat) -> list[dict[str, Any]]:
    """Numbers to try, each with a label and the text to type."""
    largest = f"2^{fmt.max_exponent + 1} - 2^{fmt.max_exponent - fmt.mantissa_bits}"
    edges = [
        ("largest", value_text(fmt.max) if parse_exact(value_text(fmt.max)) == fmt.max else largest),
        ("smallest normal", f"2^{fmt.min_exponent}"),
        ("smallest", f"2^{fmt.min_exponent - fmt.mantissa_bits}"),
        ("1 + ε", f"1 + 2^-{fmt.mantissa_bits}"),
    ]
    everyday = [(text, text) for text in ("0.1", "1/3", "2049", "65520", "1e-8", "-1e9")]
    special = [("∞", "inf"), ("NaN", "nan")]
    return [{"label": label, "text": text} for label, text in edges + everyday + special]


# ---- the neighbors on a line -------------------------------------------------------------------


def _neighbors(state: BitState) -> dict[str, Any] | None:
    """The numbers below and above with percent positions on a line, or None for inf and NaN.

    `zone` is the range of all numbers that round to this one: halfway to each neighbor.
    """
    fmt, value = state.fmt, state.value
    if not math.isfinite(value):
        return None
    gap_below, gap_above = _gaps(fmt, value)
    below, above = fmt.next_down(value), fmt.next_up(value)
    per_unit = NEIGHBOR_REACH / max(gap_below, gap_above)
    left, right = 50.0 - gap_below * per_unit, 50.0 + gap_above * per_unit
    return {
        "below": {"text": _end_text(below), "position": left},
        "value": {"text": value_text(value), "position": 50.0},
        "above": {"text": _end_text(above), "position": right},
        "gap_below": "" if math.isnan(below) else _gap_text(gap_below),
        "gap_above": "" if math.isnan(above) else _gap_text(gap_above),
        "zone": [
            0.0 if math.isnan(below) else (50.0 + left) / 2,
            100.0 if math.isnan(above) else (50.0 + right) / 2,
        ],
        "typed": _typed_position(state, per_unit),
    }


def _typed_position(state: BitState, per_unit: float) -> float | None:
    """The position of the typed number on the line of neighbors, in percent; None if there is none."""
    number = state.number
    if not state.typed or number == state.value or abs(number) == math.inf:
        return None
    offset = (Fraction(number) - Fraction(state.value)) * Fraction(per_unit)
    return 50.0 + float(min(max(offset, Fraction(-49)), Fraction(49)))


def _gaps(fmt: FloatFormat, value: float) -> tuple[float, float]:
    """The distance to the number below and above; at an end of the range, the spacing there."""
    below, above = fmt.next_down(value), fmt.next_up(value)
    gap_below = value - below if math.isfinite(below) else fmt.ulp(value)
    gap_above = above - value if math.isfinite(above) else fmt.ulp(value)
    return gap_below, gap_above


def _gap_text(gap: float) -> str:
    return f"{binary_power(round(math.log2(gap)))} = {short_text(gap)}"


def _end_text(number: float) -> str:
    return "no number" if math.isnan(number) else value_text(number)


# ---- the ruler ----------------------------------------------------------------------------------


def _ruler(state: BitState) -> dict[str, Any]:
    """Every format's range on one log2 axis, and what the number becomes in each."""
    number = state.number
    return {
        "title": value_text(state.value) if _is_nan(number) or not state.typed else state.typed,
        "ticks": [{"label": binary_power(e), "position": _along(e)} for e in range(-128, 129, 32)],
        "marker": None if _is_nan(number) else _along(_log2(number)),
        "rows": [_ruler_row(fmt, number) for fmt in FORMATS.values()],
    }


def _ruler_row(fmt: FloatFormat, number: Fraction | float) -> dict[str, Any]:
    rounded, verdict = fmt.value(fmt.bits(number)), _verdict(fmt, number)
    words = {"exact": "exact", "underflow": "underflows", "overflow": "overflows", "clipped": "clipped"}
    smallest = fmt.min_exponent - fmt.mantissa_bits
    return {
        "name": fmt.name,
        "label": FORMAT_LABELS[fmt.name],
        "start": _along(smallest),
        "normal": _along(fmt.min_exponent),
        "end": _along(math.log2(fmt.max)),
        "range": f"{binary_power(smallest)} to {short_text(fmt.max)}",
        "result": short_text(rounded, digits=9),
        "verdict": verdict,
        "words": words.get(verdict) or f"off by {_relative_text(_error(fmt, number) / Fraction(number))}",
    }


def _is_nan(number: Fraction | float) -> bool:
    return isinstance(number, float) and math.isnan(number)


def _log2(number: Fraction | float) -> float:
    """log2 of the magnitude; the ends of the ruler for 0 and infinity."""
    if number == 0:
        return RULER_LOW
    if abs(number) == math.inf:
        return RULER_HIGH
    numerator, denominator = number.as_integer_ratio()
    return math.log2(abs(numerator)) - math.log2(denominator)


def _along(log2: float) -> float:
    """The position of a power of two on the ruler in percent, limited to the ruler."""
    share = (log2 - RULER_LOW) / (RULER_HIGH - RULER_LOW)
    return round(100 * min(max(share, 0.0), 1.0), 3)
