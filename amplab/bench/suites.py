"""The suites by name, and running one of them from the first case to the last."""

import gc
from collections.abc import Callable, Sequence
from typing import TextIO

from amplab import kernels
from amplab.bench.casting import casting_cases
from amplab.bench.diagnose import diagnose_cases
from amplab.bench.interleaved import Case, measure
from amplab.bench.kernels import kernel_cases
from amplab.bench.machine import machine_facts
from amplab.bench.progress import Progress
from amplab.bench.rows import BenchResults
from amplab.bench.scaler import scaler_cases
from amplab.bench.statistics_rows import statistics_cases
from amplab.bench.xray import xray_cases

__all__ = ["DEFAULT_ROUNDS", "SUITES", "run_cases", "run_suite"]

DEFAULT_ROUNDS = 30

SUITES: dict[str, Callable[[], Sequence[Case]]] = {
    "scaler": scaler_cases,
    "casting": casting_cases,
    "kernels": lambda: [*kernel_cases(), *statistics_cases()],
    "xray": xray_cases,
    "diagnose": diagnose_cases,
}


def run_suite(name: str, *, rounds: int = DEFAULT_ROUNDS, stream: TextIO | None = None) -> BenchResults:
    """Measure every case of a suite, once the kernels are built or known not to be.

    Args:
        name: a key of `SUITES`.
        rounds: of each case.
        stream: where the progress goes; stderr where None.

    Raises:
        ValueError: there is no such suite; or ``rounds`` < 1.
        RuntimeError: ``AMPLAB_KERNELS=require`` and there is no way to build.
    """
    if name not in SUITES:
        raise ValueError(f"{name!r} is no suite: expected one of {', '.join(SUITES)}.")
    kernels.ensure(wait=True)
    return run_cases(name, SUITES[name](), rounds=rounds, stream=stream)


def run_cases(suite: str, cases: Sequence[Case], *, rounds: int, stream: TextIO | None = None) -> BenchResults:
    """Measure cases of one's own. Args and Raises: as `run_suite`."""
    progress = Progress(len(cases), rounds, stream)
    rows = []
    gc.collect()  # now, since there is no collecting while a case is measured
    for index, case in enumerate(cases):
        progress.begin(index, case.name)
        rows.append(measure(case, rounds, progress.round))
        progress.end(rows[-1])
    return BenchResults(suite, machine_facts(), tuple(rows))
