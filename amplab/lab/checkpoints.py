"""Checkpoints of a run beside its log: a kernel that restarts continues the run, bit for bit as if not interrupted.

    20261122-140512-digits-mlp-O1.jsonl         the run log
    20261122-140512-digits-mlp-O1.checkpoint    weights, optimizer state, loss scale, position; replaced each time

A checkpoint is written every few seconds, at most a hundredth of the time, when the run pauses, after each change of a
paused run, and some seconds after its single steps. It says how long the log was then: a continued run has a new log,
which begins with that part of the old one. A folder keeps the checkpoints of the last `KEPT` runs, of the
`KEPT_LONGEST` longest ones before them, and those of runs that a process has not left. No run is offered while its
process lives, even after a reset: a process locks the log of each of its runs that has a checkpoint until it ends.

Several ranks have one checkpoint, that of rank 0 (see `run_log.ranks`). When torchrun has started them again, each
continues its own log from there; the logs as they were are in the folder attempt-0, attempt-1, …
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import BinaryIO, Protocol
from weakref import WeakSet

from amplab.amp.run_state.file_format import RunStateError, remove_partials, write_atomically
from amplab.lab.code_digests import WEIGHTS
from amplab.lab.config import OWN, ExperimentConfig
from amplab.lab.experiment import Experiment
from amplab.lab.rank_exchange import RankExchange
from amplab.lab.run_log import create_free, launch_of
from amplab.lab.run_log.checksums import is_check
from amplab.lab.run_log.header import open_log
from amplab.lab.run_log.lock import hold, is_held
from amplab.lab.run_log.ranks import rank_log
from amplab.lab.saved_experiment import read_saved
from amplab.lab.tasks import TASKS
from amplab.parallel.ranks import Rank
from amplab.policies.signals import DeferredSignals, is_interrupt

__all__ = [
    "EVERY_SECONDS",
    "KEPT",
    "KEPT_LONGEST",
    "Checkpoint",
    "Checkpoints",
    "begin_again",
    "checkpoint_of_launch",
    "keep_checkpoint_of",
    "last_checkpoint",
]

KEPT = 5
"""Runs of a folder whose checkpoint is kept: the latest ones."""

KEPT_LONGEST = 3
"""Earlier runs whose checkpoint is kept as well, until `LONGEST_AGO`: those with the most steps."""

SUFFIX = ".checkpoint"
LONGEST_AGO = 7 * 24 * 3600.0
"""Seconds after which a checkpoint is not offered any more."""

SHORT = 0.01
"""A run of less than this share of the steps of the longest one is offered only if no longer run can be."""

EVERY_SECONDS = 5.0
"""Seconds from one checkpoint to the next, at least."""

_SHARE = 0.01
_MOST_HELD = 64  # locked logs of ended runs, whatever their folders
_LONGEST_LOCKED = 1.0  # seconds for all logs of a folder that others have locked
_CLOCKS_DIFFER = 60.0  # seconds; of this machine and of one that serves its files

_CONTINUATION = re.compile("[1-9][0-9]{0,8}")  # the end of a name that `free_path` gives

_guard = threading.Lock()
_held: dict[Path, int] = {}  # the logs that this process has locked
_at_work: WeakSet[Checkpoints] = WeakSet()  # of the runs that this process trains
_kept: WeakSet[_Kept] = WeakSet()  # that may continue from their checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A run that can be continued.

    Attributes:
        path: The file.
        config: The config at that step.
        step: Number of steps.
        saved: When it was written.
        learning_rate: The one in effect; None in older files.
        digests: Of the parts of code of one's own; see `code_digests`.
        others: The parts that are others in this process.
    """

    path: Path
    config: ExperimentConfig
    step: int
    saved: datetime
    learning_rate: float | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the run is called: "run of 14:05"."""
        return f"run of {self.saved:%H:%M}"

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self.path.with_suffix(".jsonl")

    def of_task(self, name: str, model: str) -> Checkpoint | None:
        """Return it for a task of one's own that this process has, under another name perhaps; None for other weights.

        Args:
            name: Of the task.
            model: Name of the model that it trains here.
        """
        here = TASKS[name].digests
        if not self.digests or not here:  # of an older version; or code that cannot be looked at
            return self if (self.config.task, self.config.model) == (name, model) else None
        if self.digests.get(WEIGHTS) != here[WEIGHTS]:
            return None
        parts = dict.fromkeys((*here, *self.digests))
        others = tuple(part for part in parts if here.get(part) != self.digests.get(part))
        config = replace(self.config, task=name, model=model)
        if config.optimizer != OWN:  # the config says which one goes on
            others = tuple(part for part in others if part != "optimizer")
        if self.learning_rate is not None and config.learning_rate != self.learning_rate:  # another default
            config = replace(config, lr=self.learning_rate)
        return replace(self, config=config, others=others)

    def restore(self, exchange: RankExchange | None = None) -> tuple[Experiment, Path]:
        """Return the experiment, and a new log with everything up to this step.

        Args:
            exchange: With the other ranks, which restore the same checkpoint; the log is then that of this rank.

        Raises:
            OSError: A file cannot be read or written.
            RunStateError: The checkpoint is damaged.
            ValueError: It belongs to another version of the config, or its log is shorter than it says.
        """
        experiment, extra = Experiment.load(self.path, self.config, exchange=exchange)
        if exchange is not None:
            return experiment, begin_again(rank_log(self.path.parent, exchange.place.rank), self.step)
        wanted = extra.get("log_bytes", 0)
        with open_log(self.log) as old:
            found = os.fstat(old.fileno()).st_size
            if found < wanted:  # `read` would allocate what an altered checkpoint says
                raise ValueError(
                    f"{self.log}: {found:,} bytes; expected the log of the checkpoint, with {wanted:,} bytes. One of "
                    "them was altered, or lost its end: start a new run, or use intact copies of both."
                )
            kept = old.read(wanted)
        log = create_free(_first_of(self.log), lambda free: free.open("xb"))
        try:
            with log:
                log.write(kept if kept.endswith(b"\n") else kept + b"\n")  # for the lines that follow
        except BaseException:
            Path(log.name).unlink(missing_ok=True)
            raise
        return experiment, Path(log.name)


def _first_of(log: Path) -> Path:
    """Return the log whose continuation this one is, by its name, so that run-2 continues as run-3; else itself."""
    stem, _, number = log.stem.rpartition("-")
    first = log.with_name(f"{stem}{log.suffix}")
    return first if stem and _CONTINUATION.fullmatch(number) and first.is_file() else log


class _Kept(Protocol):
    """A run whose checkpoint is needed while the run is there."""

    saved: Path | None


def keep_checkpoint_of(run: _Kept) -> None:
    """Let no newer run of this process displace the checkpoint `saved` of a run while the run is there."""
    with _guard:
        _kept.add(run)


class Checkpoints:
    """Writes the checkpoints of one run.

    Args:
        log: The run's log; the checkpoint is beside it.

    Attributes:
        log: The run's log.
        path: The checkpoint.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.path = log.with_suffix(SUFFIX)
        self._due = time.monotonic() + EVERY_SECONDS
        self._size = -1  # of the log, at the last checkpoint
        with _guard:
            _at_work.add(self)

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._due

    def write(self, experiment: Experiment) -> None:
        """Replace the checkpoint; the log must have been flushed. No effect if it has not grown since the last one.

        Raises:
            OSError: It cannot be written; the last one is unchanged, and the next one is due as after a success.
            RunStateError: The experiment holds a value that cannot be saved.
        """
        size = self.log.stat().st_size  # grows with each step, and with each change of the config or a fault
        if size == self._size:
            return
        began = time.monotonic()
        try:
            self._replace(experiment, size)
        finally:
            ended = time.monotonic()
            self._due = ended + max(EVERY_SECONDS, (ended - began) / _SHARE)

    def _replace(self, experiment: Experiment, size: int) -> None:
        with _guard:
            if self._size < 0 and self.path.exists() and _steps_of(self.path) is None:
                raise FileExistsError("the lab did not write the file there and does not replace it; move it elsewhere")
            _hold(self.log)
            experiment.save(self.path, {"log_bytes": size, "saved": datetime.now().isoformat()})
            if self._size < 0:
                _prune(self.log.parent)
        self._size = size


