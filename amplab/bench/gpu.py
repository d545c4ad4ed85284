"""``amplab bench gpu``: build the CUDA kernels, check each against float64, measure, and write one JSON file.

Without a CUDA device it says so and writes nothing: only measured figures are ever shown. The cases are in
``gpu_cases.py``, the checks in ``gpu_checks.py``; figures of other machines come with the package, under ``results/``.

The sides of a case are timed alternately in one run, and each round gives one ratio. "On the device" is timed by CUDA
events around each run, after reading other memory to sweep the L2 cache, and with the device waiting until the host
has enqueued the run. A "whole call" is timed by the host's clock between two points at which the device is idle.
"""

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amplab import kernels
from amplab.amp.run_state.file_format import write_atomically
from amplab.amp.run_state.paths import given_path
from amplab.bench.gpu_cases import FULL, SMALL, GpuCase, Sides, gpu_cases
from amplab.bench.gpu_checks import Check, run_checks, run_step_checks
from amplab.bench.interleaved import Contestant, one_thread, quartiles
from amplab.bench.rows import BenchResults, Row, as_json, as_text
from amplab.bench.suites import machine_facts
from amplab.kernels.builder.recipe import current_recipe

__all__ = ["RESULTS", "DeviceClock", "main", "measure_case", "recorded_results", "rehearse", "report", "unmeasured"]

RESULTS = Path(__file__).with_name("results")
"""The folder of measured figures, one file for each device."""

