"""Norms whose squares leave float32: they are added up in floats only where that is safe."""

import math

import pytest
import torch

from amplab.kernels import unscaled_norm


def norm_of(tensor, inverse=1.0):
    found, norm = torch.zeros(()), torch.zeros(())
    unscaled_norm([tensor], found, torch.tensor(inverse), norm=norm)
    return norm.item(), found.item()


@pytest.mark.parametrize("numel", [255, 256, 4096, 100_001])
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-13, 1e-3, 1.0, 1e18, 1e25, 1e30])
def test_norms_of_every_size(built, numel, size):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    norm, found = norm_of(values.float())
    assert norm == pytest.approx(values.float().double().norm().item(), rel=1e-6)
    assert found == 0.0


def test_one_large_number_among_tiny_ones_and_a_scale_that_makes_them_small(built):
    values = torch.full((8192,), 1e-25)
    values[5000] = 3e20
    assert norm_of(values)[0] == pytest.approx(3e20, rel=1e-6)
    assert norm_of(torch.full((8192,), 2.0**40), 2.0**-80)[0] == pytest.approx(2.0**-40 * math.sqrt(8192), rel=1e-6)
    assert norm_of(torch.zeros(8192)) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 255, 256, 8191, 8192, 8199])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_found_wherever_it_is(built, dtype, place, bad):
    values = torch.ones(8200, dtype=dtype)
    assert norm_of(values)[1] == 0.0
    values[place] = bad
    norm, found = norm_of(values)
    assert found == 1.0
    assert not math.isfinite(norm)
