"""tensor_tally.h without torch: with AVX2, which a machine with AVX-512 would not run, and with no vectors at all."""

import ctypes
import platform

import numpy as np
import pytest
import torch

from amplab.kernels.tensor_stats import tensor_stats_reference

WRAPPER = """
#include "tensor_tally.h"
using namespace amplab;
using namespace amplab::statistics;
template <class In>
void tally(const void* data, int64_t numel, const Row& row) {
  for (int64_t i = 0; i < numel; i += kBlock) {
    tally_block(static_cast<const In*>(data) + i, std::min(kBlock, numel - i), row);
  }
}
extern "C" void tally_all(const void* data, int64_t numel, int item, int is_half, int64_t* columns) {
  const Row row(columns, -149, 277);
  row.clear();
  if (item == 8) tally<double>(data, numel, row);
  else if (item == 4) tally<float>(data, numel, row);
  else if (is_half) tally<Half>(data, numel, row);
  else tally<BFloat16>(data, numel, row);
}
extern "C" int has_lanes() {
#if defined(AMPLAB_EXPONENT_LANES)
  return static_cast<int>(kLanes);
#else
  return 0;
#endif
}
"""
X86 = platform.machine() in ("x86_64", "AMD64")
VARIANTS = {"plain": ((), 0), "avx2": (("-mavx2", "-mf16c", "-mpopcnt"), 8)} if X86 else {"plain": ((), 0)}


def runs_avx2():
    try:
        with open("/proc/cpuinfo") as file:
            return " avx2 " in file.read()
    except OSError:
        return False


@pytest.fixture(scope="module", params=VARIANTS)
def header(request, compiled):
    """The header compiled for one kind of CPU, as a library that ctypes can call."""
    flags, lanes = VARIANTS[request.param]
    if request.param == "avx2" and not runs_avx2():
        pytest.skip("no AVX2")
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-ignored-attributes"]
    loaded = compiled(WRAPPER, "-O2", *warnings, "-ffp-contract=off", *flags)
    assert loaded.has_lanes() == lanes
    return loaded


def tallied(header, x):
    columns = np.empty(8 + 277, dtype=np.int64)
    data, size = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel())
    header.tally_all(data, size, x.element_size(), x.dtype == torch.float16, ctypes.c_void_p(columns.ctypes.data))
    return torch.from_numpy(columns)


def assert_is_reference(header, x):
    assert torch.equal(tallied(header, x), tensor_stats_reference([x], -149, 277)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern(header, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for x in (patterns, patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]):
        assert_is_reference(header, x)


@pytest.mark.parametrize("numel", [1, 7, 31, 32, 33, 64, 255, 256, 1000, 8191, 8192, 8193, 30_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_random_numbers_and_borders(header, dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    assert_is_reference(header, x.to(dtype))
    wide = x * torch.exp2(torch.randint(-60, 30, (numel,), generator=generator))
    assert_is_reference(header, wide.to(dtype))
    borders = torch.tensor([2.0**-25, 65520.0, 2.0**-14, 1e-40, np.inf, np.nan, 0.0], dtype=torch.float64)
    wide[torch.randint(0, numel, (7,), generator=generator)] = borders
    assert_is_reference(header, wide.to(dtype))


def test_random_bits(header):
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=torch.Generator().manual_seed(3))
    assert_is_reference(header, bits.to(torch.int32).view(torch.float32))


def test_as_many_of_one_exponent_as_a_block_holds(header):
    """The counters hold 511 registers of bytes; a block of one value fills them the most."""
    for value in (1.0, 2.0**-20, 1.9):
        assert_is_reference(header, torch.full((50_000,), value))
