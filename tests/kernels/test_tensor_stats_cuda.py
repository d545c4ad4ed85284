"""tensor_stats.cu and update_scale.cu without a GPU: they compile, fit their registers, and read 16 bytes at a time."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from amplab.kernels.builder import recipe

FOLDER = recipe.SOURCES
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "-arch=sm_90", "-Xptxas", "-v"]
ENTRIES = {"tensor_stats": 4 + 1, "update_scale": 2}  # a kernel for each dtype; one that clears the table


@pytest.fixture(scope="module", params=ENTRIES)
def compiled(request, tmp_path_factory):
    """A name, the assembler's report and the PTX of its kernels, for Hopper."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    folder = tmp_path_factory.mktemp("cuda")
    source = FOLDER / f"{request.param}.cu"
    include = [f"-I{Path(torch.__file__).parent / 'include'}", *recipe.INCLUDES]
    keep = ["--keep", "--keep-dir", str(folder)]
    command = [nvcc, *FLAGS, *include, *keep, "-cubin", str(source), "-o", str(folder / "a.cubin")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return request.param, result.stderr, (folder / f"{request.param}.ptx").read_text()


def test_kernels_keep_to_64_registers_and_do_not_spill(compiled):
    name, resources, _ = compiled
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", resources)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", resources)]
    assert len(registers) == ENTRIES[name]
    assert max(registers) <= 64
    assert max(spills) == 0


@pytest.mark.parametrize("compiled", ["tensor_stats"], indirect=True)  # the other reads four numbers
def test_tensors_are_read_16_bytes_at_a_time(compiled):
    _, _, ptx = compiled
    kernels = [
        each for each in re.split(r"^(?:\.visible )?\.entry", ptx, flags=re.MULTILINE)[1:] if "stats_kernel" in each
    ]
    assert len(kernels) == 4
    for kernel in kernels:
        assert re.search(r"ld\.global\S*\.v[24]\.", kernel), kernel[:200]
        assert "atom.shared" in kernel  # the bins
        assert "atom.global" in kernel or "red.global" in kernel


def test_the_product_is_not_fused(compiled):
    _, _, ptx = compiled
    assert not re.search(r"\bfma\.rn\.f(32|64)\b", ptx)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("low", "bins"), [(-47, 64), (-149, 277), (0, 1), (-2000, 4000)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_statistics_are_the_references(built, dtype, low, bins):
    from amplab.kernels.tensor_stats import tensor_stats_reference

    assert "CUDA" in built.what, built
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, 2.0**-25, 65520.0, float("inf"), float("nan"), 1e-40], dtype=torch.float64)
    tensors = [torch.randn(numel, generator=generator).to(dtype) for numel in (1, 0, 8, 16385, 400_001)]
    tensors += [special.to(dtype), tensors[4][1:], torch.randn(30, 40, generator=generator).to(dtype)[:, ::3]]
    tensors += [torch.ones(3, dtype=dtype)[:, None].expand(3, 50)] * 2000
    table = torch.ops.amplab.tensor_stats.default([x.cuda() for x in tensors[:-2000]], low, bins)
    assert torch.equal(table.cpu(), tensor_stats_reference(tensors[:-2000], low, bins))
    many = torch.ops.amplab.tensor_stats.default([x.to("cuda") for x in tensors], low, bins)
    assert torch.equal(many.cpu()[-1], tensor_stats_reference(tensors[-1:], low, bins)[0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_is_the_references(built, dtype):
    from amplab.kernels.update_scale import update_scale__reference

    assert "CUDA" in built.what, built
    states = []
    for device, function in (("cuda", torch.ops.amplab.update_scale_.default), ("cpu", update_scale__reference)):
        scale = torch.tensor(65536.0, dtype=dtype, device=device)
        growth, patience = (torch.full((), value, dtype=torch.int32, device=device) for value in (0, 2))
        for step in range(200):
            found_inf = torch.full((1,), float(step % 7 in (3, 4)), device=device)
            function(scale, growth, patience, found_inf, 1.7, 1 / 3, 2, 2, 0.5, 2.0**20)
        states.append((scale.item(), growth.item(), patience.item()))
    assert states[0] == states[1]
