"""Numbers as text: counts, bytes, shares, powers of two, exact and rounded decimals; and numbers read from text."""

import ast
import math
import operator
import sys
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

__all__ = [
    "binary_power",
    "count",
    "number",
    "parse_exact",
    "parse_number",
    "percent",
    "power",
    "raised_power",
    "short_text",
    "size",
    "value_text",
]

_NAMES = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
_LONGEST = 60
_MOST_BITS = 2**14
"""Of the numerator and of the denominator of a number that is read exactly: up to about 10^4932."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float) -> str:
    """Return a share in percent; a small one is not rounded to zero.

    >>> percent(0.0), percent(0.0004), percent(0.25), percent(1.0)
    ('0 %', '<0.1 %', '25.0 %', '100 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


def power(value: float, *, raised: bool = False) -> str:
    """Return a number as a power of two if it is one; `raised` writes its exponent in superscript digits.

    >>> power(65536.0), power(1000.0), power(1.0), power(2.0**-14, raised=True)
    ('2^16', '1000', '1', '2⁻¹⁴')
    """
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5 or value == 1:
        return f"{value:g}"
    return binary_power(exponent - 1) if raised else f"2^{exponent - 1}"


def count(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural.

    >>> count(1, "cast"), count(1200, "byte")
    ('1 cast', '1,200 bytes')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Return a number of bytes in the decimal unit that fits.

    >>> size(0), size(640), size(102_840), size(2_500_000_000)
    ('0 B', '640 B', '103 kB', '2.50 GB')
    >>> size(9_996), size(999_999)
    ('10.0 kB', '1.00 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    rounded = float(f"{nbytes:.2e}")  # before the unit is chosen: 999,999 is 1.00 MB
    place = min(int(math.log10(rounded)) // 3, 4)
    value = rounded / 1000.0**place
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {('B', 'kB', 'MB', 'GB', 'TB')[place]}"


def number(value: float | str) -> str:
    """Return a number for people: integers in groups of three digits, powers of two, else four significant digits.

    >>> number(9216), number(65536.0), number(2.0**-24), number(0.46973), number(1e-8), number("loss"), number(math.nan)
    ('9,216', '2^16', '2^-24', '0.4697', '1e-08', 'loss', 'NaN')
    """
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    if math.isnan(value):
        return "NaN"
    is_power = 0.0 < value < math.inf and math.frexp(value)[0] == 0.5
    return power(value) if is_power and not 2.0**-4 <= value <= 2.0**9 else f"{value:.4g}"


def parse_number(text: str) -> float:
    """Read a number, such as 65504, 1e-8, 2^-24, 1 + 2^-11, 1/3, inf or nan, as the nearest float64.

    Only arithmetic is evaluated; the text cannot run code.

    >>> parse_number("1 + 2^-11"), parse_number("-1e9"), parse_number("1/3")
    (1.00048828125, -1000000000.0, 0.3333333333333333)

    Raises:
        ValueError: if the text is not a number, or is too large for float64.
    """
    try:
        return float(parse_exact(text))
    except OverflowError as problem:
        raise ValueError(f"{text.strip()!r} is too large for float64; use inf for infinity.") from problem


def parse_exact(text: str) -> Fraction | float:
    """Read a number as `parse_number` does, without rounding it.

    A float is returned for infinity, NaN and -0, and for what a fraction cannot be, such as 2^0.5: then float64 has
    computed it.

    >>> parse_exact("1 + 2^-60") - 1 == Fraction(1, 2**60), parse_exact("1e400") == 10**400, parse_exact("-inf")
    (True, True, -inf)

    Raises:
        ValueError: if the text is not a number, or is too large or too close to 0 to be computed exactly.
    """
    spelled = text.strip().replace("−", "-").replace("∞", "inf").replace("×", "*").replace("^", "**")
    try:
        if len(spelled) > _LONGEST:
            raise SyntaxError("too long")
        expression = ast.parse(spelled, mode="eval").body
        value = _evaluate(expression, spelled)
    except OverflowError as problem:
        said = "is too large or too close to 0 to be read exactly; use inf or 0."
        raise ValueError(f"{text.strip()!r} {said}") from problem
    except (SyntaxError, TypeError, ZeroDivisionError, ValueError, RecursionError) as problem:
        raise ValueError(
            f"{text.strip()[:_LONGEST]!r} is not a number; try 0.1, 1e-8, 2^-24, 1 + 2^-11, 1/3, -inf, nan or 0x3c00."
        ) from problem
    is_minus = isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub)
    return -0.0 if value == 0 and is_minus else value  # a fraction has no -0


def _evaluate(node: ast.expr, spelled: str) -> Fraction | float:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return Fraction(number)
        case ast.Constant(value=float()):
            return _decimal(ast.get_source_segment(spelled, node) or "")
        case ast.Name(id=name) if name.lower() in _NAMES:
            return _NAMES[name.lower()]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_evaluate(operand, spelled))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_evaluate(left, spelled), _evaluate(right, spelled)))
    raise SyntaxError("not arithmetic")


