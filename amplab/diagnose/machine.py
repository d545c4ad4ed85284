"""What this machine offers for mixed precision: versions, 16-bit arithmetic, CUDA, the build of the kernels."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from amplab import __version__, kernels
from amplab.display.table import Card, Table
from amplab.kernels.builder.recipe import cuda_of_torch, has_cuda_device, obstacle
from amplab.policies import cpu_half_mode

__all__ = ["MachineReport", "machine_report"]

_HALF = {
    "native": "native: this CPU has float16 arithmetic",
    "fp32_accumulate": "products are accumulated in float32 and rounded once, as on tensor cores",
}


@dataclass(frozen=True, repr=False)
class MachineReport:
    """Facts about the machine; prints as a table.

    Attributes:
        facts: the rows, (name, sentence).
    """

    facts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return str(self._card())

    def __repr__(self) -> str:
        return f"<MachineReport: {', '.join(name for name, _ in self.facts)}>"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        return Card("This machine", (Table(("what", "status"), self.facts, "This machine"),))


def machine_report() -> MachineReport:
    """Return the facts about this machine. Loads built kernels, but does not build any. Sync: none.

    >>> [name for name, _ in machine_report().facts]
    ['amplab', 'torch', 'CPU', 'float16 on CPU', 'bfloat16 on CPU', 'CUDA', 'kernels']
    """
    return MachineReport(
        (
            ("amplab", f"{__version__}, Python {platform.python_version()}"),
            ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
            ("CPU", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"),
            ("float16 on CPU", _HALF[cpu_half_mode()]),
            ("bfloat16 on CPU", _bfloat16()),
            ("CUDA", _cuda()),
            ("kernels", _kernels()),
        )
    )


def _bfloat16() -> str:
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "computed by oneDNN"
    return "this CPU has no bfloat16 arithmetic: products are slower than in float32"


def _cuda() -> str:
    if cuda_of_torch() is None:
        return "none: this torch is built without CUDA; everything runs on the CPU"
    if not has_cuda_device():
        return f"none: torch is built for CUDA {torch.version.cuda}, but no device or no driver was found"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    bfloat16 = "with" if torch.cuda.is_bf16_supported() else "without"
    return f"{torch.version.cuda}, {', '.join(names)}, {bfloat16} bfloat16"


def _kernels() -> str:
    """The build status, for a user who has not used the kernels yet."""
    build = kernels.report()
    missing = obstacle()
    if build.status == "reference" and missing is not None:
        same = "The PyTorch reference gives the same bits."
        return f"cannot be built: {missing.cause}. To enable them: {missing.remedy}. {same}"
    if build.status == "reference":
        return "built or loaded at their first use; until then the PyTorch reference gives the same bits"
    return str(build).removeprefix("amplab kernels: ")
