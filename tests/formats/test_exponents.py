"""Exponent histograms against numpy's frexp, their algebra, and what they cost."""

import math
import time
from collections import Counter

import numpy as np
import pytest
import torch

from amplab.formats import (
    BFLOAT16,
    FLOAT16,
    ExponentHistogram,
    exponent_histogram,
    overflow_fraction,
    underflow_fraction,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def random_patterns(dtype, count=40_000):
    """Every kind of number: random bits, so subnormals, infinities and NaNs occur."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    if dtype is torch.float64:
        return torch.randn(count, dtype=dtype, generator=generator) * torch.exp2(
            torch.randint(-100, 100, (count,), generator=generator).double()
        )
    return bits.to(torch.int32 if dtype is torch.float32 else torch.int16).view(dtype)


def counted_by_numpy(x):
    """Counter of floor(log2|x|) of the finite non-zero elements."""
    values = x.double().numpy().ravel()
    values = values[np.isfinite(values) & (values != 0)]
    return Counter((np.frexp(values)[1] - 1).tolist())


def as_counter(histogram):
    pairs = zip(histogram.exponents.tolist(), histogram.counts.tolist(), strict=True)
    return Counter({exponent: count for exponent, count in pairs if count})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_are_those_of_frexp(dtype):
    x = random_patterns(dtype)
    x[:3] = torch.tensor([0.0, -0.0, 1.0])
    histogram = exponent_histogram(x)
    assert as_counter(histogram) == counted_by_numpy(x)
    assert histogram.zeros == (x == 0).sum().item()
    assert histogram.infs == x.isinf().sum().item()
    assert histogram.nans == x.isnan().sum().item()
    assert histogram.total == x.numel()


def test_every_binade_of_float32_has_its_bin():
    exponents = range(-149, 128)
    x = torch.tensor([2.0**e for e in exponents], dtype=torch.float64).float()
    histogram = exponent_histogram(-x)
    assert histogram.low == -149
    assert histogram.counts.dtype == np.int64
    assert histogram.counts.tolist() == [1] * 277
    assert histogram.span == (-149, 127)


def test_float64_beyond_float32_goes_to_the_nearest_bin():
    x = torch.tensor([1e300, -(2.0**128), 2.0**-150, 5e-324, math.inf], dtype=torch.float64)
    assert as_counter(exponent_histogram(x)) == {127: 2, -149: 2}


def test_a_float64_just_below_a_power_of_two_stays_below():
    assert exponent_histogram(torch.tensor([1 - 2.0**-53], dtype=torch.float64)).span == (-1, -1)


def test_shape_strides_grad_and_emptiness_do_not_matter():
    x = torch.randn(6, 4, requires_grad=True)
    whole = exponent_histogram(x)
    assert exponent_histogram(x.t()) == whole
    assert exponent_histogram(list(x)) == whole
    assert exponent_histogram(x[:, ::2]) + exponent_histogram(x[:, 1::2]) == whole
    assert exponent_histogram(torch.tensor(1.0)).span == (0, 0)
    assert exponent_histogram([]) == exponent_histogram(torch.empty(0))
    assert exponent_histogram(torch.empty(0)).span is None


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_the_imaginary_part_of_a_conjugate_is_counted(dtype):
    x = torch.tensor([1.0 + 3.0j, 2.0 - 0.25j], dtype=dtype)
    assert x.conj().imag.is_neg()
    assert exponent_histogram(x.conj().imag) == exponent_histogram(-x.imag)
    assert exponent_histogram(x.conj().imag).span == (-2, 1)


@pytest.mark.parametrize("power", [-20, 0, 16])
def test_shifting_the_histogram_is_scaling_the_tensor(power):
    x = torch.randn(1000)
    assert as_counter(exponent_histogram(x).shifted(power)) == as_counter(exponent_histogram(x * 2.0**power))


def test_a_scale_between_two_powers_counts_as_the_nearer():
    histogram = exponent_histogram(torch.ones(1))
    assert histogram.shifted(math.log2(1000)) == histogram.shifted(10)
    with pytest.raises(ValueError, match="log2_scale=-inf"):
        histogram.shifted(-math.inf)


def test_histograms_of_different_bins_add_up():
    x, y = torch.randn(500), torch.randn(300) * 1e-3
    together = exponent_histogram(x).shifted(-7) + exponent_histogram(y)
    assert as_counter(together) == as_counter(exponent_histogram([x * 2.0**-7, y]))
    assert together.total == 800


def test_specials_add_up():
    part = ExponentHistogram(np.array([1, 2]), low=0, zeros=3, infs=4, nans=5, total=15)
    both = part + part
    assert (both.zeros, both.infs, both.nans, both.total, both.finite_nonzero) == (6, 8, 10, 30, 6)


def test_a_histogram_is_a_value():
    histogram = exponent_histogram(torch.ones(3))
    assert len({histogram, exponent_histogram(torch.full((3,), 1.5)), histogram.shifted(1)}) == 2
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1


def test_adding_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        exponent_histogram(torch.ones(1)) + 1


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("power", [-16, 0, 12])
def test_shares_agree_with_the_exact_ones(fmt, power):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5000, generator=generator) * 2.0 ** torch.randint(-40, 30, (5000,), generator=generator)
    edge = (x.abs() * 2.0**power >= 65520) & (x.abs() * 2.0**power < 65536)
    x = x[~edge]  # a histogram cannot see the last half spacing of the top binade
    moved = exponent_histogram(x).shifted(power)
    assert moved.underflow_fraction(fmt) == underflow_fraction(x, fmt, scale=2.0**power)
    assert moved.overflow_fraction(fmt) == overflow_fraction(x, fmt, scale=2.0**power)


def test_shares_of_nothing_are_zero():
    empty = exponent_histogram(torch.zeros(4))
    assert empty.underflow_fraction(FLOAT16) == empty.overflow_fraction(FLOAT16) == 0.0


def test_integers_and_sparse_tensors_are_refused():
    with pytest.raises(TypeError, match=r"torch.int64"):
        exponent_histogram(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="dense"):
        exponent_histogram(torch.eye(2).to_sparse())


def test_a_million_elements_cost_less_than_a_sort_of_them():
    x = torch.randn(1_000_000)

    def fastest(call):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    assert fastest(lambda: exponent_histogram(x)) < fastest(x.sort) / 2
