"""A run on disk while it happens: JSON lines, append-only, readable after a kill.

    {"amplab_run": 4, "amplab": "0.1.0", "started": "…", "config": "amplab/1 task=digits …", "columns": ["step", …]}
    [0,2.31,65536.0,65536.0,false,null,"O1",null,0.0021,null,-5.0]
    {"event": "config", "step": 120, "config": "amplab/1 task=digits model=mlp opt_level=O2"}

The first line is the header. Of several processes that train together each writes a log of its own, see `rank_logs`,
and the header also has "rank", "world_size", "launch" and "held": the process locks its log while it writes it. An
array is a step, in the order of "columns". An object is an event: a changed config, an injection, a finding, why a step
was skipped, a histogram of the gradients, the bytes that training holds, a restart, or the scales of a step whose
backwards had different ones; of one rank of several also its state, to compare the ranks, and "end", that the log was
closed. Every line is valid JSON: NaN and inf are the words "nan", "inf" and "-inf", and a missing loss is null (up to
format 2 it was "nan" too). Each step reaches the operating system as it ends, so a killed process loses none; its last
line may be cut off. On a disk that needs more than 0.2 ms for a write, steps wait for a later step, which is written
after at most `FLUSH_SECONDS`; a process that is killed before that, also in a long pause of its loop, loses those that
wait. While a disk is full, up to `MOST_WAITING` lines wait in memory; what was written of them is removed before they
are written again, so that no line in the middle is torn. A step takes about 95 bytes: a million steps are 95 MB, a
histogram of the gradients adds 200 bytes and 50 for each parameter. `load_run` reads a million steps in about 5
seconds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from amplab import __version__
from amplab.amp import MemoryUse
from amplab.amp.run_state.paths import given_path, short_name, special_kind, target_of
from amplab.diagnose import Finding, Findings, WhatIf, WhatIfs, run_findings
from amplab.diagnose.rules.ranks import RankEnd, rank_lost, ranks_findings
from amplab.display.numbers import count
from amplab.display.table import Table
from amplab.display.text import visible
from amplab.formats import ExponentHistogram
from amplab.lab.changes import config_changes, fault_change, restart_change, start_change
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.findings import finding_from_log, observed_run, with_explained
from amplab.lab.history import COLUMNS, History, row_of
from amplab.lab.log_events import Event, is_count, read_event, read_number
from amplab.lab.log_lock import hold, is_held
from amplab.lab.rank_logs import (
    RankDifference,
    findings_of_ranks,
    is_rank_log,
    joined,
    rank_differences,
    rank_log,
    rank_logs,
    rank_table,
)
from amplab.lab.skip_explanation import SkipExplanation
from amplab.lab.step_lines import read_steps
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import Rank
from amplab.scalers import ScaleRule

__all__ = [
    "FLUSH_SECONDS",
    "FORMAT",
    "MOST_WAITING",
    "DiskFull",
    "Run",
    "RunLog",
    "check_writable",
    "create_free",
    "free_path",
    "launch_of",
    "load_run",
    "new_path",
    "runs_directory",
]

FORMAT = 4
"""Version of the file format, the value of "amplab_run" in the header."""

_OLD_NAMES = {"score": "accuracy"}  # up to format 3
_NEW_NAMES = {old: new for new, old in _OLD_NAMES.items()}
_OLD_COLUMNS = [_OLD_NAMES.get(name, name) for name in COLUMNS]
_COLUMNS_OF = {1: _OLD_COLUMNS[:-1], 2: _OLD_COLUMNS, 3: _OLD_COLUMNS, FORMAT: list(COLUMNS)}

FLUSH_SECONDS = 0.2
"""The longest time from one write to the next on a slow disk, while steps go on."""

MOST_WAITING = 2**16
"""Lines that wait in memory for space on a full disk: 6 MB of steps."""

Created = TypeVar("Created")

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
_LONGEST_HEADER = 65536
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_QUICK = 2e-4  # seconds of a write; after a longer one the next steps are written together
_SHARE = 0.05  # of the time, at most, that writing then takes
_RETRY_SECONDS = 1.0  # between two attempts to write to a full disk
_BATCH = 2**15  # bytes that are parsed together: much more no longer fits into the caches of a core


def runs_directory() -> Path:
    """Return the folder of run logs: $AMPLAB_RUNS, else ~/.amplab/runs."""
    named = os.environ.get("AMPLAB_RUNS")
    return given_path(named, "AMPLAB_RUNS") if named else Path.home() / ".amplab" / "runs"


def new_path(directory: Path, config: ExperimentConfig | WatchedRun) -> Path:
    """Return a free path in `directory`, named by the time, what is trained and how."""
    if isinstance(config, WatchedRun):
        what = f"{config.model}-{config.scaling}"
    else:
        what = f"{config.task}-{config.model}-{config.opt_level}"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{short_name(what, 200)}.jsonl"
    return free_path(directory / name)


def free_path(path: Path) -> Path:
    """Return `path`, or if something has that name, the first of path-2, path-3, … that is free."""
    candidate, number = path, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


def create_free(path: Path, create: Callable[[Path], Created]) -> Created:
    """Return what `create` makes at `free_path(path)`, or at the next one if another process was faster.

    Args:
        path: the wanted path.
        create: raises FileExistsError for a path that exists, as `open` with "x" does.
    """
    while True:
        free = free_path(path)
        try:
            return create(free)
        except FileExistsError:
            if not os.path.lexists(free):
                raise  # about something else


def check_writable(path: str | PathLike[str], argument: str, advice: str) -> None:
    """Raise a ValueError if no log can be written to `path`: before training, not during it.

    Args:
        path: a folder, which is created, or a .jsonl file.
        argument: the argument's name for the message, such as "log=".
        advice: the last sentence of the message.
    """
    try:
        wanted = given_path(path, argument.rstrip(" ="))
        target = target_of(wanted) if os.path.islink(wanted) else wanted
        folder = target.parent if target.suffix == ".jsonl" and not target.is_dir() else target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\n")  # a full disk makes empty files
    except OSError as error:
        raise ValueError(
            f"{argument}{path}: cannot write there ({error.strerror or error}); expected a writable folder or .jsonl "
            f"file. {advice}"
        ) from error


class DiskFull(OSError):
    """A run log cannot grow now; its lines wait in memory, and a later flush writes them."""


class RunLog:
    """The log of one run, open for appending; it never overwrites another file. A forked process writes nothing to it.

    Every method that writes raises an OSError if lines are lost: the log was deleted or shortened meanwhile, more than
    `MOST_WAITING` lines wait for a full disk, the disk has another error. Before that, a full disk is a `DiskFull`,
    once for each attempt to write.

    Args:
        path: A file that does not exist yet; its folder is created.
        config: What the run starts with.
        is_continued: Whether `path` is the closed log of the same run, which is continued.
        rank: This process, of several that train together.

    Raises:
        OSError: The file cannot be created or written (FileExistsError if it exists and is not continued).
    """

    def __init__(
        self,
        path: Path,
        config: ExperimentConfig | WatchedRun,
        *,
        is_continued: bool = False,
        rank: Rank | None = None,
    ) -> None:
        self.path = path
        self._process = os.getpid()
        self._pending: list[tuple[StepRow | None, str]] = []  # lines, those of steps with their row
        self._written: StepRow | None = None  # the last step in the file
        self._is_torn = False  # whether a write has begun that did not end
        self._retry = 0.0  # when a full disk is tried again
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab" if is_continued else "xb", buffering=0, opener=_open_to_append)  # noqa: SIM115
        self._closed_with_me = weakref.finalize(self, self._file.close)
        self._due = 0.0  # when the next step is written
        self._took = 0.0  # seconds of the last write
        self._size = os.fstat(self._file.fileno()).st_size
        is_held = is_rank_log(path) and hold(self._file.fileno())
        if is_continued:
            return
        header = {"amplab_run": FORMAT, "amplab": __version__, "started": datetime.now(UTC).isoformat("T", "seconds")}
        place = {} if rank is None else {**asdict(rank), "held": _held_by(path) if is_held else ["", 0]}
        self._add({**header, **place, "config": str(config), "columns": list(COLUMNS)})
        with suppress(DiskFull):  # the next flush says so
            self.flush()

    def append(self, record: StepRecord) -> None:
        """Write one step; on a slow disk together with the next ones."""
        self.append_row(row_of(record))

    def append_row(self, row: StepRow) -> None:
        """Write one step as its values."""
        if self._is_forked():
            return
        self._pending.append((row, _line(_entries(row))))
        if time.monotonic() >= self._due:
            self.flush()

    def note(self, event: str, *, step: int, **details: object) -> None:
        """Write an event at `step`: its name, and words or numbers that describe it."""
        if self._is_forked():
            return
        self._add({"event": event, "step": step, **details})
        self.flush()

    def keep(self, sample: GradientSample) -> None:
        """Write a histogram of the gradients as an event."""
        layers = {each.name: [each.underflow, each.overflow, each.nonfinite] for each in sample.layers}
        known = {"layers": layers} if layers else {}
        bins = _bins(sample.histogram)
        self.note("gradients", step=sample.step, loss_scale=_number(sample.loss_scale), **bins, **known)

    def explain(self, explanation: SkipExplanation) -> None:
        """Write why a step was skipped as an event."""
        self.note("explanation", **explanation.as_dict())

    def keep_scales(self, mixed: MixedScales) -> None:
        """Write the scales of a step whose backwards had different ones as an event."""
        self.note("scales", step=mixed.step, scales=[_number(scale) for scale in mixed.scales])

    @property
    def last_row(self) -> StepRow | None:
        """The last step that was appended; None before the first of this process."""
        return next((row for row, _ in reversed(self._pending) if row is not None), self._written)

    @property
    def waiting(self) -> int:
        """The number of lines that are not in the file yet."""
        return len(self._pending)

    def flush(self) -> None:
        """Pass every line to the operating system; after an interrupt or on a full disk, the next flush does."""
        if self._is_forked() or not self._pending:
            return
        began = time.monotonic()
        if began < self._retry:
            return
        lines, last = len(self._pending), self.last_row
        try:
            size = self._append("".join(line for _, line in self._pending[:lines]))
        except OSError as error:
            if error.errno not in _FULL or lines > MOST_WAITING:
                raise
            self._retry = self._due = began + _RETRY_SECONDS
            raise DiskFull(error.errno, error.strerror, str(self.path)) from None
        rest = self._pending[lines:]
        # One line without a call: CPython lets no interrupt in between.
        self._pending, self._written, self._size, self._is_torn = rest, last, size, False
        ended = time.monotonic()
        before, self._took = self._took, ended - began
        shorter = min(before, self._took)  # in the longer one the system may have run another process
        self._due = ended + min(FLUSH_SECONDS, shorter / _SHARE) if shorter > _QUICK else 0.0

    def _append(self, text: str) -> int:
        """Write text to the end of the file, and return the size of the file then."""
        found = os.fstat(self._file.fileno())
        if not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was deleted during the run", str(self.path))
        if found.st_size < self._size:
            raise OSError(errno.EIO, "another program has shortened it during the run", str(self.path))
        size = found.st_size
        if self._is_torn and size > self._size:
            self._file.truncate(self._size)
            size = self._size
        self._is_torn = True
        # A file name that is no UTF-8, in the text of an exception, must not end the training.
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        size += len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):  # else the next write does it, or a reader drops the part
                self._file.truncate(self._size)
            raise
        return size

    def keep_state(self, state: RankState) -> None:
        """Write the state of this rank as an event."""
        self.note("state", **state.as_dict())

    def close(self, *, steps: int = 0, raised: str = "") -> None:
        """Flush and close; no effect if closed already. The log of a rank then says that it ended in order.

        Args:
            steps: the number of its steps.
            raised: the exception that ended the loop, in words; "" for none.
        """
        if self._file.closed:
            return
        self._retry = 0.0
        try:
            if is_rank_log(self.path):
                self.note("end", step=steps, raised=raised)
            self.flush()
        except DiskFull as error:
            lost = f"{error.strerror}; its last {count(self.waiting, 'line')} are lost"
            raise OSError(error.errno, lost, str(self.path)) from None
        finally:
            self._file.close()

    def _add(self, values: object) -> None:
        """Add a line that is not a step."""
        self._pending.append((None, _line(values)))

    def _is_forked(self) -> bool:
        """Return whether this is a copy of the process that opened the log, which goes on to write the same steps."""
        return os.getpid() != self._process


@dataclass(frozen=True, eq=False)
class Run:
    """A run read back from its log.

    Attributes:
        path: The file.
        config: What the run started with, or what was watched.
        last_config: The config in effect at its end.
        history: Every step.
        events: The events as they were written: dicts with "event" and "step".
        truncated: Whether the last line was cut off, as after a kill; it is dropped.
        started: Time of the start, ISO 8601, UTC.
        version: The version of amplab that wrote the log.
        rank: Of the process that wrote the log; None for one process, and for the joined run of several.
        world_size: The number of processes that trained together.
        ranks: The runs of the single ranks, in order, if this is the run that they are together; see `rank_logs`.
        held: Host and inode of a rank's log, which its process locks while it writes it; ("", 0) if it could not.
    """

    path: Path
    config: ExperimentConfig | WatchedRun
    last_config: ExperimentConfig | WatchedRun
    history: History
    events: tuple[dict[str, Any], ...]
    truncated: bool
    started: str
    version: str
    rank: int | None = None
    world_size: int = 1
    ranks: tuple[Run, ...] = ()
    held: tuple[str, int] | None = None

    def findings(self) -> Findings:
        """Return what the rules find in the run, with the explanations of its skipped steps, the worst first."""
        found = list(run_findings(observed_run(self.history, self.last_config)))
        explained = self.explained
        if self.ranks:
            found += ranks_findings(
                {r: observed_run(each, self.last_config) for r, each in self.by_rank.items()},
                {each.rank or 0: each.states for each in self.ranks},
            )
            found += rank_lost({each.rank or 0: each.end for each in self.ranks})
            explained = findings_of_ranks({each.rank or 0: each.explained for each in self.ranks})
        return with_explained(found, explained, [record.step for record in self.history.skips()])

    @property
    def explained(self) -> list[tuple[int, Finding]]:
        """The findings in single steps, each with its step."""
        events = [event for event in self.events if event["event"] == "finding"]
        return [(event["step"], finding_from_log(event["finding"])) for event in events]

    @property
    def states(self) -> list[RankState]:
        """The states of this rank, for a comparison with others."""
        read = (RankState.from_dict(event) for event in self.events if event["event"] == "state")
        return [state for state in read if state is not None]

    @property
    def end(self) -> RankEnd:
        """How the log of one rank ends; "unknown" if a process on another host may still write it."""
        steps, quiet = len(self.history), 0.0
        with suppress(OSError):
            quiet = max(0.0, time.time() - self.path.stat().st_mtime)
        last = self.events[-1] if self.events else {"event": ""}
        if (last["event"], last.get("step")) == ("end", steps):
            return RankEnd(steps, "closed", str(last.get("raised", "")), quiet)
        if self.held is None:  # of an earlier version, or of one process
            return RankEnd(steps, "running")
        with suppress(OSError):
            if self.held == tuple(_held_by(self.path)):
                return RankEnd(steps, "running" if is_held(self.path) else "lost", quiet=quiet)
        return RankEnd(steps, "unknown", quiet=quiet)

    @property
    def differences(self) -> tuple[RankDifference, ...]:
        """Where the ranks differ although they must be equal; empty if they agree, and for one process."""
        return rank_differences(self.by_rank) if self.ranks else ()

    def rank_table(self) -> Table:
        """Return one line for each rank; ≠ marks a value that must be equal on all ranks and is not.

        Raises:
            ValueError: This is the run of one process.
        """
        if not self.ranks:
            raise ValueError(f"{self.path}: the log of one process; expected the folder of a run on several ranks.")
        return rank_table(self.by_rank)

    @property
    def by_rank(self) -> dict[int, History]:
        """The history of each rank; empty for one process."""
        return {each.rank or 0: each.history for each in self.ranks}

    def replay(self, rule: ScaleRule | str | None = None) -> WhatIf | WhatIfs:
        """Return what this run would have been under another loss-scaling rule; see `History.replay`."""
        return self.history.replay(rule)

    def __str__(self) -> str:
        """Return one line: what the run was, its numbers of steps and skips, and where its ranks differ."""
        steps, skips = len(self.history), self.history.skip_count
        cut = "; the last line was cut off and is dropped" if self.truncated else ""
        place = f" on rank {self.rank} of {self.world_size}" if self.rank is not None else ""
        if self.ranks:
            here = "" if len(self.ranks) == self.world_size else f", of which {len(self.ranks)} have a log here"
            place = f" on {self.world_size} ranks{here}"
        differ = "".join(f"; {each}" for each in self.differences)
        return visible(f"{self.config}{place}: {steps} steps, {skips} skipped{cut}{differ}")


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run log, or the folder with the logs of all ranks of a run.

    Returns:
        The run; if its last line is cut off, that line is dropped and `truncated` is True. Of a folder, one run with
        the runs of the ranks in `ranks`.

    Raises:
        TypeError: Not a path.
        ValueError: Not a run log, one of another format version, or one with a damaged line before the last; a pipe or
            a device.
        OSError: The file cannot be read (FileNotFoundError if it does not exist).
    """
    path = given_path(path)
    if path.is_dir():
        return _load_ranks(path)
    if kind := special_kind(path):
        raise ValueError(
            f"{path}: not a regular file but {kind}; expected a run log, such as one in {runs_directory()}."
        )
    with path.open("rb") as file:
        header = _read_header(path, file.readline(_LONGEST_HEADER))
        config = _read_config(path, header["config"])
        history, events, truncated = _read_entries(path, file, _COLUMNS_OF[header["amplab_run"]])
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


