"""Numbers read from text and written as text, for people who look at bits.

Reading knows decimals, powers of two and small sums (``65504``, ``1e-8``, ``2^-24``, ``1 + 2^-11``, ``1/3``,
``inf``, ``nan``) and nothing that could run code. Writing is exact: every digit that tells the number from its
float64 neighbours, without an idle ``.0``.
"""

import ast
import math
import operator

__all__ = ["binary_power", "parse_number", "short_text", "value_text"]

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
NAMES = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
LONGEST = 60
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def parse_number(text: str) -> float:
    """Read a number, computing in float64.

    >>> parse_number("1 + 2^-11"), parse_number("-1e9"), parse_number("1/3")
    (1.00048828125, -1000000000.0, 0.3333333333333333)

    Raises:
        ValueError: if the text is not a number, with examples of what is.
    """
    spelled = text.strip().replace("−", "-").replace("∞", "inf").replace("×", "*").replace("^", "**")
    try:
        if len(spelled) > LONGEST:
            raise SyntaxError("too long")
        return float(_evaluate(ast.parse(spelled, mode="eval").body))
    except OverflowError as problem:
        raise ValueError(f"{text.strip()!r} lies beyond float64; type inf for infinity.") from problem
    except (SyntaxError, TypeError, ZeroDivisionError, ValueError, RecursionError) as problem:
        raise ValueError(
            f"{text.strip()[:LONGEST]!r} is not a number; try 0.1, 1e-8, 2^-24, 1 + 2^-11, 1/3, -inf, nan or 0x3c00."
        ) from problem


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name.lower() in NAMES:
            return NAMES[name.lower()]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise SyntaxError("not arithmetic")


def value_text(value: float) -> str:
    """Write a float64 so that it reads back the same.

    >>> value_text(65504.0), value_text(2.0**-24), value_text(-0.0), value_text(float("-inf"))
    ('65504', '5.960464477539063e-8', '-0', '-∞')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return _without_padding(repr(value).removesuffix(".0"))


def short_text(value: float, *, digits: int = 3) -> str:
    """Write a number with a few significant digits, exponents without padding.

    >>> short_text(2.0**-14), short_text(65504.0), short_text(3.4e38)
    ('6.1e-5', '65504', '3.4e38')
    """
    if not math.isfinite(value):
        return value_text(value)
    if value == int(value) and abs(value) < 1e6:
        return value_text(value)
    return _without_padding(f"{value:.{digits}g}")


def _without_padding(text: str) -> str:
    """1e-08 as 1e-8, 1e+38 as 1e38."""
    mantissa, exponent_mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent_mark else mantissa


def binary_power(exponent: int) -> str:
    """Write a power of two with its exponent raised.

    >>> binary_power(-24)
    '2⁻²⁴'
    """
    return "2" + str(exponent).translate(SUPERSCRIPTS)
