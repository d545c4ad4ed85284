"""What is built: sources and flags, and a key that changes whenever these, torch, Python or the CPU change.

Where the result is kept is in ``cache.py``, how it is compiled in ``compilation.py``.
"""

import hashlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from amplab.formats.kept_property import kept_property

__all__ = [
    "INCLUDES",
    "LIBRARY",
    "SOURCES",
    "Obstacle",
    "Recipe",
    "casts_recipe",
    "cuda_of_torch",
    "current_recipe",
    "has_cuda_device",
    "obstacle",
    "search_path",
]

LIBRARY = "amplab_kernels"
SOURCES = Path(__file__).parents[1]
"""The folder of the sources; the headers that several of them include are in ``include``."""

INCLUDES = (f"-I{SOURCES}", f"-I{SOURCES / 'include'}")
_SCALING = ("tensor_table", "unscale", "update_scale")


@dataclass(frozen=True)
class Recipe:
    """One build: the sources for each compiler, and the flags."""

    cpp: tuple[Path, ...]
    cuda: tuple[Path, ...]
    headers: tuple[Path, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    ldflags: tuple[str, ...]

    @property
    def parts(self) -> tuple[tuple[Path, ...], ...]:
        """The sources of each compiler process, which run in parallel: those of scaling, and all others.

        Both parts take about the same time. Every further part would spend two seconds on torch's headers again. A
        source is in the same part as the sources that it calls.
        """
        sources = (*self.cpp, *self.cuda)
        scaling = tuple(path for path in sources if path.stem.startswith(_SCALING))
        others = tuple(path for path in sources if path not in scaling)
        return tuple(part for part in (scaling, others) if part)

    @property
    def what(self) -> str:
        """A description for the report."""
        devices = "CPU and CUDA" if self.cuda else "CPU"
        sources = (*self.cpp, *self.cuda)
        return f"{devices} kernels from {sources[0].name if len(sources) == 1 else f'{len(sources)} sources'}"

    @kept_property
    def key(self) -> str:
        """The name of the cached build: sha256 of everything that can change its machine code."""
        digest = hashlib.sha256()
        for path in (*self.cpp, *self.cuda, *self.headers):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        environment = (torch.__version__, cuda_of_torch(), sys.version, platform.machine(), _cpu_features())
        gpus = _gpus() if self.cuda else ()
        digest.update(repr((self.cflags, self.cuda_cflags, self.ldflags, environment, gpus)).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Obstacle:
    """Why nothing can be built, and the remedy."""

    cause: str
    remedy: str


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that torch is built with, or None; `amplab run` does not redirect this. Sync: none."""
    return torch.version.cuda if torch.backends.cuda.is_built() else None


def has_cuda_device() -> bool:
    """Return whether there is a CUDA device; `amplab run` does not redirect this. Sync: none."""
    if not torch.backends.cuda.is_built():
        return False
    # NVML counts without CUDA: after a call of CUDA, torch refuses CUDA in forked processes.
    count = torch.cuda._device_count_nvml()
    return (torch._C._cuda_getDeviceCount() if count < 0 else count) > 0


def current_recipe() -> Recipe:
    """Return the recipe for this machine, with CUDA if there are a CUDA device and nvcc. Sync: none."""
    with_cuda = cuda_of_torch() is not None and has_cuda_device() and _nvcc() is not None
    return Recipe(
        cpp=tuple(sorted(p for p in SOURCES.glob("*.cpp") if p.name != "dispatch_casts.cpp")),
        cuda=tuple(sorted(SOURCES.glob("*.cu"))) if with_cuda else (),
        headers=tuple(sorted([*SOURCES.glob("*.h"), *(SOURCES / "include").glob("*.h")])),
        cflags=_cflags() + (("-DUSE_CUDA",) if with_cuda else ()),
        # A product and a sum must be rounded separately, as the reference rounds them.
        cuda_cflags=("-O3", "-DNDEBUG", "-DUSE_CUDA", "--expt-relaxed-constexpr", "--fmad=false"),
        ldflags=() if sys.platform == "win32" else ("-Wl,-s",) if sys.platform == "linux" else (),
    )


def casts_recipe() -> Recipe:
    """Return the recipe of the casts in the dispatcher, which is the same for every device. Sync: none."""
    return replace(current_recipe(), cpp=(SOURCES / "dispatch_casts.cpp",), cuda=(), headers=(), cflags=_cflags())


def obstacle() -> Obstacle | None:
    """Return the first thing that is missing for a build, or None; compiles nothing."""
    if TorchVersion(torch.__version__) < "2.10":
        return Obstacle(
            f"the kernels need the stable C interface of torch 2.10, but this is torch {torch.__version__}",
            "python -m pip install 'torch>=2.10'",
        )
    if find_spec("setuptools") is None:
        return Obstacle("torch.utils.cpp_extension needs setuptools", "python -m pip install setuptools")
    if shutil.which("ninja", path=search_path()) is None:
        return Obstacle("torch.utils.cpp_extension needs ninja", "python -m pip install ninja")
    compiler = _compiler()
    if shutil.which(compiler, path=search_path()) is None:
        return Obstacle(f"no C++ compiler: {compiler!r} is not on PATH", _compiler_remedy())
    return None


def search_path() -> str:
    """Return PATH plus the folders where pip installs programs: ninja is found in a venv that is not activated."""
    folders = [os.environ.get("PATH", ""), os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    return os.pathsep.join(folder for folder in folders if folder)


def _cflags() -> tuple[str, ...]:
    if sys.platform == "win32":
        return ("/O2", "/DNDEBUG")
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    # A product and a sum must be rounded separately, as torch rounds them.
    return ("-O2", native, "-DNDEBUG", "-ffp-contract=off")


def _compiler() -> str:
    """Return the compiler that torch will call."""
    if sys.platform == "win32":
        return "cl"
    return shlex.split(os.environ.get("CXX") or "c++")[0]


def _compiler_remedy() -> str:
    if sys.platform == "darwin":
        return "xcode-select --install"
    if sys.platform == "win32":
        return "install the Visual Studio Build Tools and start from their developer prompt"
    return "install g++ (Debian: apt install g++; conda: conda install -c conda-forge cxx-compiler)"


def _nvcc() -> str | None:
    """Return the path of nvcc by torch's own rules: CUDA_HOME, then PATH, then /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _gpus() -> tuple[str, ...]:
    """Return what decides for which architectures torch compiles: the models of the GPUs, or a list of one's own."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = set[str]()
    for file in files:
        with suppress(OSError, UnicodeDecodeError):  # a GPU that is being reset
            models |= {line for line in file.read_text().splitlines() if line.startswith("Model:")}
    return (os.environ.get("TORCH_CUDA_ARCH_LIST", ""), *sorted(models))


def _cpu_features() -> str:
    """Return the CPU features that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
