"""The machine as mixed precision sees it: what is installed, what 16-bit arithmetic there is, whether kernels build."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from amplab import __version__, kernels
from amplab.display.table import Card, Table
from amplab.kernels.recipe import obstacle
from amplab.policies import cpu_half_mode

__all__ = ["MachineReport", "machine_report"]

_HALF = {
    "native": "native: this CPU multiplies halves itself",
    "fp32_accumulate": "products of halves are accumulated in float32 and rounded once, as tensor cores do",
}


@dataclass(frozen=True, repr=False)
class MachineReport:
    """Facts as (name, sentence), in reading order; prints as a table.

    Attributes:
        facts: the rows.
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
    """Look at the machine; builds nothing, loads a build that is there. Sync: none.

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
        return "oneDNN multiplies it"
    return "this CPU has no arithmetic for it: expect products slower than in float32"


def _cuda() -> str:
    if torch.version.cuda is None:
        return "none: this torch is built without it; everything runs on the CPU"
    if not torch.cuda.is_available():
        return f"none: torch is built for CUDA {torch.version.cuda}, and there is no device or no driver"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    bfloat16 = "with" if torch.cuda.is_bf16_supported() else "without"
    return f"{torch.version.cuda}, {', '.join(names)}, {bfloat16} bfloat16"


def _kernels() -> str:
    """How it stands, in words for somebody who has not asked for them yet."""
    news = kernels.report()
    missing = obstacle()
    if news.status == "reference" and missing is not None:
        return f"cannot be built: {missing.cause}. To have them: {missing.remedy}. The reference has the same bits."
    if news.status == "reference":
        return "can be built, or loaded, at their first use; the reference serves until then, with the same bits"
    return str(news).removeprefix("amplab kernels: ")
