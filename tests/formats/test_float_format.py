"""FloatFormat against torch's own dtypes, numpy and bit masks: patterns, rounding, neighbours."""

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.formats import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    TF32,
    FloatFormat,
)

SMALL_FORMATS = [FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2]
TORCH_FORMATS = [FLOAT32, *SMALL_FORMATS]
BELOW_BIT_13 = 0x1FFF  # the 13 bits of float32 that tf32 drops


def name_of(fmt):
    return fmt.name


def all_values_by_torch(fmt):
    """Every pattern of a 8 or 16 bit format, decoded by torch: float64 ``(2**total_bits,)``."""
    if fmt.total_bits == 8:
        patterns = torch.arange(256, dtype=torch.uint8)
    else:
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return patterns.view(fmt.torch_dtype).to(torch.float64)


def assert_same_numbers(actual, expected):
    """Equal as numbers, NaN where NaN, and zeros of the same sign."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


# ---- patterns -------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=name_of)
def test_value_of_every_pattern_is_torchs(fmt):
    values = [fmt.value(bits) for bits in range(2**fmt.total_bits)]
    assert_same_numbers(values, all_values_by_torch(fmt).numpy())


def test_value_of_a_tf32_pattern_is_that_of_the_float32_with_zeros_below():
    every_fifth = range(0, 2**19, 5)  # each exponent field with a fifth of its mantissas
    edges = [exponent << 10 | low for exponent in range(2**9) for low in (0, 1, 0x3FF)]
    patterns = [*every_fifth, *edges]
    expected = (torch.tensor(patterns) << 13).to(torch.int32).view(torch.float32).double()
    assert_same_numbers([TF32.value(bits) for bits in patterns], expected)


@given(st.integers(0, 2**32 - 1))
def test_value_of_a_float32_pattern_is_structs(bits):
    assert_same_numbers(FLOAT32.value(bits), struct.unpack("<f", struct.pack("<I", bits))[0])


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=name_of)
def test_bits_is_the_inverse_of_value(fmt):
    numbers = [bits for bits in range(2**fmt.total_bits) if fmt.kind(bits) != "nan"]
    assert [fmt.bits(fmt.value(bits)) for bits in numbers] == numbers
    assert fmt.kind(fmt.bits(math.nan)) == "nan"


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=name_of)
def test_kind_of_every_pattern_agrees_with_torch(fmt):
    values = all_values_by_torch(fmt)
    kinds = np.array([fmt.kind(bits) for bits in range(2**fmt.total_bits)])
    np.testing.assert_array_equal(kinds == "nan", values.isnan().numpy())
    np.testing.assert_array_equal(kinds == "infinity", values.isinf().numpy())
    np.testing.assert_array_equal(kinds == "zero", (values == 0).numpy())
    below = values.abs() < torch.finfo(fmt.torch_dtype).smallest_normal
    np.testing.assert_array_equal(kinds == "subnormal", (below & (values != 0)).numpy())


def test_fields_split_the_pattern():
    assert FLOAT16.fields(0b1_01111_0000000001) == (1, 15, 1)
    assert BFLOAT16.fields(0b0_11111110_1111111) == (0, 254, 127)
    assert FLOAT8_E4M3.fields(0b1_0000_101) == (1, 0, 5)


@pytest.mark.parametrize("bits", [-1, 2**16])
def test_a_pattern_outside_the_format_is_refused(bits):
    with pytest.raises(ValueError, match=r"float16.* 0xffff"):
        FLOAT16.value(bits)


# ---- rounding -------------------------------------------------------------------------------


def float32_battery(fmt):
    """Random patterns, every number of the format, every tie, and both sides of every tie."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    parts = [random.to(torch.int32).view(torch.float32)]
    if fmt.total_bits <= 16:
        numbers = all_values_by_torch(fmt)
        numbers = numbers[numbers.isfinite()].sort().values
        ties = ((numbers[1:] + numbers[:-1]) / 2).float()
        parts += [numbers.float(), ties, *neighbours_in_float32(ties)]
    beyond = torch.tensor([fmt.max, fmt.max + fmt.ulp(fmt.max) / 2, 1e30, math.inf, math.nan, 0.0])
    parts += [beyond, -beyond, *neighbours_in_float32(beyond[:2])]
    return torch.cat(parts)


def neighbours_in_float32(x):
    infinity = torch.full_like(x, math.inf)
    return torch.nextafter(x, infinity), torch.nextafter(x, -infinity)


@pytest.mark.parametrize("fmt", TORCH_FORMATS, ids=name_of)
def test_round_is_torchs_cast(fmt):
    x = float32_battery(fmt)
    rounded = fmt.round(x)
    cast = x.to(fmt.torch_dtype).float()
    if not fmt.has_infinity:  # newer torch saturates, older gave NaN
        saturated = torch.copysign(torch.tensor(fmt.max), x)
        cast = torch.where(cast.isnan() & ~x.isnan(), saturated, cast)
    assert rounded.dtype is torch.float32
    assert_same_numbers(rounded, cast)


