"""A binary floating-point format: its bits, its range, its rounding.

A pattern is sign | exponent | mantissa, the sign in the highest bit. With bias = 2^(E-1) - 1,

    exponent field 0:      (-1)^sign * 2^(1 - bias)     * 0.mantissa     zero and subnormals
    any other:             (-1)^sign * 2^(field - bias) * 1.mantissa     normals
    exponent all ones:     infinity (mantissa 0) or NaN, if the format has an infinity;
                           otherwise only the pattern of all ones is NaN.

`mantissa_bits` counts the stored bits, without the implicit one. `known_formats` lists the formats in use;
`out_of_range` measures which share of a tensor is out of range.

Values beyond the range round to infinity. In a format without infinity they saturate at the largest number, as in
the float8_e4m3fn cast of torch 2.13 (earlier versions of torch return NaN).

Reference: IEEE 754-2019, section 3.4; Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from amplab.formats.kept_property import kept_property

__all__ = ["BitFields", "FloatFormat", "Kind"]

Kind = Literal["zero", "subnormal", "normal", "infinity", "nan"]

FLOAT64_MANTISSA_BITS = 52
FLOAT64_BIAS = 1023
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class BitFields(NamedTuple):
    """The three fields of a pattern as unsigned integers, with the biased exponent."""

    sign: int
    exponent: int
    mantissa: int


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format whose values are all float32 values.

    >>> half = FloatFormat("float16", exponent_bits=5, mantissa_bits=10)
    >>> half.max, half.epsilon, half.smallest_subnormal == 2**-24
    (65504.0, 0.0009765625, True)
    >>> hex(half.bits(1.0)), half.value(0x7BFF), half.next_up(2048.0)
    ('0x3c00', 65504.0, 2050.0)

    Args:
        name: the name of the format, e.g. ``"float16"``.
        exponent_bits: 2 to 8.
        mantissa_bits: stored bits, 1 to 23.
        has_infinity: whether the largest exponent is reserved for infinity and NaN, as in IEEE 754.
        torch_dtype: the torch dtype with these bits, or None if there is none.

    Raises:
        ValueError: if a width is out of range, or the values would not fit in float32.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    torch_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a format that does not fit in float32."""
        if not 2 <= self.exponent_bits <= 8:
            raise ValueError(
                f"exponent_bits={self.exponent_bits}: expected 2 to 8; wider formats do not fit in float32."
            )
        if not 1 <= self.mantissa_bits <= 23:
            raise ValueError(
                f"mantissa_bits={self.mantissa_bits}: expected 1 to 23 stored bits; "
                "do not count the sign or the implicit leading one."
            )
        if self.max > FLOAT32_MAX:
            raise ValueError(
                f"exponent_bits={self.exponent_bits}, has_infinity=False: the largest value would "
                "exceed the float32 range; use has_infinity=True or at most 7 exponent bits."
            )

    # ---- the range --------------------------------------------------------------------------

    @property
    def bias(self) -> int:
        """The exponent bias, 2^(E-1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def total_bits(self) -> int:
        """Bits of a pattern, including the sign (19 for tf32, which is stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share its spacing."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias if self.has_infinity else self.bias + 1

    @kept_property
    def max(self) -> float:
        """The largest finite number."""
        return self.value(self._largest_finite_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a leading one: 2^min_exponent."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; values up to half of it round to zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number: 2^-mantissa_bits."""
        return 2.0**-self.mantissa_bits

    # ---- patterns and values ----------------------------------------------------------------

    def fields(self, bits: int) -> BitFields:
        """Split a pattern into sign, (biased) exponent and mantissa.

        >>> FloatFormat("float16", 5, 10).fields(0xBC01)
        BitFields(sign=1, exponent=15, mantissa=1)

        Raises:
            ValueError: if `bits` is not a pattern of this format.
        """
        if not 0 <= bits < 2**self.total_bits:
            raise ValueError(
                f"bits={bits:#x}: expected a pattern of {self.name}, from 0x0 to "
                f"{2**self.total_bits - 1:#x}; mask off the higher bits."
            )
        return BitFields(
            sign=bits >> (self.total_bits - 1),
            exponent=(bits >> self.mantissa_bits) & (2**self.exponent_bits - 1),
            mantissa=bits & (2**self.mantissa_bits - 1),
        )

    def kind(self, bits: int) -> Kind:
        """Return the kind of a pattern: zero, subnormal, normal, infinity or nan."""
        _, exponent, mantissa = self.fields(bits)
        if exponent == 0:
            return "subnormal" if mantissa else "zero"
        magnitude = bits & (2 ** (self.total_bits - 1) - 1)
        if magnitude <= self._largest_finite_bits:
            return "normal"
        return "infinity" if self.has_infinity and mantissa == 0 else "nan"

    def value(self, bits: int) -> float:
        """Return the exact value of a pattern.

        Raises:
            ValueError: if `bits` is not a pattern of this format.
        """
        sign, exponent, mantissa = self.fields(bits)
        kind = self.kind(bits)
        if kind == "nan":
            return math.nan
        if kind == "infinity":
            magnitude = math.inf
        else:
            leading_one = 2**self.mantissa_bits if exponent else 0
            power = max(exponent, 1) - self.bias - self.mantissa_bits
            magnitude = math.ldexp(leading_one + mantissa, power)
        return -magnitude if sign else magnitude

    def bits(self, value: float | Fraction) -> int:
        """Return the pattern of the number nearest to `value`, ties to the even pattern.

        A value beyond the range becomes infinity, or the largest number if the format has no infinity.
        Every NaN becomes the quiet NaN; the sign of a zero is kept. A fraction is rounded once, as a float is.

        >>> half = FloatFormat("float16", 5, 10)
        >>> half.value(half.bits(2049)), half.value(half.bits(2049 + Fraction(1, 10**30)))
        (2048.0, 2050.0)
        """
        if isinstance(value, Fraction):
            is_negative, pattern = value < 0, self._magnitude_bits(abs(value))
        elif math.isnan(value):
            return self._nan_bits
        else:
            is_negative = math.copysign(1.0, value) < 0
            pattern = self._overflow_bits if math.isinf(value) else self._magnitude_bits(abs(value))
        return is_negative << (self.total_bits - 1) | pattern

    def _magnitude_bits(self, magnitude: float | Fraction) -> int:
        """Return the pattern of the number nearest to a finite number >= 0."""
        exponent = self._exponent_of(magnitude)
        last_bit = exponent - self.mantissa_bits
        if isinstance(magnitude, Fraction):
            steps = round(magnitude / Fraction(2) ** last_bit)  # half to even
        else:
            steps = round(math.ldexp(magnitude, -last_bit))  # half to even
        # The leading one in `steps` carries into the exponent field, and so does a mantissa that
        # rounds up to the next power of two.
        pattern = ((exponent - self.min_exponent) << self.mantissa_bits) + steps
        return pattern if pattern <= self._largest_finite_bits else self._overflow_bits

    @property
    def _largest_finite_bits(self) -> int:
        nan_patterns = 1 << self.mantissa_bits if self.has_infinity else 1
        return (1 << (self.total_bits - 1)) - 1 - nan_patterns

    @property
    def _overflow_bits(self) -> int:
        return self._largest_finite_bits + (1 if self.has_infinity else 0)

    @property
    def _nan_bits(self) -> int:
        quiet_bit = 2 ** (self.mantissa_bits - 1) if self.has_infinity else 0
        return self._largest_finite_bits + 1 + quiet_bit

    def _exponent_of(self, value: float | Fraction) -> int:
        """Return floor(log2|value|), at least the exponent of the subnormals; `value` is finite."""
        if not value:
            return self.min_exponent
        return max(_floor_log2(value) if isinstance(value, Fraction) else math.frexp(value)[1] - 1, self.min_exponent)

    # ---- neighbors --------------------------------------------------------------------------

    def ulp(self, x: float | Fraction) -> float:
        """Return the spacing of the format at `x`: the value of the last bit of `x` after rounding.

        The spacing is inf if `x` rounds to infinity, and nan for NaN, as in `math.ulp`.
        """
        rounded = abs(self.value(self.bits(x)))
        if not math.isfinite(rounded):
            return rounded
        return 2.0 ** (self._exponent_of(rounded) - self.mantissa_bits)

    def next_up(self, x: float) -> float:
        """Return the least number of the format that is greater than `x`.

        For the largest finite number and above, the result is inf, or nan if the format has no infinity.
        `x` need not be a number of the format.
        """
        if math.isnan(x):
            return x
        if x < -self.max:
            return -self.max
        if x >= self.max:
            return math.inf if self.has_infinity else math.nan
        nearest_bits = self.bits(x)
        nearest = self.value(nearest_bits)
        if nearest > x:
            return nearest
        if nearest == 0:
            return self.smallest_subnormal
        return self.value(nearest_bits + 1 if nearest > 0 else nearest_bits - 1)

    def next_down(self, x: float) -> float:
        """Return the greatest number of the format that is less than `x` (see `next_up`)."""
        return -self.next_up(-x)

    # ---- tensors ----------------------------------------------------------------------------

    def round(self, tensor: Tensor) -> Tensor:
        """Round every element to the nearest number of the format, ties to even.

        Rounds once: a float64 input is not rounded to float32 first. Overflow gives infinity, or the largest number if
        the format has no infinity. Not differentiable.

        >>> FloatFormat("float16", 5, 10).round(torch.tensor([2049.0, 65519.0, 65520.0]))
        tensor([ 2048., 65504.,    inf])

        Args:
            tensor: any floating dtype, any shape, any device with float64.

        Returns:
            The same shape; float64 for a float64 input, else float32 (which holds every value).

        Raises:
            TypeError: if the tensor is not floating-point.

        Sync: none
        """
        if not tensor.is_floating_point():
            raise TypeError(
                f"round({tensor.dtype}): expected a floating-point tensor; convert it with tensor.float() first."
            )
        x = tensor.detach().resolve_neg().double()  # a negated view has other bits
        # Powers of two from bits are exact; torch.pow and torch.ldexp may not be.
        exponent = ((x.view(torch.int64) >> FLOAT64_MANTISSA_BITS) & 0x7FF) - FLOAT64_BIAS
        last_bit = exponent.clamp(min=self.min_exponent) - self.mantissa_bits
        spacing = ((last_bit + FLOAT64_BIAS) << FLOAT64_MANTISSA_BITS).view(torch.float64)
        rounded = torch.round(x / spacing) * spacing
        overflow = math.inf if self.has_infinity else self.max
        overflowed = torch.copysign(torch.full_like(rounded, overflow), rounded)
        rounded = torch.where(rounded.abs() > self.max, overflowed, rounded)
        return rounded if tensor.dtype is torch.float64 else rounded.float()


def _floor_log2(value: Fraction) -> int:
    """Return floor(log2|value|)."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()  # or one more than it
    return exponent if abs(value) >= Fraction(2) ** exponent else exponent - 1
