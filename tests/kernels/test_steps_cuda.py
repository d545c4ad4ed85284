"""steps.cu without a GPU: that it compiles, fits its registers, moves 16 bytes at a time and fuses no operations."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from amplab.kernels.builder import recipe

SOURCE = recipe.SOURCES / "steps.cu"
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "--fmad=false"]
RULES = ("PlainSgd", "MomentumSgd", "Adam")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The assembler's report and the PTX of the kernels, for Hopper."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    folder = tmp_path_factory.mktemp("cuda")
    include = [f"-I{Path(torch.__file__).parent / 'include'}", *recipe.INCLUDES]
    kept = ["--keep", "--keep-dir", str(folder), "-cubin", str(SOURCE), "-o", str(folder / "a.cubin")]
    command = [nvcc, *FLAGS, "-arch=sm_90", "-Xptxas", "-v", *include, *kept]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr, (folder / "steps.ptx").read_text()


def kernels_of(ptx, name):
    """The PTX of every kernel of a name."""
    entries = re.split(r"^(?:\.visible )?\.entry", ptx, flags=re.MULTILINE)[1:]
    return [entry for entry in entries if re.search(rf"\d{name}I", entry.splitlines()[0])]


def test_there_is_a_kernel_for_every_rule_in_floats_and_doubles(compiled):
    for name in ("step_kernel", "strided_step_kernel"):
        heads = [kernel.splitlines()[0] for kernel in kernels_of(compiled[1], name)]
        assert sorted(rule for head in heads for rule in RULES if f"{rule}E" in head) == sorted(RULES * 2)


def test_kernels_keep_to_64_registers_and_hardly_spill(compiled):
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled[0])]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", compiled[0])]
    assert len(registers) == 2 * 2 * len(RULES) + 1
    assert max(registers) <= 64
    assert max(spills) <= 16


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled):
    for kernel in kernels_of(compiled[1], "step_kernel"):
        assert re.search(r"ld\.global\S*\.v[24]\.", kernel), kernel[:200]
        assert re.search(r"st\.global\S*\.v[24]\.", kernel), kernel[:200]


def test_no_product_is_fused_with_a_sum(compiled):
    """A fused multiply-add rounds once where the reference rounds twice; the power of beta may do as it likes."""
    for name in ("step_kernel", "strided_step_kernel"):
        assert not any(re.search(r"\bfma\.rn(\.ftz)?\.f32\b", kernel) for kernel in kernels_of(compiled[1], name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("copy", [None, torch.float16])
@pytest.mark.parametrize("grad", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("param", [torch.float16, torch.float32])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_kernel_has_the_references_bits(built, param, grad, copy, found_inf):
    from amplab.kernels import steps

    assert "CUDA" in built.what, built
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (0,), (8,), (16385,), (40_000,)]

    def drawn(dtype):
        each = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        return [*each, torch.randn(30, 40, generator=generator).to(dtype)[:, ::3]]

    params, grads, firsts = drawn(param), drawn(grad), drawn(torch.float32)
    seconds, copies = [each.abs() for each in drawn(torch.float32)], [] if copy is None else drawn(copy)
    given = [params, grads, firsts, seconds, [torch.tensor(3.0) for _ in params], copies]
    results = []
    for device, function in (
        ("cuda", torch.ops.amplab.multi_tensor_adam_.default),
        ("cpu", steps.multi_tensor_adam__reference),
    ):
        mine = [[x.clone().to(device) for x in tensors] for tensors in given]
        scalars = [torch.full((1,), value, device=device) for value in (1 / 3, found_inf)]
        function(*mine, *scalars, False, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, True, False)
        results.append([x.cpu() for tensors in mine for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