def test_round_to_tf32_is_a_carry_and_a_mask_of_float32_bits():
    x = float32_battery(TF32)
    x = x[x.isfinite()]
    bits = x.view(torch.int32).long()
    odd = (bits >> 13) & 1
    carried = (bits + (BELOW_BIT_13 >> 1) + odd) & ~BELOW_BIT_13
    assert_same_numbers(TF32.round(x), carried.to(torch.int32).view(torch.float32))


@pytest.mark.parametrize(("fmt", "numpy_dtype"), [(FLOAT16, np.float16), (FLOAT32, np.float32)], ids=["half", "float"])
def test_a_float64_is_rounded_once(fmt, numpy_dtype):
    just_above_a_tie = 1 + fmt.epsilon / 2 + 2.0**-50  # rounding to float32 first would lose it
    random = torch.randn(100_000, dtype=torch.float64) * 2.0 ** torch.randint(-30, 18, (100_000,))
    x = torch.cat([random, torch.tensor([just_above_a_tie, -1e300, 5e-324], dtype=torch.float64)])
    with np.errstate(over="ignore", under="ignore"):
        expected = x.numpy().astype(numpy_dtype).astype(np.float64)
    assert fmt.round(x).dtype is torch.float64
    assert_same_numbers(fmt.round(x), expected)
    assert fmt.value(fmt.bits(just_above_a_tie)) == 1 + fmt.epsilon


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=name_of)
def test_bits_rounds_like_round(fmt):
    x = float32_battery(fmt)[-30_000:]
    one_by_one = [fmt.value(fmt.bits(value)) for value in x.tolist()]
    assert_same_numbers(one_by_one, fmt.round(x.double()))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=name_of)
def test_bits_of_a_fraction_is_that_of_the_equal_float(fmt):
    values = [value for value in float32_battery(fmt)[-30_000::7].tolist() if math.isfinite(value) and value]
    assert [fmt.bits(Fraction(value)) for value in values] == [fmt.bits(value) for value in values]


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=name_of)
def test_a_fraction_is_rounded_once(fmt):
    numbers = [Fraction(number) for number in sorted_numbers(fmt)]
    near = Fraction(1, 2**3000)
    for below, above in list(itertools.pairwise(numbers))[:: 1 if fmt.total_bits == 8 else 97]:
        tie = (below + above) / 2
        assert fmt.value(fmt.bits(tie - near)) == below
        assert fmt.value(fmt.bits(tie + near)) == above
        assert fmt.bits(tie) % 2 == 0
    edge = Fraction(fmt.max + fmt.ulp(fmt.max) / 2)
    beyond = math.inf if fmt.has_infinity else fmt.max
    assert fmt.value(fmt.bits(edge - near)) == fmt.max
    assert fmt.value(fmt.bits(-edge - near)) == fmt.value(fmt.bits(Fraction(-(10**400)))) == -beyond
    assert math.copysign(1, fmt.value(fmt.bits(Fraction(-1, 10**400)))) == -1


def test_halfs_edge_of_overflow():
    assert FLOAT16.value(FLOAT16.bits(65519.999)) == 65504
    assert FLOAT16.value(FLOAT16.bits(65520)) == math.inf
    assert FLOAT16.round(torch.tensor([65519.0, 65520.0, -65520.0])).tolist() == [
        65504,
        math.inf,
        -math.inf,
    ]