def _held_by(path: Path) -> list[str | int]:
    """Return what tells a log from a copy of it elsewhere: the host and the inode."""
    return [platform.node(), path.stat().st_ino]


def launch_of(path: Path) -> tuple[str, int]:
    """Return the launch of the processes of which one wrote a log, and their number; ("", 1) of a single process.

    Raises:
        OSError, ValueError: As `load_run`.
    """
    with path.open("rb") as file:
        header = _read_header(path, file.readline(_LONGEST_HEADER))
    return header.get("launch", ""), header.get("world_size", 1)


def _load_ranks(folder: Path) -> Run:
    """Read the logs of all ranks in a folder as one run."""
    logs = rank_logs(folder)
    begun = {rank: path for rank, path in logs.items() if path.stat().st_size}
    logs = begun or logs  # a rank that is killed at its start leaves an empty file
    if not logs:
        raise ValueError(
            f"{folder}: a folder; expected the path of one run log in it, such as {folder / 'run.jsonl'}, or a folder "
            f"with the logs of several ranks, {rank_log(folder, 0).name}, {rank_log(folder, 1).name}, …"
        )
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


def _read_entries(path: Path, file: BinaryIO, columns: list[str]) -> tuple[History, list[dict[str, Any]], bool]:
    """Return the steps and the events of a log, and whether its last line was cut off."""
    history, events = History(), list[dict[str, Any]]()
    for number, entry, is_last in _numbered_entries(file, history, columns):
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
            case event if event["event"] == "memory":
                held = {each.name: event[each.name] for each in fields(MemoryUse)}
                history.keep_memory(event["step"], MemoryUse(**held))
            case event:
                events.append(event)
    return history, events, False


