"""The CUDA sources without a GPU: every architecture compiles, registers are few, memory moves 16 bytes at a time.

Skipped where nvcc is not installed. What the kernels compute is in test_unscale_on_host.py.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from amplab.kernels.builder import recipe

KERNELS = recipe.SOURCES
SOURCES = sorted(KERNELS.glob("*.cu"))
# What is assembled from which PTX: three compilations, since each takes longer than the assembly.
ARCHITECTURES = {75: (75,), 80: (80, 86, 89), 90: (90, 100, 120)}
# The recipe's flags and those that torch.utils.cpp_extension adds.
HALVES = ("NO_HALF_OPERATORS__", "NO_HALF_CONVERSIONS__", "NO_BFLOAT16_CONVERSIONS__", "NO_HALF2_OPERATORS__")
FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "-Xptxas", "-v", "--threads", "2"),
    *(f"-D__CUDA_{name}" for name in HALVES),
)
PAIRS, SINGLES = 2 * 4 * 4, 2 * 4  # to replace and to accumulate, for two dtypes; in place and to measure, for one
SIXTEEN_BYTES = r"\.global\S*\.(v4\.[bfsu]32|v2\.[bfsu]64)\s"


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel."""

    name: str
    architecture: int
    registers: int
    spilled: int


def read_resources(report: str) -> Iterator[Kernel]:
    """Yield what ``ptxas -v`` reports, kernel by kernel."""
    parts = re.split(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", report)[1:]
    for name, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        registers = re.search(r"Used (\d+) registers", text)[1]
        spilled = re.search(r"(\d+) bytes spill stores", text)[1]
        yield Kernel(name, int(architecture), int(registers), int(spilled))


def read_kernels(ptx: str) -> dict[str, str]:
    """Return the body of each kernel in a PTX file."""
    parts = re.split(r"\.entry (\w+)\(", ptx)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module", params=ARCHITECTURES, ids="from compute_{}".format)
def compiled(request, tmp_path_factory):
    """The resources of every kernel on some architectures, and the PTX that they were assembled from."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not installed: CUDA sources are not compiled")
    folder = tmp_path_factory.mktemp("cuda")
    whole = folder / "cuda.cu"
    whole.write_text("\n".join(path.read_text() for path in SOURCES))  # as load_inline does
    codes = ",".join(f"sm_{architecture}" for architecture in ARCHITECTURES[request.param])
    include = [*recipe.INCLUDES, f"-I{Path(torch.__file__).parent / 'include'}"]
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{request.param},code=[{codes}]", *include]
    command += ["--keep", "--keep-dir", str(folder), "-fatbin", str(whole), "-o", str(folder / "all.fatbin")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr
    (ptx,) = folder.glob("cuda*.ptx")
    resources = list(read_resources(result.stderr))
    assert {each.architecture for each in resources} == set(ARCHITECTURES[request.param])
    return resources, read_kernels(ptx.read_text())


def is_unscale(name: str) -> bool:
    return "unscale_cuda" in name and "unscale_kernel" in name


def test_there_is_a_kernel_for_every_architecture_pair_of_dtypes_and_way_to_write(compiled):
    resources, ptx = compiled
    for architecture in {each.architecture for each in resources}:
        names = [each.name for each in resources if each.architecture == architecture]
        assert set(names) == set(ptx)
        assert len([name for name in names if is_unscale(name)]) == PAIRS + SINGLES


def test_unscale_keeps_to_64_registers_and_hardly_spills(compiled):
    resources, _ = compiled
    unscale = [each for each in resources if "unscale_cuda" in each.name]
    assert [each for each in unscale if each.registers > 64 or each.spilled > 16] == []


def test_the_resources_of_all_kernels_are_on_record(compiled, record_property):
    """Printed, and in the XML report: how many registers the worst kernel of each source takes on each architecture."""
    resources, _ = compiled
    for architecture in sorted({each.architecture for each in resources}):
        here = [each for each in resources if each.architecture == architecture]
        for kind in sorted({kind_of(each.name) for each in here}):
            kernels = [each for each in here if kind_of(each.name) == kind]
            worst = f"{max(k.registers for k in kernels)} registers, {max(k.spilled for k in kernels)} bytes spilled"
            record_property(f"sm_{architecture} {kind}", worst)
            sys.stdout.write(f"sm_{architecture:<4} {kind:24} {len(kernels):3} kernels: {worst}\n")
            assert max(k.registers for k in kernels) <= 255


def kind_of(name: str) -> str:
    """The name of a kernel's function, from its mangled one."""
    words, rest = [], name.removeprefix("_Z").removeprefix("N")
    while match := re.match(r"(\d+)", rest):
        end = match.end() + int(match[1])
        words.append(rest[match.end() : end])
        rest = rest[end:]
    return words[-1] if words else name


def test_unscale_reads_and_writes_16_bytes_at_a_time(compiled):
    _, ptx = compiled
    for name, body in ptx.items():
        if is_unscale(name):
            assert re.search(r"\bld" + SIXTEEN_BYTES, body), name
            assert bool(re.search(r"\bst" + SIXTEEN_BYTES, body)) == ("WriteE2" not in name), name


def test_unscale_does_not_fuse_the_product_and_the_sum(compiled):
    """A fused multiply-add rounds once where the reference rounds twice."""
    _, ptx = compiled
    assert [name for name, body in ptx.items() if is_unscale(name) and re.search(r"\bfma\.rn\.f(32|64)\b", body)] == []


def test_nothing_lies_in_local_memory_before_the_assembler(compiled):
    _, ptx = compiled
    assert [name for name, body in ptx.items() if is_unscale(name) and "__local_depot" in body] == []


@pytest.mark.parametrize("part", [0, 1])
def test_the_cpp_side_of_a_cuda_build_compiles(tmp_path, part):
    """What only a machine with CUDA compiles of the C++ sources: g++ alone can tell whether it is right."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    whole = tmp_path / "main.cpp"
    whole.write_text(
        "\n".join(path.read_text() for path in recipe.current_recipe().parts[part] if path.suffix == ".cpp")
    )
    include = [*recipe.INCLUDES, f"-I{Path(torch.__file__).parent / 'include'}"]
    command = [compiler, "-std=c++20", "-DUSE_CUDA", *include, "-fsyntax-only", str(whole)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_readers_read():
    report = """ptxas info    : Compiling entry function '_Z1av' for 'sm_90'
    8 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 65 registers"""
    assert list(read_resources(report)) == [Kernel("_Z1av", 90, 65, 24)]
    assert read_kernels(".visible .entry _Z1av(\n)\n{\nld.global.v4.u16 \n}") == {
        "_Z1av": "\n)\n{\nld.global.v4.u16 \n}"
    }
    assert not re.search(r"\bld" + SIXTEEN_BYTES, "ld.global.v4.u16 x")
    assert re.search(r"\bld" + SIXTEEN_BYTES, "ld.global.nc.v4.b32 x")
    assert kind_of("_ZN6amplab12unscale_cuda14unscale_kernelILNS_5WriteE0E") == "unscale_kernel"