def checkpoint_of_launch(folder: Path, place: Rank) -> Checkpoint | None:
    """Return the checkpoint from which ranks that torchrun has started again continue; None if there is none yet.

    Args:
        folder: Where the folders of the runs are.
        place: This rank; the run is the latest one of its launch.

    Raises:
        ValueError: The run had another number of ranks.
    """
    for path in _newest_first(folder, f"*/rank-0{SUFFIX}"):
        try:
            launch, world_size = launch_of(path.with_suffix(".jsonl"))
        except (OSError, ValueError):  # of another run, which has lost its log: ours was written before its checkpoint
            continue
        if launch != place.launch:
            continue
        if world_size != place.world_size:
            raise ValueError(
                f"{path}: a run on {world_size} ranks, and there are {place.world_size} now; expected as many, as "
                "each trains its own share of the data. Start torchrun with the same --nproc-per-node and --nnodes."
            )
        return _read(path)
    return None


def begin_again(log: Path, step: int) -> Path:
    """Keep the log of a rank in a folder attempt-N, and cut it to what was before a step.

    A process that is killed meanwhile leaves a log that can be cut again.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The log has lost its first line.
    """
    with open_log(log) as old:
        if not old.readline().endswith(b"\n"):
            raise ValueError(
                f"{log}: no first line; expected the log of the checkpoint beside it. It was altered, or lost its end: "
                "use an intact copy of the log, or remove the checkpoint and train from the start."
            )
    aside = next(each for number in count() if not (each := log.parent / f"attempt-{number}" / log.name).exists())
    aside.parent.mkdir(exist_ok=True)
    try:
        aside.hardlink_to(log)
    except OSError:  # a drive without hard links
        write_atomically(aside, lambda file: file.write(log.read_bytes()))

    def write(file: BinaryIO) -> None:
        with aside.open("rb") as old:
            file.write(old.readline())
            for line in old:
                # The next checksum of the process that goes on is of all lines that are kept.
                entry = json.loads(line) if line.endswith(b"\n") and not is_check(line) else None
                if entry is not None and (entry["step"] if isinstance(entry, dict) else entry[0]) < step:
                    file.write(line)

    write_atomically(log, write)
    return log