_BAD_INPUT, _FAILED = 2, 1
_ROUNDS = 30
_SWEEP = 2**26  # float32 elements: 256 MiB, several times the largest L2
_HOLD = 2_000_000  # cycles, about a millisecond
_WARM_UP = 3
_OURS = "amplab"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the command-line arguments; None for those of the process.

    Returns:
        0; 1 if a check failed; 2 if there is no device to measure on, or for bad input.
    """
    options = _parser().parse_args(arguments)
    if options.device == "cpu":
        return _on_cpu(options)
    if not torch.cuda.is_available():
        return _refuse(
            "no CUDA device found, so nothing was measured; `python -m amplab.bench.gpu --device cpu --small` "
            "checks the CPU's kernels."
        )
    built = kernels.ensure(wait=True)
    if built.status != "built" or not current_recipe().cuda:
        return _refuse(f"the CUDA kernels are not available: {built}")
    _say(str(built))
    checks = [*run_checks("cuda"), *run_step_checks("cuda")]
    cases = gpu_cases(SMALL if options.small else FULL)
    if any(check.failure for check in checks):
        _say(report([row for case in cases for row in unmeasured(case, "a check has failed")], checks, {})[0])
        return _FAILED
    text, whole = report(_measure(cases, options.rounds), checks, _device_facts())
    _say(text)
    if not options.small:
        default = RESULTS / f"{_file_name(torch.cuda.get_device_name())}.json"
        path = given_path(default if options.json is None else options.json, "--json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(whole.encode()))
        _say(f"written to {path}")
    return 0


def recorded_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the figures of other machines, by the name of the device; empty if there are none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {each["machine"]["device"]: each for each in found}


def report(rows: Sequence[Row], checks: Sequence[Check], machine: dict[str, Any]) -> tuple[str, str]:
    """Return the table with the failed checks below it, and the JSON with all checks."""
    results = BenchResults("gpu", machine, tuple(rows))
    failures = [f"{check.name}: {check.failure}" for check in checks if check.failure]
    passed = f"{len(checks) - len(failures)} of {len(checks)} checks passed."
    entries = [{"name": each.name, "lists": each.lists, "failure": each.failure} for each in checks]
    return "\n".join([as_text(results), passed, *failures]), as_json(results, checks=entries)


def rehearse(cases: Sequence[GpuCase], device: str) -> int:
    """Run every side of every case once, untimed, and return their number. For a machine without a GPU."""
    ran = 0
    for case in cases:
        for side in case.make(device).values():
            if side.prepare is not None:
                side.prepare()
            side.run()
            ran += 1
    return ran


class DeviceClock:
    """Milliseconds of one run on the current CUDA device."""

    def __init__(self) -> None:
        self._sweep = torch.zeros(_SWEEP, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, side: Contestant, *, whole_call: bool) -> float:
        """Prepare and run a side once.

        Args:
            side: what is timed.
            whole_call: use the host's clock, including the wait for the device; else time on the device.
        """
        if side.prepare is not None:
            side.prepare()
        return self._of_call(side) if whole_call else self._on_device(side)

    def _on_device(self, side: Contestant) -> float:
        self._sweep.sum()  # read, not written: writing lines back would use the bandwidth that is measured
        torch.cuda._sleep(_HOLD)
        self._start.record()
        side.run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def _of_call(self, side: Contestant) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        side.run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3


def measure_case(case: GpuCase, clock: DeviceClock, rounds: int, *, device: str = "cuda") -> list[Row]:
    """Measure one case: a row for each side that it is compared with.

    Args:
        case: what to compare.
        clock: returns the milliseconds of one run of a side.
        rounds: how often each side is timed.
        device: the device of the sides.
    """
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else case.needs
    if free < case.needs:
        return unmeasured(case, f"needs {case.needs / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
    sides = case.make(device)
    with one_thread():
        times = _by_turns(sides, clock, rounds, whole_call=case.whole_call)
    return [_row(case, against, times) for against in case.goals]


def unmeasured(case: GpuCase, why: str) -> list[Row]:
    """Return the rows of a case that was not measured, with the reason."""
    return [Row(case.name, against, goal, details={"why": why}) for against, goal in case.goals.items()]


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
        names.append(names.pop(0))  # another side begins the next round
    return times


def _row(case: GpuCase, against: str, times: dict[str, list[float]]) -> Row:
    ratios = [theirs / ours for ours, theirs in zip(times[_OURS], times[against], strict=True)]
    details = {
        "ours_ms": statistics.median(times[_OURS]),
        "theirs_ms": statistics.median(times[against]),
        "rounds": len(ratios),
        "timed": "whole call" if case.whole_call else "on the device",
    }
    return Row(case.name, against, case.goals[against], statistics.median(ratios), quartiles(ratios), details)


def _on_cpu(options: argparse.Namespace) -> int:
    if not options.small:
        return _refuse("--device cpu measures nothing; add --small to check the kernels and rehearse the cases.")
    if options.json is not None:
        return _refuse(f"--json {options.json}: figures are only written for a GPU; --device cpu measures none.")
    _say(str(kernels.ensure(wait=True)))
    checks = [*run_checks("cpu", lists=3, largest=3000), *run_step_checks("cpu", lists=2, largest=2000)]
    cases = gpu_cases(SMALL)
    ran = rehearse(cases, "cpu")
    rows = [row for case in cases for row in unmeasured(case, "no GPU")]
    _say(report(rows, checks, {})[0])
    _say(f"{ran} sides of {len(cases)} cases rehearsed on the CPU.")
    return _FAILED if any(check.failure for check in checks) else 0


def _measure(cases: Sequence[GpuCase], rounds: int) -> list[Row]:
    rows, clock = [], DeviceClock()
    for number, case in enumerate(cases):
        rows += measure_case(case, clock, rounds)
        torch.cuda.empty_cache()
        _say(f"{number + 1}/{len(cases)} {case.name}", sys.stderr)
    return rows


def _device_facts() -> dict[str, Any]:
    """Return what a reader of the figures needs to know; requires a device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"sm_{properties.major}{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
        **{name: value for name, value in machine_facts().items() if name not in ("capability", "cpu_half")},
    }


def _driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver, from its kernel module."""
    if version.exists():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version.read_text(encoding="utf-8"))
        if found:
            return found[1]
    return "unknown"


def _file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _say(text: str, stream: Any = None) -> None:
    stream = sys.stdout if stream is None else stream
    stream.write(text + "\n")
    stream.flush()


def _refuse(sentence: str) -> int:
    _say(f"amplab bench gpu: {sentence}", sys.stderr)
    return _BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amplab bench gpu", description="Check and measure the CUDA kernels.", allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check, and measure nothing")
    parser.add_argument("--small", action="store_true", help="small lists, to try the command; writes no file")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help="rounds of each row (default: 30)")
    parser.add_argument("--json", metavar="FILE", help="default: a file named by the device in results/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