def _numbered_entries(
    file: BinaryIO, history: History, columns: list[str]
) -> Iterator[tuple[int, _Entry | None, bool]]:
    """Yield (line number, its entry, None if it is damaged, whether it is the last) from the second line of a file on.

    Among lines without damage, the steps are added to the history together, and not yielded.
    """
    number, lines = 2, _next_lines(file)
    while lines:
        following = _next_lines(file) if lines[-1].endswith(b"\n") else []
        numbered = [(each, line) for each, line in enumerate(lines, number) if line.strip()]  # an editor leaves blanks
        other = [(each, _read_line(line, columns)) for each, line in numbered if not line.startswith(b"[")]
        is_regular = columns == list(COLUMNS) and all(entry is not None for _, entry in other)
        steps = read_steps([line for line in lines if line.startswith(b"[")], len(history)) if is_regular else None
        if steps is None:
            other = [(each, _read_line(line, columns)) for each, line in numbered]
        else:
            history.extend(steps)
        last = None if following else number + len(lines) - 1
        yield from ((each, entry, each == last) for each, entry in other)
        number, lines = number + len(lines), following


def _next_lines(file: BinaryIO) -> list[bytes]:
    """Return some lines. One without an end is the last, even if the process that writes it adds to it meanwhile."""
    lines = file.readlines(_BATCH)
    ends = (place for place, line in enumerate(lines, 1) if not line.endswith(b"\n"))
    return lines[: next(ends, len(lines))]


