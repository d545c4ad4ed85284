"""The headers of the kernels, compiled for the host."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from amplab.kernels.builder import recipe

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """Compile C++ source text, or a file of this folder, with some flags into a library that ctypes can call."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")

    def build(source: str | Path, *flags: str) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("compiled")  # its own: a path that is loaded already would not load again
        if isinstance(source, str):
            (folder / "source.cpp").write_text(source)
        path = folder / "source.cpp" if isinstance(source, str) else HERE / source
        library = folder / "library.so"
        include = [f"-I{HERE}", *recipe.INCLUDES]
        command = [compiler, "-std=c++17", "-shared", "-fPIC", *flags, *include, str(path), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))

    return build


@pytest.fixture(scope="module")
def compiled_cuda(compiled: Callable[..., ctypes.CDLL]) -> Callable[[str], ctypes.CDLL]:
    """Compile a file of this folder that runs CUDA kernels on the host thread by thread."""
    return lambda name: compiled(Path(name), "-O1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
