"""unscale.cu without a GPU: that it compiles, fits its registers, and moves 16 bytes at a time."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from amplab.kernels import recipe

SOURCE = Path(recipe.__file__).with_name("unscale.cu")
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "-arch=sm_90", "-Xptxas", "-v"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The assembler's report and the PTX of the kernels, for Hopper."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    folder = tmp_path_factory.mktemp("cuda")
    include = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{SOURCE.parent}"]
    result = subprocess.run(
        [
            nvcc,
            *FLAGS,
            *include,
            "--keep",
            "--keep-dir",
            str(folder),
            "-cubin",
            str(SOURCE),
            "-o",
            str(folder / "a.cubin"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr, (folder / "unscale.ptx").read_text()


def test_there_is_a_kernel_for_every_pair_of_dtypes_and_both_ways_to_write(compiled):
    _, ptx = compiled
    assert len(re.findall(r"^\.visible \.entry|^\.entry", ptx, re.MULTILINE)) == 2 * 4 * 4


def test_kernels_keep_to_64_registers_and_hardly_spill(compiled):
    resources, _ = compiled
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", resources)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", resources)]
    assert len(registers) == 2 * 4 * 4
    assert max(registers) <= 64
    assert max(spills) <= 32


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled):
    _, ptx = compiled
    kernels = re.split(r"^(?:\.visible )?\.entry", ptx, flags=re.MULTILINE)[1:]
    for kernel in kernels:
        assert re.search(r"ld\.global\S*\.v[24]\.", kernel), kernel[:200]
        assert re.search(r"st\.global\S*\.v[24]\.", kernel), kernel[:200]


def test_the_product_and_the_sum_are_not_fused(compiled):
    """A fused multiply-add rounds once where the reference rounds twice."""
    _, ptx = compiled
    assert not re.search(r"\bfma\.rn\.f(32|64)\b", ptx)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["multi_tensor_unscale_copy", "multi_tensor_unscale_add"])
@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_kernel_has_the_references_bits(built, name, dtype, output):
    from amplab.kernels import unscale

    assert "CUDA" in built.what, built
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(numel, generator=generator).to(dtype) for numel in (1, 0, 8, 16385, 40_000)]
    inputs.append(torch.randn(30, 40, generator=generator).to(dtype)[:, ::3])
    before = [torch.randn(x.shape, generator=generator).to(output) for x in inputs]
    results = []
    for device, function in (
        ("cuda", getattr(torch.ops.amplab, name).default),
        ("cpu", getattr(unscale, f"{name}_reference")),
    ):
        outputs = [y.to(device, copy=True) for y in before]
        found_inf = torch.zeros(1, device=device)
        function([x.to(device) for x in inputs], outputs, found_inf, torch.full((1,), 1 / 3, device=device))
        results.append([y.cpu() for y in (*outputs, found_inf)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
