"""The reader of run logs: of one process, or of all ranks of a run. It reads a million steps in about 5 seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from amplab.amp import MemoryUse
from amplab.amp.run_state.paths import given_path
from amplab.lab.changes import config_changes, fault_change, restart_change, start_change
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import GradientSample, MixedScales, StepRow
from amplab.lab.history import COLUMNS, History
from amplab.lab.run_log.checksums import LineSums, is_check
from amplab.lab.run_log.event_lines import Event, read_event
from amplab.lab.run_log.header import COLUMNS_OF, LONGEST_HEADER, open_log, read_config, read_header
from amplab.lab.run_log.json_lines import LONGEST_LINE, read_json
from amplab.lab.run_log.paths import runs_directory
from amplab.lab.run_log.ranks import joined, rank_log, rank_logs
from amplab.lab.run_log.run import Run
from amplab.lab.run_log.step_lines import read_step, read_steps
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.watched_run import WatchedRun

__all__ = ["load_run"]

_OF_A_STEP = ord("[")  # the first character of its line
_BATCH = 2**15  # bytes that are parsed together: much more no longer fits into the caches of a core

_Entry = StepRow | Event


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run log, or the folder with the logs of all ranks of a run.

    A line that was altered, as by another digit in a number, is told by the checksum after it (`run_log.checksums`).
    Of a process that was killed, the last `CHECKED_LINES` lines at most have none.

    Returns:
        The run; if its last line is cut off, that line is dropped and `truncated` is True. Of a folder, one run with
        the runs of the ranks in `ranks`.

    Raises:
        TypeError: Not a path.
        ValueError: Not a run log, one of another format version, or one with a damaged line before the last or a line
            of more than `LONGEST_LINE` bytes; a pipe or a device.
        OSError: The file cannot be read (FileNotFoundError if it does not exist).
    """
    path = given_path(path)
    if path.is_dir():
        return _load_ranks(path)
    if not path.exists():
        raise _missing(path)
    with open_log(path) as file:
        header = read_header(path, first := file.readline(LONGEST_HEADER))
        config = read_config(path, header["config"])
        history, events, truncated = _read_entries(path, file, COLUMNS_OF[header["amplab_run"]], LineSums(first))
    if header["amplab_run"] < 3 and isinstance(config, WatchedRun) and np.isnan(history.column("loss")).all():
        history.forget_losses()
    last = _keep_changes(path, history, config, events)
    return Run(
        path=path,
        config=config,
        last_config=last,
        history=history,
        events=tuple(events),
        truncated=truncated,
        started=str(header.get("started", "")),
        version=str(header.get("amplab", "")),
        rank=header.get("rank"),
        world_size=header.get("world_size", 1),
        held=None if header.get("held") is None else tuple(header["held"]),
    )


def _load_ranks(folder: Path) -> Run:
    """Read the logs of all ranks in a folder as one run."""
    logs = rank_logs(folder)
    begun = {rank: path for rank, path in logs.items() if path.stat().st_size}
    logs = begun or logs  # a rank that is killed at its start leaves an empty file
    if not logs:
        raise _no_run(folder)
    runs = [load_run(path) for path in logs.values()]
    for number, run in zip(logs, runs, strict=True):
        if run.rank != number:
            raise ValueError(
                f"{run.path}: the log of {'one process' if run.rank is None else f'rank {run.rank}'}; expected that of "
                f"rank {number}. Give it its own name again, or move it to another folder."
            )
    return replace(
        runs[0],
        path=folder,
        history=joined({each.rank or 0: each.history for each in runs}),
        events=tuple(sorted((event for each in runs for event in each.events), key=lambda event: event["step"])),
        truncated=any(each.truncated for each in runs),
        rank=None,
        ranks=tuple(runs),
    )


def _missing(path: Path) -> FileNotFoundError:
    """Return the error about a log that does not exist. Several ranks write to a folder in place of the file."""
    ranks = path.with_suffix("")
    if ranks.is_dir() and rank_logs(ranks):
        return FileNotFoundError(f"{path}: there is no such file; the logs of the ranks are in a folder: load {ranks}.")
    return FileNotFoundError(f"{path}: there is no such file; expected a run log, such as one in {runs_directory()}.")


def _no_run(folder: Path) -> ValueError:
    """Return the error about a folder that is not that of one run; it names the latest run in the folder."""
    logs = [log for pattern in ("*.jsonl", "*/rank-*.jsonl") for log in folder.glob(pattern) if log.is_file()]
    logs.sort(key=lambda log: log.stat().st_mtime, reverse=True)
    runs = list(dict.fromkeys(log if log.parent == folder else log.parent for log in logs))
    if not runs:
        return ValueError(
            f"{folder}: a folder without run logs; expected the path of a run log, such as {folder / 'run.jsonl'}, or "
            f"a folder with the logs of several ranks, {rank_log(folder, 0).name}, {rank_log(folder, 1).name}, …"
        )
    among = f", the latest of {len(runs)} in it" if len(runs) > 1 else ""
    return ValueError(f"{folder}: a folder of runs; expected one run: load {runs[0]}{among}.")