def _read(path: Path, *, whole: bool = True) -> Checkpoint:
    steps, extra = read_saved(path, whole=whole)
    saved = datetime.fromisoformat(extra["saved"])
    config, rate = ExperimentConfig.of_file(extra["config"]), extra.get("learning_rate")
    return Checkpoint(path, config, steps, saved, rate, extra.get("digests", {}))


def last_checkpoint(
    folder: Path, as_here: Callable[[Checkpoint], Checkpoint | None] = lambda saved: saved
) -> Checkpoint | None:
    """Return the latest checkpoint in `folder` that can be continued, None if there is none of the last 7 days.

    A short run, such as a step that was made by mistake, does not hide a long one: see `SHORT`.

    Args:
        folder: Where the logs are.
        as_here: Returns it with the config that it has in this process; None if no experiment can be made of it. A
            large file of another one is not read.
    """
    until, found = time.monotonic() + _LONGEST_LOCKED, list[Checkpoint]()
    for path in _newest_first(folder, f"*{SUFFIX}"):
        with _skipping_damaged():
            log = path.with_suffix(".jsonl")
            if not _is_recent(path) or not log.is_file() or is_held(log, until=until):
                continue  # on Windows a run in another kernel is offered, too
            if as_here(saved := _read(path, whole=False)) is not None:
                found.append(saved)
    longest = max((each.step for each in found), default=0)
    for each in sorted(found, key=lambda each: each.step < SHORT * longest):  # else the newest first, as they are
        with _skipping_damaged():
            return as_here(_read(each.path))
    return None


@contextmanager
def _skipping_damaged() -> Iterator[None]:
    """Go on after a block that has met a damaged file, or one that is not there any more."""
    try:
        yield
    except (OSError, RunStateError, ValueError, KeyError, TypeError) as error:
        if is_interrupt(error):
            raise


def _is_recent(path: Path) -> bool:
    """Return whether a checkpoint was written in the last 7 days."""
    return time.time() - path.stat().st_mtime <= LONGEST_AGO


def _newest_first(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files, those that a clock which was ahead has dated later than now at the end."""
    dated, latest = [], time.time() + _CLOCKS_DIFFER
    for path in folder.glob(pattern):
        with DeferredSignals(), suppress(OSError):  # removed meanwhile
            changed = path.stat().st_mtime
            dated.append(((changed <= latest, changed), path))
    yield from (path for _, path in sorted(dated, reverse=True))


def _steps_of(path: Path) -> int | None:
    """Return the steps of a checkpoint; None for a file of others: programs give their files the same ending."""
    try:
        return read_saved(path, whole=False)[0]
    except (OSError, RunStateError):
        return None


def _prune(folder: Path) -> None:
    """Remove all checkpoints but the latest and the longest; unlock the logs of runs without one.

    Those of the runs that this process trains or keeps beside them stay, of whatever date, and those of other processes
    that live. Other files stay.
    """
    remove_partials(folder, f"*{SUFFIX}")
    present, until = {each.path for each in _at_work}, time.monotonic() + _LONGEST_LOCKED
    present |= {each.saved for each in _kept if each.saved is not None}
    paths = _newest_first(folder, f"*{SUFFIX}")
    for path in _shortest([path for path in paths if _is_ours(path.with_suffix(".jsonl"), until)][KEPT:]):
        if path not in present:
            with suppress(OSError):
                path.unlink()
    for log in [log for log in _held if not os.path.exists(log.with_suffix(SUFFIX))]:
        os.close(_held.pop(log))


def _shortest(paths: list[Path]) -> list[Path]:
    """Return the checkpoints among some files, without the longest runs that can still be offered."""
    found = list[tuple[int, Path]]()
    for path in paths:
        with suppress(OSError):  # removed meanwhile
            if (steps := _steps_of(path)) is not None:
                found.append((steps if _is_recent(path) else -1, path))
    found.sort(key=lambda each: each[0], reverse=True)  # of as many steps the newest first, as they are
    longest = [path for steps, path in found[:KEPT_LONGEST] if steps >= 0]
    return [path for _, path in found if path not in longest]


def _is_ours(log: Path, until: float) -> bool:
    """Return whether a log is there, and no other process writes it or keeps it from being read."""
    try:
        return log.is_file() and (log in _held or not is_held(log, until=until))
    except OSError:
        return False


def _guard_anew() -> None:
    """In a forked process: the thread that had the guard is not there, and the logs are the other process's."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _at_work.clear()
    _kept.clear()
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard_anew)


def _hold(log: Path) -> None:
    """Lock a log until this process ends, in whatever way."""
    if log not in _held:
        _held[log] = os.open(log, os.O_RDONLY)
        hold(_held[log])
        present = {each.log for each in _at_work}
        for old in [each for each in _held if each not in present][:-_MOST_HELD]:  # a lock takes a file descriptor
            os.close(_held.pop(old))
