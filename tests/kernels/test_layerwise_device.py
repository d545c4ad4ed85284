"""layerwise_device.h without a GPU: its measuring, adding up and stepping, block by block on the host.

The blocks are run one after the other with one thread each, over a table of many tensors; which slots they write and
who adds them up is what a device would do. The result is held against the references.
"""

import ctypes
import math
import shutil
import subprocess

import pytest
import torch

from amplab.kernels import recipe
from amplab.kernels.layerwise_steps import multi_tensor_lamb__reference, multi_tensor_novograd__reference

WRAPPER = """
#include <memory>
#include <vector>
#include "layerwise_device.h"
using namespace amplab;

template <int kPointers>
void fill(LaunchTable<kPointers>& table, void* const* memory, const int64_t* numels, int tensors) {
  table = {};
  uint32_t units = 0;
  for (int t = 0; t < tensors; ++t) {
    for (int k = 0; k < kPointers; ++k) table.pointers[k][t] = memory[t * kPointers + k];
    units += static_cast<uint32_t>((numels[t] + kUnit - 1) / kUnit);
    table.ends[t] = units;
    table.tails[t] = static_cast<uint16_t>((numels[t] - 1) % kUnit);
    table.places[t] = static_cast<uint16_t>(t);
  }
  table.count = tensors;
}

// Returns how many slots were written twice, or not once.
template <int kStates, class Settings>
int run(const Settings& settings, const Stored* stored, void* const* memory, const int64_t* numels, int tensors,
        float* norms, const float* factor, uint32_t blocks) {
  using Places = StepPlaces<kStates>;
  auto table = std::make_unique<LaunchTable<Places::kPointers>>();
  fill(*table, memory, numels, tensors);
  StepArguments<Settings, kStates> arguments{settings, factor, nullptr, 1.0f, {}};
  for (int k = 0; k < Places::kPointers; ++k) arguments.stored[k] = stored[k];
  if (blocks > table->ends[tensors - 1]) blocks = table->ends[tensors - 1];
  std::vector<LayerSums> slots(blocks + tensors), totals(tensors);
  std::vector<int> written(blocks + tensors, 0);
  const LayerScratch scratch{slots.data(), totals.data(), norms};
  const float scale = factor_of<float>(arguments);
  const auto pointers_of = [&](int tensor, void** mine) {
    for (int k = 0; k < Places::kPointers; ++k) mine[k] = table->pointers[k][tensor];
  };
  for (uint32_t block = 0; block < blocks; ++block) {
    for_each_piece(*table, block, blocks, [&](const Piece& piece) {
      void* mine[Places::kPointers];
      pointers_of(piece.tensor, mine);
      LayerSums sums{};
      for (int64_t i = piece.first; i < piece.first + piece.numel; ++i) {
        measure_element(settings, step_of(mine[Places::kStep]), scale, arguments, mine, [&](int) { return i; }, sums);
      }
      slots[block + piece.tensor] = sums;
      ++written[block + piece.tensor];
    });
  }
  int wrong = 0;
  for (int tensor = 0; tensor < tensors; ++tensor) {
    uint32_t first, last;
    slots_of(*table, tensor, blocks, first, last);
    for (uint32_t slot = first; slot <= last; ++slot) {
      add_sums(settings, totals[tensor], slots[slot]);
      wrong += written[slot] != 1;
      written[slot] = -1;
    }
  }
  for (const int times : written) wrong += times > 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    for_each_piece(*table, block, blocks, [&](const Piece& piece) {
      void* mine[Places::kPointers];
      pointers_of(piece.tensor, mine);
      const auto rule = layer_rule<float>(settings, step_of(mine[Places::kStep]), scratch, table->place(piece.tensor));
      for (int64_t i = piece.first; i < piece.first + piece.numel; ++i) {
        step_some<1>(rule, scale, arguments, mine, [&](int) { return i; });
      }
    });
  }
  return wrong;
}

extern "C" int lamb(const double* n, const uint8_t* flags, const uint8_t* stored, void* const* memory,
                    const int64_t* numels, int tensors, float* norms, const float* factor, int blocks) {
  const LambSettings settings{{n[0], n[1], n[2], n[3], n[4], n[5]}, n[6], flags[0] != 0, flags[1] != 0, flags[2] != 0};
  return run<2>(settings, reinterpret_cast<const Stored*>(stored), memory, numels, tensors, norms, factor, blocks);
}

extern "C" int novograd(const double* n, const uint8_t* flags, const uint8_t* stored, void* const* memory,
                        const int64_t* numels, int tensors, float* norms, const float* factor, int blocks) {
  const NovogradSettings settings{{n[0], n[1], n[2], n[3], n[4], n[5]}, flags[0] != 0, flags[1] != 0, flags[2] != 0};
  return run<1>(settings, reinterpret_cast<const Stored*>(stored), memory, numels, tensors, norms, factor, blocks);
}
"""

