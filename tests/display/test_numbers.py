"""Numbers as text and read from text."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amplab.display.numbers import binary_power, parse_exact, parse_number, short_text, value_text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("65504", 65504.0),
        (" -1e9 ", -1e9),
        ("2^-24", 2.0**-24),
        ("2**-24", 2.0**-24),
        ("1 + 2^-11", 1 + 2.0**-11),
        ("-2^4", -16.0),
        ("1/3", 1 / 3),
        ("3×4", 12.0),
        ("−0.5", -0.5),
        ("-inf", -math.inf),
        ("∞", math.inf),
    ],
)
def test_a_number_is_read_as_people_write_it(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "abc", "1e-", "1,5", "__import__('os')", "'a'", "True", "1 if 1 else 2", "1/0", "(-1)^0.5", "9" * 80]
)
def test_what_is_no_number_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(text)


def test_beyond_float64_is_refused_and_not_computed_for_hours():
    with pytest.raises(ValueError, match="too large for float64"):
        parse_number("1e400")
    for text in ("9^9^9", "1e999999999", "1e-999999999", "2^-1000000000", "1e" + "9" * 50):
        with pytest.raises(ValueError, match="too large or too close to 0"):
            parse_exact(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e400", Fraction(10**400)),
        ("-1.5E-400", Fraction(-15, 10**401)),
        ("1 + 2^-60", 1 + Fraction(1, 2**60)),
        ("1.00000000000000000001", 1 + Fraction(1, 10**20)),
        ("1_000.5", Fraction(2001, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1/3", Fraction(1, 3)),
        ("(1/3)^-2", Fraction(9)),
        ("3 × 2", Fraction(6)),
        ("2^0.5", 2**0.5),
        ("1 - inf", -math.inf),
    ],
)
def test_a_number_is_read_exactly(text, number):
    read = parse_exact(text)
    assert (read, type(read)) == (number, type(number))


def test_a_fraction_keeps_no_sign_of_zero_but_the_text_does():
    assert math.copysign(1, parse_exact("-0")) == -1
    assert math.copysign(1, parse_exact("0")) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 10**400), "1e-400"),
        (Fraction(-10, 7), "-1.43"),
        (Fraction(12345 * 10**600), "1.23e604"),
        (Fraction(0), "0"),
        (Fraction(65504), "65504"),
    ],
)
def test_a_fraction_is_written_beyond_float64_too(value, text):
    assert short_text(value) == text


@given(st.floats())
def test_a_value_reads_back_from_its_text(value):
    back = parse_number(value_text(value))
    np.testing.assert_array_equal(back, value)
    assert math.copysign(1, back) == math.copysign(1, value) or math.isnan(value)


@given(st.floats(-1e300, 1e300))
def test_short_text_is_near_and_short(value):
    assert parse_number(short_text(value)) == pytest.approx(value, rel=6e-3, abs=1e-320)
    assert len(short_text(value)) <= 10


def test_powers_are_raised():
    assert binary_power(-149) == "2⁻¹⁴⁹"