def test_a_format_without_infinity_saturates():
    assert FLOAT8_E4M3.round(torch.tensor([465.0, -1e9, math.inf])).tolist() == [448, -448, 448]
    assert FLOAT8_E4M3.value(FLOAT8_E4M3.bits(-math.inf)) == -448
    assert FLOAT8_E4M3.round(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_round_takes_any_floating_dtype_and_any_shape(dtype):
    x = torch.tensor([[0.3, -3.0], [40.0, 500.0]]).to(dtype)
    assert torch.equal(FLOAT8_E4M3.round(x.t()), FLOAT8_E4M3.round(x).t())
    assert FLOAT16.round(torch.tensor(0.1, requires_grad=True)).item() == 0.0999755859375


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_round_takes_the_imaginary_part_of_a_conjugate(dtype):
    x = torch.tensor([1.0 + 0.1j, 2.0 - 70000.0j, -0.0j], dtype=dtype)
    assert x.conj().imag.is_neg()
    expected = FLOAT16.round(torch.tensor([-0.1, 70000.0, 0.0], dtype=x.real.dtype))
    assert torch.equal(FLOAT16.round(x.conj().imag), expected)


def test_round_refuses_integers_and_says_what_to_do():
    with pytest.raises(TypeError, match=r"round\(torch.int64\)"):
        FLOAT16.round(torch.tensor([1]))


finite_or_not = st.floats(width=64)
any_format = st.sampled_from(list(FORMATS.values()))


@given(any_format, finite_or_not)
def test_rounding_twice_is_rounding_once(fmt, x):
    once = fmt.round(torch.tensor(x, dtype=torch.float64))
    assert_same_numbers(fmt.round(once), once)


@given(any_format, st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_rounding_is_monotone(fmt, x, y):
    low, high = fmt.round(torch.tensor([min(x, y), max(x, y)], dtype=torch.float64)).tolist()
    assert low <= high


@given(any_format, finite_or_not)
def test_rounding_is_odd(fmt, x):
    pair = fmt.round(torch.tensor([x, -x], dtype=torch.float64)).tolist()
    assert_same_numbers(pair[1], -pair[0])


@given(any_format, st.floats(allow_nan=False))
def test_rounding_finds_the_nearer_neighbour(fmt, x):
    rounded = fmt.value(fmt.bits(x))
    if math.isfinite(rounded) and abs(x) <= fmt.max:
        assert abs(rounded - x) <= fmt.ulp(x) / 2
        assert fmt.next_down(rounded) < x < fmt.next_up(rounded)


# ---- neighbours -----------------------------------------------------------------------------


def sorted_numbers(fmt):
    values = all_values_by_torch(fmt)
    return values[values.isfinite()].unique(sorted=True).tolist()


@pytest.mark.parametrize("fmt", SMALL_FORMATS, ids=name_of)
def test_neighbours_and_ulp_walk_through_every_number(fmt):
    numbers = sorted_numbers(fmt)
    assert [fmt.next_up(number) for number in numbers[:-1]] == numbers[1:]
    pairs = list(itertools.pairwise(numbers))[:: 1 if fmt.total_bits == 8 else 5]
    assert [fmt.next_down(above) for _, above in pairs] == [below for below, _ in pairs]
    assert [fmt.next_up((below + above) / 2) for below, above in pairs] == [above for _, above in pairs]
    assert [fmt.next_down((below + above) / 2) for below, above in pairs] == [below for below, _ in pairs]
    gaps = [above - below for below, above in pairs]
    assert [fmt.ulp(below if below >= 0 else above) for below, above in pairs] == gaps


@given(st.floats(width=32, allow_nan=False))
def test_float32_neighbours_and_ulp_are_numpys(x):
    single = np.float32(x)
    with np.errstate(over="ignore", under="ignore"):
        assert FLOAT32.next_up(x) == np.nextafter(single, np.float32(math.inf))
        assert FLOAT32.next_down(x) == np.nextafter(single, np.float32(-math.inf))
        if abs(x) < FLOAT32.max:  # at the largest number numpy counts up to infinity
            assert FLOAT32.ulp(x) == abs(np.spacing(single))


def test_neighbours_at_the_ends_of_the_range():
    assert FLOAT16.next_up(65504) == FLOAT16.next_up(1e9) == FLOAT16.next_up(math.inf) == math.inf
    assert FLOAT16.next_up(-math.inf) == FLOAT16.next_up(-1e9) == -65504
    assert FLOAT16.next_down(math.inf) == 65504
    assert math.isnan(FLOAT8_E4M3.next_up(448))
    assert FLOAT8_E4M3.next_down(1e9) == 448
    assert math.isnan(FLOAT16.next_up(math.nan))
    assert math.copysign(1, FLOAT16.next_up(-(2.0**-24))) == -1  # -0.0, as IEEE 754 has it


def test_ulp_of_what_is_no_number():
    assert FLOAT16.ulp(math.inf) == FLOAT16.ulp(1e9) == math.inf
    assert math.isnan(FLOAT16.ulp(math.nan))
    assert FLOAT8_E4M3.ulp(1e9) == FLOAT8_E4M3.ulp(448) == 32


# ---- formats of one's own -------------------------------------------------------------------


def test_a_user_defined_format_e3m2():
    e3m2 = FloatFormat("float6_e3m2", 3, 2)
    assert (e3m2.bias, e3m2.max, e3m2.smallest_subnormal) == (3, 14.0, 2.0**-4)
    assert e3m2.total_bits == 6


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits", "has_infinity", "message"),
    [
        (1, 3, True, "exponent_bits=1:"),
        (11, 52, True, "exponent_bits=11:"),
        (5, 0, True, "mantissa_bits=0:"),
        (
            8,
            7,
            False,
            "has_infinity=False:",
        ),
    ],
)
def test_an_impossible_format_is_refused(exponent_bits, mantissa_bits, has_infinity, message):
    with pytest.raises(ValueError, match=message):
        FloatFormat("mine", exponent_bits, mantissa_bits, has_infinity)