def _read_header(path: Path, line: bytes) -> dict[str, Any]:
    header = _json(line)
    if not isinstance(header, dict) or "amplab_run" not in header:
        what = "no run log" if line else "an empty file, as a process leaves it that is killed at its start"
        raise ValueError(
            f"{path}: {what}; expected a run log of amplab, a .jsonl file whose first line holds "
            f'"amplab_run". The default folder of run logs is {runs_directory()}.'
        )
    version = header["amplab_run"]
    columns = _COLUMNS_OF.get(version) if type(version) is int else None
    if columns is None:
        raise ValueError(
            f"{path}: a run log of format {header['amplab_run']}, written by amplab {header.get('amplab', '?')}: "
            f"amplab {__version__} reads formats {', '.join(map(str, _COLUMNS_OF))}; load it with the version that "
            f"wrote it."
        )
    if header.get("columns") != columns or not isinstance(header.get("config"), str):
        raise ValueError(f"{path}: the header is damaged; expected a config and the columns {', '.join(columns)}.")
    if not _is_place(header.get("rank"), header.get("world_size", 1), header.get("launch", ""), header.get("held")):
        raise ValueError(f"{path}: the header is damaged; expected a rank below world_size, a launch and what is held.")
    return header


def _is_place(rank: Any, world_size: Any, launch: Any, held: Any) -> bool:
    """Return whether a header says soundly which of several processes wrote the log."""
    of_rank = rank is None or (is_count(rank) and is_count(world_size) and rank < world_size)
    of_file = held is None or (isinstance(held, list) and [type(each) for each in held] == [str, int])
    return of_rank and of_file and is_count(world_size) and isinstance(launch, str)