def _read_entries(
    path: Path, file: BinaryIO, columns: list[str], sums: LineSums
) -> tuple[History, list[dict[str, Any]], bool]:
    """Return the steps and the events of a log, and whether its last line was cut off."""
    history, events = History(), list[dict[str, Any]]()
    for number, entry, is_last in _numbered_entries(file, history, columns, sums):
        match entry:
            case None if is_last:
                return history, events, True
            case None:
                raise ValueError(
                    f"{path}: line {number} is damaged; expected damage in the last line only. The {len(history)} "
                    f"steps before it are intact: to load them, delete line {number} and all lines after it."
                )
            case GradientSample() as sample:
                history.keep(sample)
            case MixedScales() as mixed:
                history.keep_scales(mixed)
            case SkipExplanation() as explanation:
                history.explain(explanation)
            case tuple() as row if row[0] == len(history):
                history.append_row(row)
            case tuple() as row:
                raise ValueError(
                    f"{path}: line {number} holds step {row[0]}; expected step {len(history)}, since lines are missing "
                    f"or repeated. To load the steps before it, delete line {number} and all lines after it."
                )
            case event if event["event"] == "check":
                sums.check(path, number, event)
            case event if event["event"] == "memory":
                held = {each.name: event[each.name] for each in fields(MemoryUse)}
                history.keep_memory(event["step"], MemoryUse(**held))
            case event:
                events.append(event)
    return history, events, False


def _numbered_entries(
    file: BinaryIO, history: History, columns: list[str], sums: LineSums
) -> Iterator[tuple[int, _Entry | None, bool]]:
    """Yield (line number, its entry, None if it is damaged, whether it is the last) from the second line of a file on.

    Among lines without damage, the steps are added to the history together, and not yielded.
    """
    number, lines = 2, _next_lines(file)
    while lines:
        following = _next_lines(file) if lines[-1].endswith(b"\n") else []
        other = [(place, line) for place, line in enumerate(lines) if line[0] != _OF_A_STEP]
        sums.add(lines, number, [place for place, line in other if is_check(line)])
        read = [(number + place, _read_line(line, columns)) for place, line in other if line.strip()]  # not blank ones
        is_regular = columns == list(COLUMNS) and all(entry is not None for _, entry in read)
        steps = read_steps(_without(lines, [place for place, _ in other]), len(history)) if is_regular else None
        if steps is None:
            read = [(each, _read_line(line, columns)) for each, line in enumerate(lines, number) if line.strip()]
        else:
            history.extend(steps)
        last = None if following else number + len(lines) - 1
        yield from ((each, entry, each == last) for each, entry in read)
        number, lines = number + len(lines), following


def _without(lines: list[bytes], places: list[int]) -> list[bytes]:
    """Return lines without those at some places, which are few."""
    rest = [*lines]
    for place in reversed(places):
        del rest[place]
    return rest


def _next_lines(file: BinaryIO) -> list[bytes]:
    """Return some lines. One without an end is the last, even if the process that writes it adds to it meanwhile."""
    read = file.read(_BATCH)
    if read and not read.endswith(b"\n"):
        read += file.readline(LONGEST_LINE)
        if len(read) > LONGEST_LINE and not read.endswith(b"\n"):
            place = file.tell() - len(read) + read.rfind(b"\n") + 1
            raise ValueError(
                f"{file.name}: a line of more than {LONGEST_LINE >> 20} MB after the first {place} bytes; expected "
                "shorter lines. To load the steps before it, delete it and all lines after it."
            )
    return BytesIO(read).readlines()


def _keep_changes(
    path: Path, history: History, config: ExperimentConfig | WatchedRun, events: list[dict[str, Any]]
) -> ExperimentConfig | WatchedRun:
    """Add to a history what was changed in the run, and return the config at its end."""
    if not isinstance(config, ExperimentConfig):
        return config
    history.keep_changes(start_change(config))
    for event in events:
        if event["event"] == "config" and isinstance(now := read_config(path, event["config"]), ExperimentConfig):
            history.keep_changes(*config_changes(config, now, event["step"]))
            config = now
        elif event["event"] == "inject":
            history.keep_changes(fault_change(event["fault"], event["step"], on=event["on"]))
        elif event["event"] == "restart":
            history.keep_changes(restart_change(event["step"]))
    return config


def _read_line(line: bytes, columns: list[str]) -> _Entry | None:
    """Return the step, the histogram, the scales or the event of a line; None if it is damaged."""
    entry = read_json(line)
    if isinstance(entry, dict):
        return read_event(entry)
    if isinstance(entry, list) and len(entry) == len(columns):
        return read_step(dict(zip(columns, entry, strict=True)))
    return None
