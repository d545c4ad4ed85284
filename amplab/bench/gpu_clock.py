"""Time the sides of a case on a GPU, by turns in one run, and keep the ratio of each round.

On the device alone: CUDA events around each run, after the L2 cache was swept by reading something else, and with the
device held back until the host has enqueued the run. Whole calls: the host's clock, once the device is idle and
again when it is. Nothing is timed anywhere else: without a GPU there are no figures.
"""

import gc
import statistics
import time

import torch

from amplab.bench.gpu_rows import GpuCase, GpuRow, Sides
from amplab.bench.interleaved import Contestant, one_thread

__all__ = ["DeviceClock", "measure_case", "quartiles", "unmeasured"]

_SWEEP = 2**26  # float32 elements: 256 MiB, several times the largest L2
_HOLD = 2_000_000  # cycles, about a millisecond
_WARM_UP = 3
_OURS = "amplab"


class DeviceClock:
    """Milliseconds of one run on the current CUDA device."""

    def __init__(self) -> None:
        self._sweep = torch.zeros(_SWEEP, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, side: Contestant, *, whole_call: bool) -> float:
        """Prepare and run a side once.

        Args:
            side: what is timed.
            whole_call: by the host's clock, the wait for the device included; else on the device alone.
        """
        if side.prepare is not None:
            side.prepare()
        return self._of_call(side) if whole_call else self._on_device(side)

    def _on_device(self, side: Contestant) -> float:
        self._sweep.sum()  # read, and not written: lines to write back would take from the bandwidth that is measured
        torch.cuda._sleep(_HOLD)
        self._start.record()
        side.run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _of_call(self, side: Contestant) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        side.run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3


def measure_case(case: GpuCase, clock: DeviceClock, rounds: int, *, device: str = "cuda") -> list[GpuRow]:
    """Measure one case: a row for each side that it is compared with.

    Args:
        case: what to compare.
        clock: milliseconds of one run of a side.
        rounds: how often each side has its turn.
        device: where the sides are made.
    """
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else case.needs
    if free < case.needs:
        return unmeasured(case, f"needs {case.needs / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
    sides = case.make(device)
    with one_thread():
        times = _by_turns(sides, clock, rounds, whole_call=case.whole_call)
    return [_row(case, against, times) for against in case.goals]


def unmeasured(case: GpuCase, why: str) -> list[GpuRow]:
    """The rows of a case that was not measured, and why."""
    return [GpuRow(case.name, against, goal, details={"why": why}) for against, goal in case.goals.items()]


def quartiles(ratios: list[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, third


def _by_turns(sides: Sides, clock: DeviceClock, rounds: int, *, whole_call: bool) -> dict[str, list[float]]:
    for side in sides.values():
        for _ in range(_WARM_UP):
            clock(side, whole_call=whole_call)
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    for _ in range(rounds):
        for name in names:
            times[name].append(clock(sides[name], whole_call=whole_call))
        names.append(names.pop(0))  # another one begins
    return times


def _row(case: GpuCase, against: str, times: dict[str, list[float]]) -> GpuRow:
    ratios = [theirs / ours for ours, theirs in zip(times[_OURS], times[against], strict=True)]
    details = {
        "ours_ms": statistics.median(times[_OURS]),
        "theirs_ms": statistics.median(times[against]),
        "rounds": len(ratios),
        "timed": "whole call" if case.whole_call else "on the device",
    }
    return GpuRow(case.name, against, case.goals[against], statistics.median(ratios), quartiles(ratios), details)