def _read_config(path: Path, text: object) -> ExperimentConfig | WatchedRun:
    try:
        if WatchedRun.is_header(str(text)):
            return WatchedRun.parse(str(text))
        return ExperimentConfig.parse(str(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _keep_changes(
    path: Path, history: History, config: ExperimentConfig | WatchedRun, events: list[dict[str, Any]]
) -> ExperimentConfig | WatchedRun:
    """Add to a history what was changed in the run, and return the config at its end."""
    if not isinstance(config, ExperimentConfig):
        return config
    history.keep_changes(start_change(config))
    for event in events:
        if event["event"] == "config" and isinstance(now := _read_config(path, event["config"]), ExperimentConfig):
            history.keep_changes(*config_changes(config, now, event["step"]))
            config = now
        elif event["event"] == "inject":
            history.keep_changes(fault_change(event["fault"], event["step"], on=event["on"]))
        elif event["event"] == "restart":
            history.keep_changes(restart_change(event["step"]))
    return config


_KINDS: dict[str, Any] = {"skipped": bool, "opt_level": str, "first_nonfinite": str | None, "injected": str | None}
_NULLABLE = ("loss", "score", "grad_exponent")
_NUMBERS = ("loss", "loss_scale", "next_loss_scale", "score", "seconds", "grad_exponent")


_Entry = StepRow | Event


def _read_line(line: bytes, columns: list[str]) -> _Entry | None:
    """Return the step, the histogram, the scales or the event of a line; None if it is damaged."""
    entry = _json(line)
    if isinstance(entry, dict):
        return read_event(entry)
    if isinstance(entry, list) and len(entry) == len(columns):
        return _read_step(dict(zip(columns, entry, strict=True)))
    return None


def _read_step(values: dict[str, Any]) -> StepRow | None:
    """Return the row of a step from the values of its line; None if it is damaged."""
    values = {_NEW_NAMES.get(name, name): value for name, value in values.items()}
    sound = is_count(values["step"]) and all(isinstance(values[name], kind) for name, kind in _KINDS.items())
    unmeasured = [name for name in _NULLABLE if values.get(name) is None]
    numbers = {name: read_number(values[name]) for name in _NUMBERS if name not in unmeasured}
    exponent = numbers.get("grad_exponent") or 0.0
    if not sound or None in numbers.values() or (math.isfinite(exponent) and not exponent.is_integer()):
        return None
    row = {**values, **dict.fromkeys(unmeasured), **numbers}
    return cast(StepRow, tuple(row[name] for name in COLUMNS))


def _bins(histogram: ExponentHistogram) -> dict[str, object]:
    """Return a histogram as JSON: its occupied bins, and the numbers of zeros, infs and NaNs."""
    low, high = histogram.span or (0, -1)
    counts = histogram.counts[low - histogram.low : high - histogram.low + 1].tolist() if low <= high else []
    return {"low": low, "counts": counts, "zeros": histogram.zeros, "infs": histogram.infs, "nans": histogram.nans}


def _json(line: bytes) -> object:
    """Return the value of a line, None if it is not JSON."""
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if b"\\ud" in line.lower():  # half of a pair, which no file and no page can hold
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word}: expected JSON, which has no such number.")


def _line(values: object) -> str:
    return _encode(values) + "\n"


def _open_to_append(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o666)


def _entries(row: StepRow) -> list[object]:
    """Return a step as the values of its line, with NaN and inf as words."""
    return [_number(value) if isinstance(value, float) else value for value in row]


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