def _decimal(digits: str) -> Fraction | float:
    """Return the exact value of a decimal such as 1.5e-8."""
    mantissa, _, exponent = digits.lower().replace("_", "").partition("e")
    return _bounded(Fraction(mantissa) * _raised(Fraction(10), Fraction(exponent or "0")))


def _raised(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    """Return a power.

    Raises:
        OverflowError: It would have too many bits to be computed.
        TypeError: It is complex.
    """
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) > _MOST_BITS:
            raise OverflowError
    value: Any = base**exponent
    if not isinstance(value, Fraction | float):
        raise TypeError("no real number")
    return value


def _bounded(value: Fraction | float) -> Fraction | float:
    """Return `value`.

    Raises:
        OverflowError: It has too many bits to compute with it.
    """
    if isinstance(value, Fraction) and max(abs(value.numerator), value.denominator) >> _MOST_BITS:
        raise OverflowError
    return value


_SIGNS: dict[type, Callable[[Any], Fraction | float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: dict[type, Callable[[Any, Any], Fraction | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _raised,
}


def value_text(value: float) -> str:
    """Write a float64 so that `parse_number` reads the same number: with 17 digits at most.

    >>> value_text(65504.0), value_text(2.0**-24), value_text(-0.0), value_text(float("-inf"))
    ('65504', '5.960464477539063e-8', '-0', '-∞')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return _without_padding(repr(value).removesuffix(".0"))


def short_text(value: float | Fraction, *, digits: int = 3) -> str:
    """Write a number with a few significant digits.

    >>> short_text(2.0**-14), short_text(65504.0), short_text(3.4e38), short_text(Fraction(1, 10**400))
    ('6.1e-5', '65504', '3.4e38', '1e-400')
    """
    if isinstance(value, Fraction):
        if value and not sys.float_info.min <= abs(value) <= sys.float_info.max:
            return _without_padding(_quotient(value, digits).lower())
        value = float(value)
    if not math.isfinite(value):
        return value_text(value)
    if value == int(value) and abs(value) < 1e6:
        return value_text(value)
    return _without_padding(f"{value:.{digits}g}")


def _quotient(value: Fraction, digits: int) -> str:
    """Write a fraction that float64 cannot hold."""
    context = Context(prec=digits)
    return str(context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context))


def _without_padding(text: str) -> str:
    """Write 1e-08 as 1e-8, and 1e+38 as 1e38."""
    mantissa, exponent_mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent_mark else mantissa


def binary_power(exponent: int) -> str:
    """Write a power of two with its exponent in superscript digits.

    >>> binary_power(-24)
    '2⁻²⁴'
    """
    return raised_power(2, exponent)


def raised_power(base: int, exponent: int) -> str:
    """Write a power with its exponent in superscript digits.

    >>> raised_power(10, -3)
    '10⁻³'
    """
    return str(base) + str(exponent).translate(_SUPERSCRIPTS)
