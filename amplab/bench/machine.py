"""Where figures were measured: processor, versions, threads, load, date."""

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

from amplab import __version__, kernels
from amplab.policies import cpu_half_mode

__all__ = ["machine_facts"]


def machine_facts() -> dict[str, float | int | str]:
    """Return what a reader of the figures needs to know of the machine; all of it fits into JSON. Sync: none.

    >>> facts = machine_facts()
    >>> facts["torch"] == str(torch.__version__), facts["threads"]
    (True, 1)
    """
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 1,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "load": _load(),
        "amplab": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernels": kernels.report().status,
        "cpu_half": cpu_half_mode(),
        "date": datetime.now(UTC).isoformat("T", "seconds"),
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; Linux keeps it in a file, other systems tell it to `platform`."""
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _load() -> float:
    """How many processes wanted to run over the last minute; 0.0 where the system does not say."""
    return round(os.getloadavg()[0], 2) if os.name == "posix" else 0.0