STORED = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, None: 4}
MOMENTS = (0.01, 0.9, 0.99, 0.1, 1e-6, 0.1)
SIZES = [1, 5, 1024, 1025, 3000, 7, 20_000, 2, 2048]


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The header compiled by itself, as a library that ctypes can call."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    folder = tmp_path_factory.mktemp("header")
    source, library = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(WRAPPER)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    include = f"-I{recipe.current_recipe().headers[0].parent}"
    subprocess.run([compiler, *flags, include, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def lists(states, *, grad, copy, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tensors(dtype, positive=False):
        drawn = [torch.randn(size, generator=generator) for size in SIZES]
        return [(each.abs() if positive else each).to(dtype) for each in drawn]

    kept = [tensors(torch.float32, positive=state == 1) for state in range(states)]
    copies = tensors(copy) if copy is not None else []
    return [tensors(torch.float32), tensors(grad), *kept], [torch.tensor(float(k)) for k in range(len(SIZES))], copies


def on_host(function, numbers, flags, leading, steps, copies, norms, dtypes, blocks):
    """Run the header's three loops over the lists."""
    params, grads, *states = leading
    lines = zip(grads, params, *states, copies or [None] * len(SIZES), steps, strict=True)
    pointers = [0 if each is None else each.data_ptr() for line in lines for each in line]
    wrong = function(
        (ctypes.c_double * len(numbers))(*numbers),
        (ctypes.c_uint8 * len(flags))(*flags),
        (ctypes.c_uint8 * len(dtypes))(*(STORED[dtype] for dtype in dtypes)),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(SIZES))(*SIZES),
        len(SIZES),
        ctypes.c_void_p(norms.data_ptr()),
        (ctypes.c_float * 1)(0.7),
        blocks,
    )
    assert wrong == 0, f"{wrong} slots were written more than once or never added up"


def agree(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-7 if a.dtype == torch.float32 else 1e-2, atol=1e-7)


BLOCKS = pytest.mark.parametrize("blocks", [1, 2, 3, 7, 16, 500])
DTYPES = pytest.mark.parametrize(("grad", "copy"), [(torch.float32, None), (torch.float16, torch.bfloat16)])


@BLOCKS
@DTYPES
@pytest.mark.parametrize(
    ("limit", "flags"), [(math.inf, (True, True, True)), (2.0, (False, False, True)), (math.inf, (True, True, False))]
)
def test_lamb(header, blocks, grad, copy, limit, flags):
    numbers = (*MOMENTS, limit)
    left = []
    for serves in ("header", "reference"):
        leading, steps, copies = lists(2, grad=grad, copy=copy)
        if serves == "header":
            dtypes = (grad, torch.float32, torch.float32, torch.float32, copy, None)
            on_host(header.lamb, numbers, flags, leading, steps, copies, torch.zeros(1), dtypes, blocks)
        else:
            factor = torch.tensor(0.7)
            multi_tensor_lamb__reference(*leading, steps, copies, factor, None, False, *numbers, *flags)
        left.append([each for tensors in (leading[0], *leading[2:], copies) for each in tensors])
    agree(*left)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("flags", [(False, False, True), (True, False, True), (False, True, False)])
def test_novograd(header, blocks, grad, copy, flags):
    left = []
    for serves in ("header", "reference"):
        leading, steps, copies = lists(1, grad=grad, copy=copy)
        norms = torch.arange(len(SIZES), dtype=torch.float32) - 1.0
        if serves == "header":
            dtypes = (grad, torch.float32, torch.float32, copy, None)
            on_host(header.novograd, MOMENTS, flags, leading, steps, copies, norms, dtypes, blocks)
        else:
            numbers, each_norm = (*MOMENTS, *flags), list(norms)
            factor = torch.tensor(0.7)
            multi_tensor_novograd__reference(*leading, steps, copies, factor, None, False, *numbers, each_norm)
        left.append([each for tensors in (leading[0], *leading[2:], copies) for each in tensors])
    agree(*left)
