"""``python -m amplab.bench.gpu``: build, check every kernel against float64, measure, and write one JSON.

Without a CUDA device it says so and writes nothing: a figure that was not measured is nowhere. The rows are in
``gpu_rows.py``, the clock in ``gpu_clock.py``, the checks in ``gpu_checks.py`` and ``gpu_step_checks.py``; what was
measured elsewhere comes with the package, under ``results/``.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amplab import kernels
from amplab.bench.gpu_checks import Check, run_checks
from amplab.bench.gpu_clock import DeviceClock, measure_case, unmeasured
from amplab.bench.gpu_rows import FULL, SMALL, GpuCase, GpuRow, gpu_cases
from amplab.bench.gpu_step_checks import run_step_checks
from amplab.bench.machine import machine_facts
from amplab.kernels.recipe import current_recipe

__all__ = ["RESULTS", "as_json", "as_text", "main", "recorded_results", "rehearse"]

RESULTS = Path(__file__).with_name("results")
"""Where measured figures are kept, one file for each device."""

FORMAT = 1
_BAD_INPUT, _FAILED = 2, 1
_ROUNDS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the words after it; None takes those of the process.

    Returns:
        0; 1 where a check has failed; 2 where there is nothing to measure on, or for bad input.
    """
    options = _parser().parse_args(arguments)
    if options.device == "cpu":
        return _on_cpu(options)
    if not torch.cuda.is_available():
        return _refuse("no CUDA device here, so nothing was measured; --device cpu --small checks the CPU's kernels.")
    report = kernels.ensure(wait=True)
    if report.status != "built" or not current_recipe().cuda:
        return _refuse(f"the CUDA kernels are not there: {report}")
    _say(str(report))
    checks = [*run_checks("cuda"), *run_step_checks("cuda")]
    cases = gpu_cases(SMALL if options.small else FULL)
    if any(check.failure for check in checks):
        _say(as_text([row for case in cases for row in unmeasured(case, "a check has failed")], checks))
        return _FAILED
    rows = _measure(cases, options.rounds)
    _say(as_text(rows, checks))
    if not options.small:
        path = options.json or RESULTS / f"{_file_name(torch.cuda.get_device_name())}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(rows, checks), encoding="utf-8")
        _say(f"written to {path}")
    return 0


def recorded_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return what was measured on other machines, by the name of the device; empty where there is none yet."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {each["machine"]["device"]: each for each in found}


def as_json(rows: Sequence[GpuRow], checks: Sequence[Check], machine: dict[str, Any] | None = None) -> str:
    """Return the JSON: the machine, the checks, and of each row the value, the goal and whether it is met."""
    whole = {
        "amplab_bench": FORMAT,
        "suite": "gpu",
        "machine": _device_facts() if machine is None else machine,
        "checks": [{"name": each.name, "lists": each.lists, "failure": each.failure} for each in checks],
        "rows": [row.entry() for row in rows],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_text(rows: Sequence[GpuRow], checks: Sequence[Check]) -> str:
    """Return the rows as a table, and the failures of the checks."""
    cells = [("what", "against", "times as fast", "goal", "")]
    for row in rows:
        entry = row.entry()
        value = entry["value"] if row.value is None else f"{row.value:.2f}"
        cells.append(
            (row.name, row.against, str(value), str(row.goal), {True: "met", False: "missed"}.get(row.met, ""))
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    failures = [f"{check.name}: {check.failure}" for check in checks if check.failure]
    return "\n".join([*lines, f"{len(checks) - len(failures)} of {len(checks)} checks passed.", *failures])


def rehearse(cases: Sequence[GpuCase], device: str) -> int:
    """Run every side of every case once, untimed; return how many there were. For a machine without a GPU."""
    ran = 0
    for case in cases:
        for side in case.make(device).values():
            if side.prepare is not None:
                side.prepare()
            side.run()
            ran += 1
    return ran


def _on_cpu(options: argparse.Namespace) -> int:
    if not options.small:
        return _refuse(
            "--device cpu has no figures to measure; add --small to check the kernels and rehearse the rows."
        )
    if options.json is not None:
        return _refuse(f"--json {options.json}: figures are of a GPU alone, and --device cpu measures none.")
    _say(str(kernels.ensure(wait=True)))
    checks = [*run_checks("cpu", lists=3, largest=3000), *run_step_checks("cpu", lists=2, largest=2000)]
    cases = gpu_cases(SMALL)
    ran = rehearse(cases, "cpu")
    rows = [row for case in cases for row in unmeasured(case, "no GPU")]
    _say(as_text(rows, checks))
    _say(f"{ran} sides of {len(cases)} cases rehearsed on the CPU; nothing was measured.")
    return _FAILED if any(check.failure for check in checks) else 0


def _measure(cases: Sequence[GpuCase], rounds: int) -> list[GpuRow]:
    rows, clock = [], DeviceClock()
    for number, case in enumerate(cases):
        rows += measure_case(case, clock, rounds)
        torch.cuda.empty_cache()
        _say(f"{number + 1}/{len(cases)} {case.name}", sys.stderr)
    return rows


def _device_facts() -> dict[str, Any]:
    """What a reader of the figures needs to know; only where there is a device."""
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
    """The version of NVIDIA's driver, as its kernel module tells it."""
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
    parser = argparse.ArgumentParser(prog="amplab bench gpu", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks, and measures nothing")
    parser.add_argument("--small", action="store_true", help="tiny lists, to try the command; no file is written")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar=_ROUNDS, help="of each row (default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: a file for the device under results/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
