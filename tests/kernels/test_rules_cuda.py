"""adaptive_steps.cu and layerwise_steps.cu without a GPU: they compile, fit their registers and fuse no operations."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from amplab.kernels import adaptive_steps, layerwise_steps
from amplab.kernels.builder import recipe

FOLDER = recipe.SOURCES
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "--fmad=false"]
# How many kernels each source makes: rules in floats and doubles, dense and strided, and what they share.
KERNELS = {"adaptive_steps": 6 * 2 * 2 + 1, "layerwise_steps": 2 * 2 * 3 + 2 + 2 + 1}


@pytest.fixture(scope="module", params=KERNELS)
def compiled(request, tmp_path_factory):
    """The name of a source, the assembler's report and the PTX of its kernels, for Hopper."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    source, folder = FOLDER / f"{request.param}.cu", tmp_path_factory.mktemp("cuda")
    include = [f"-I{Path(torch.__file__).parent / 'include'}", *recipe.INCLUDES]
    kept = ["--keep", "--keep-dir", str(folder), "-cubin", str(source), "-o", str(folder / "a.cubin")]
    command = [nvcc, *FLAGS, "-arch=sm_90", "-Xptxas", "-v", *include, *kept]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return request.param, result.stderr, (folder / f"{request.param}.ptx").read_text()


def kernels_of(ptx, pattern):
    entries = re.split(r"^(?:\.visible )?\.entry", ptx, flags=re.MULTILINE)[1:]
    return [entry for entry in entries if re.search(pattern, entry.splitlines()[0])]


def resources(report):
    """Name, registers and bytes of spill stores of every kernel."""
    pattern = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    return [(name, int(registers), int(spill)) for name, spill, registers in re.findall(pattern, report, re.DOTALL)]


def in_doubles(name):
    return re.search(r"(?:EdN?S|IdLi|Ed)", name) is not None


def test_there_are_as_many_kernels_as_rules_ask_for(compiled):
    name, report, _ = compiled
    assert len(resources(report)) == KERNELS[name]


def test_steps_in_floats_keep_to_64_registers_and_spill_nothing(compiled):
    _, report, _ = compiled
    steps = [each for each in resources(report) if re.search(r"step\w*_kernelI", each[0]) and not in_doubles(each[0])]
    assert len(steps) >= 2
    assert all(registers <= 64 and spill == 0 for _, registers, spill in steps), steps


def test_no_kernel_spills_much(compiled):
    _, report, _ = compiled
    assert all(registers <= 80 and spill <= 128 for _, registers, spill in resources(report))


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled):
    dense = kernels_of(compiled[2], r"(\d\dstep_kernel|step_layers_kernel)I")
    assert len(dense) >= 4
    for kernel in dense:
        assert re.search(r"ld\.global\S*\.v[24]\.", kernel), kernel[:200]
        assert re.search(r"st\.global\S*\.v[24]\.", kernel), kernel[:200]


def test_no_product_of_floats_is_fused_with_a_sum(compiled):
    """A fused multiply-add rounds once where the reference rounds twice; the power of beta may do as it likes."""
    assert not any(re.search(r"\bfma\.rn(\.ftz)?\.f32\b", kernel) for kernel in kernels_of(compiled[2], "step"))


# -- where there is a GPU --------------------------------------------------------------------------------------------

MOMENTS = (0.01, 0.9, 0.99, 0.1, 1e-6, 0.1)
RULES = {
    "adagrad_": (1, (0.1, 1e-10, 0.2, 0.05, True), adaptive_steps.multi_tensor_adagrad__reference),
    "adadelta_": (2, (0.7, 0.9, 1e-6, 0.1), adaptive_steps.multi_tensor_adadelta__reference),
    "rmsprop_centered_momentum_": (
        3,
        (0.01, 0.9, 1e-3, 0.1, 0.8, False, True, True),
        functools.partial(adaptive_steps.multi_tensor_rmsprop__reference, True, True),
    ),
    "lamb_": (2, (*MOMENTS, 2.0, True, True, True), layerwise_steps.multi_tensor_lamb__reference),
    "novograd_": (1, (*MOMENTS, False, False, True), layerwise_steps.multi_tensor_novograd__reference),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("grad", [torch.float16, torch.float32])
@pytest.mark.parametrize("param", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_does_what_the_reference_does(built, rule, param, grad, found_inf):
    assert "CUDA" in built.what, built
    count, numbers, reference = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (0,), (8,), (16385,), (400_000,)]

    def drawn(dtype):
        each = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        return [*each, torch.randn(30, 40, generator=generator).to(dtype)[:, ::3]]

    states = [[each.abs() for each in drawn(torch.float32)] for _ in range(count)]
    given = [drawn(param), drawn(grad), *states, [torch.tensor(3.0) for _ in range(6)], drawn(torch.float16)]
    results = []
    for device, function in (("cuda", getattr(torch.ops.amplab, f"multi_tensor_{rule}").default), ("cpu", reference)):
        mine = [[each.clone().to(device) for each in tensors] for tensors in given]
        norms = [[torch.tensor(index - 1.0, device=device) for index in range(6)]] if rule == "novograd_" else []
        scalars = [torch.full((1,), value, device=device) for value in (1 / 3, found_inf)]
        function(*mine, *scalars, False, *numbers, *norms)
        results.append([each.cpu() for tensors in (*mine, *norms) for each in tensors])
    for a, b in zip(*results, strict=True):
        unit = torch.finfo(a.dtype).eps if rule in ("lamb_", "novograd_") else 0.0
        assert torch.allclose(a.float(), b.float(), rtol=2 * unit, atol=2 * unit)
