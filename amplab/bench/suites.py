"""The suites by name, and running one: every case, the progress on stderr, and the facts of the machine."""

import gc
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch

from amplab import __version__, kernels
from amplab.bench.casting import casting_cases
from amplab.bench.diagnose import diagnose_cases
from amplab.bench.interleaved import Case, measure
from amplab.bench.kernels import kernel_cases
from amplab.bench.rows import BenchResults, Row
from amplab.bench.scaler import scaler_cases
from amplab.bench.xray import xray_cases
from amplab.policies import cpu_half_mode

__all__ = ["DEFAULT_ROUNDS", "SUITES", "Progress", "machine_facts", "run_cases", "run_suite"]

DEFAULT_ROUNDS = 30

SUITES: dict[str, Callable[[], Sequence[Case]]] = {
    "scaler": scaler_cases,
    "casting": casting_cases,
    "kernels": kernel_cases,
    "xray": xray_cases,
    "diagnose": diagnose_cases,
}


def run_suite(name: str, *, rounds: int = DEFAULT_ROUNDS, stream: TextIO | None = None) -> BenchResults:
    """Measure every case of a suite, after the build of the kernels has ended.

    Args:
        name: a key of `SUITES`.
        rounds: the rounds of each case.
        stream: receives the progress; None for stderr.

    Raises:
        ValueError: an unknown suite, or ``rounds`` < 1.
        RuntimeError: ``AMPLAB_KERNELS=require`` and the kernels cannot be built.
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r}: expected one of {', '.join(SUITES)}.")
    kernels.ensure(wait=True)
    return run_cases(name, SUITES[name](), rounds=rounds, stream=stream)


def run_cases(suite: str, cases: Sequence[Case], *, rounds: int, stream: TextIO | None = None) -> BenchResults:
    """Measure the given cases. Args and Raises: as `run_suite`."""
    progress = Progress(len(cases), rounds, stream)
    rows = []
    gc.collect()  # now, because collection is disabled while a case is measured
    for index, case in enumerate(cases):
        progress.begin(index, case.name)
        rows.append(measure(case, rounds, progress.round))
        progress.end(rows[-1])
    return BenchResults(suite, machine_facts(), tuple(rows))


class Progress:
    """Progress of a run: on a terminal one line that is rewritten, elsewhere one line for each finished row.

    Args:
        cases: the number of cases.
        rounds: the rounds of each.
        stream: receives the lines; None for stderr.
    """

    def __init__(self, cases: int, rounds: int, stream: TextIO | None = None) -> None:
        self._cases, self._rounds = cases, rounds
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()

    def begin(self, index: int, name: str) -> None:
        """Report that the case ``index``, from 0, begins."""
        self._where = f"{index + 1}/{self._cases} {name}"
        self._rewrite(f"{self._where} …")

    def round(self, number: int) -> None:
        """Report that a round has ended."""
        self._rewrite(f"{self._where}: round {number} of {self._rounds}")

    def end(self, row: Row) -> None:
        """Report the result."""
        self._rewrite("")
        ratio = "not measured" if row.ratio is None else f"{row.ratio:.2f}"
        self._stream.write(f"{self._where}: {ratio} ({row.goal})\n")
        self._stream.flush()

    def _rewrite(self, text: str) -> None:
        if self._live:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()


def machine_facts() -> dict[str, float | int | str]:
    """Return what a reader of the figures needs to know about the machine, as JSON values. Sync: none.

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
    """Return the processor's name, on Linux from /proc/cpuinfo, elsewhere from `platform`."""
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _load() -> float:
    """Return the load average of the last minute; 0.0 if the system has none."""
    return round(os.getloadavg()[0], 2) if os.name == "posix" else 0.0
