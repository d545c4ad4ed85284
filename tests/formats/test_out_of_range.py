"""Underflow and overflow shares against torch's casts, element by element."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.formats import (
    FLOAT8_E4M3,
    FLOAT16,
    FORMATS,
    TF32,
    overflow_fraction,
    underflow_fraction,
)

WITH_DTYPE = [fmt for fmt in FORMATS.values() if fmt.torch_dtype is not None]


def wide_tensor():
    """Magnitudes from 2^-40 to 2^40, with zeros, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, generator=generator) * 2.0 ** torch.randint(-40, 40, (20_000,), generator=generator)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    edges = torch.tensor([2.0**-25, 2.0**-24, 65519.0, 65520.0, 464.0, 465.0, 61440.0, 61439.0])
    return torch.cat([x, special, edges, -edges])


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-16])
@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_shares_are_those_of_torchs_cast(fmt, scale):
    x = wide_tensor()
    counted = x.isfinite() & (x != 0)
    cast = (x * scale).to(fmt.torch_dtype).float()
    underflowed = (cast == 0)[counted].double().mean().item()
    overflows = ~cast.isfinite() if fmt.has_infinity else (x * scale).abs() > 464  # 448 or 480
    overflowed = overflows[counted].double().mean().item()
    assert underflow_fraction(x, fmt, scale=scale) == pytest.approx(underflowed, abs=1e-12)
    assert overflow_fraction(x, fmt, scale=scale) == pytest.approx(overflowed, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_counts_alike(dtype):
    x = torch.tensor([2.0**-10, 2.0**-9, 500.0, 1.0]).to(dtype)
    assert underflow_fraction(x, FLOAT8_E4M3) == 0.25
    assert overflow_fraction(x, FLOAT8_E4M3) == 0.25


def test_a_share_of_nothing_is_zero():
    for x in (torch.zeros(3), torch.tensor([math.inf, math.nan]), torch.empty(0)):
        assert underflow_fraction(x, FLOAT16) == overflow_fraction(x, FLOAT16) == 0.0


def test_the_scale_is_applied_beyond_the_range_of_the_tensors_own_dtype():
    assert overflow_fraction(torch.tensor([60000.0], dtype=torch.float16), TF32, scale=2.0**16) == 0.0


@given(st.floats(2.0**-30, 2.0**30), st.integers(-20, 20))
def test_scaling_the_tensor_is_scaling_by_the_argument(x, power):
    tensor = torch.tensor([x], dtype=torch.float64)
    scaled = tensor * 2.0**power
    assert underflow_fraction(tensor, FLOAT16, scale=2.0**power) == underflow_fraction(scaled, FLOAT16)
    assert overflow_fraction(tensor, FLOAT16, scale=2.0**power) == overflow_fraction(scaled, FLOAT16)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("share", [underflow_fraction, overflow_fraction])
def test_a_nonsense_scale_is_refused(share, scale):
    with pytest.raises(ValueError, match=r"scale=.*> 0"):
        share(torch.ones(1), FLOAT16, scale=scale)


@pytest.mark.parametrize("share", [underflow_fraction, overflow_fraction])
def test_an_integer_tensor_is_refused(share):
    with pytest.raises(TypeError, match=r"torch.int64"):
        share(torch.ones(1, dtype=torch.int64), FLOAT16)
