"""unscale.h without torch and without vector instructions: what a CPU without AVX2 runs, and the code CUDA shares."""

import ctypes

import numpy as np
import pytest
import torch

WRAPPER = """
#include "unscale.h"
using namespace amplab;
extern "C" void widen_all(const uint16_t* x, float* y, int64_t n, int is_half) {
  for (int64_t i = 0; i < n; ++i) y[i] = is_half ? widen(Half{x[i]}) : widen(BFloat16{x[i]});
}
extern "C" void narrow_all(const float* x, uint16_t* y, int64_t n, int is_half) {
  for (int64_t i = 0; i < n; ++i) {
    Half h; BFloat16 b;
    narrow(x[i], h); narrow(x[i], b);
    y[i] = is_half ? h.bits : b.bits;
  }
}
extern "C" int span_of(const uint32_t* ends, int count, uint32_t position) { return find_span(ends, count, position); }
extern "C" int accumulate(float x, float* y, float inv_scale) {
  return unscale_element<Write::accumulate>(x, *y, inv_scale);
}
"""


@pytest.fixture(scope="module")
def header(compiled):
    """The header compiled by itself."""
    return compiled(WRAPPER, "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_widening_every_pattern_is_torchs(header, dtype):
    patterns = np.arange(2**16, dtype=np.uint16)
    widened = np.empty(2**16, dtype=np.float32)
    header.widen_all(pointer(patterns), pointer(widened), ctypes.c_int64(2**16), dtype == torch.float16)
    expected = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().numpy()
    assert np.array_equal(widened, expected, equal_nan=True)
    assert np.array_equal(np.signbit(widened), np.signbit(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_is_torchs_at_every_border(header, dtype):
    """Every value of the 16-bit type, every midpoint between neighbours, and the floats on both sides of each."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = patterns.double()[patterns.isfinite()].unique()
    beyond = torch.tensor([65519.99, 65520.0, 3.4e38, 3.3961775e38, np.inf], dtype=torch.float64)
    border = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, beyond, -beyond]).float()
    upper, lower = (torch.nextafter(border, torch.tensor(side)) for side in (np.inf, -np.inf))
    x = torch.cat([border, upper, lower, torch.tensor([np.nan])])
    narrowed = np.empty(len(x), dtype=np.uint16)
    header.narrow_all(pointer(x.numpy()), pointer(narrowed), ctypes.c_int64(len(x)), dtype == torch.float16)
    expected = x.to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(narrowed[:-1], expected[:-1])
    assert torch.from_numpy(narrowed[-1:].view(np.int16)).view(dtype).isnan().all()


def test_a_position_finds_its_span(header):
    sizes = np.random.default_rng(0).integers(1, 9, 50)
    ends = np.cumsum(sizes).astype(np.uint32)
    found = [header.span_of(pointer(ends), len(ends), position) for position in range(int(ends[-1]))]
    assert found == np.repeat(np.arange(50), sizes).tolist()


@pytest.mark.parametrize(("before", "x", "found"), [(3e38, 3e38, 1), (np.inf, 1.0, 0), (1.0, np.nan, 1), (1.0, 1.0, 0)])
def test_a_sum_is_blamed_only_for_what_it_makes_infinite(header, before, x, found):
    output = ctypes.c_float(before)
    assert header.accumulate(ctypes.c_float(x), ctypes.byref(output), ctypes.c_float(1.0)) == found
