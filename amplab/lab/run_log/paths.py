"""Where run logs are: their folder, free names in it, and places where no log can be."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TypeVar

from amplab.amp.run_state.paths import given_path, short_name, special_kind, target_of
from amplab.lab.config import ExperimentConfig
from amplab.lab.watched_run import WatchedRun
from amplab.policies.signals import deferring_signals

__all__ = ["check_writable", "create_free", "free_path", "is_log_file", "log_target", "new_path", "runs_directory"]

Created = TypeVar("Created")


def runs_directory() -> Path:
    """Return the folder of run logs: $AMPLAB_RUNS, else ~/.amplab/runs. Raises: ValueError, if there is no home."""
    return given_path(os.environ.get("AMPLAB_RUNS") or "~/.amplab/runs", "AMPLAB_RUNS")


def new_path(directory: Path, config: ExperimentConfig | WatchedRun) -> Path:
    """Return a free path in `directory`, named by the time, what is trained and how.

    Code can make a class of any name, such as `../Net`: what could lead elsewhere or be misread in a name is a `-`.
    """
    if isinstance(config, WatchedRun):
        what = f"{config.model}-{config.scaling}"
    else:
        what = f"{config.task}-{config.model}-{config.opt_level}"
    name = short_name(re.sub(r"[^\w.-]", "-", what), 200)
    return free_path(directory / f"{datetime.now():%Y%m%d-%H%M%S}-{name}.jsonl")


@deferring_signals
def free_path(path: Path) -> Path:
    """Return `path`, or if something has that name, the first of path-2, path-3, … that is free."""
    candidate, number = path, 1
    while os.path.lexists(candidate):
        number += 1
        end = f"-{number}{path.suffix}"
        candidate = path.with_name(short_name(path.stem, 255 - len(os.fsencode(end))) + end)
    return candidate


@deferring_signals
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


def is_log_file(target: Path) -> bool:
    """Return whether a path is that of a log, not of a folder of logs."""
    return target.suffix == ".jsonl" and not target.is_dir()


@deferring_signals
def log_target(wanted: Path) -> Path:
    """Return the folder or the file to which a log goes; of a link the path of its target, which need not exist.

    Raises:
        OSError: something else is there, such as a pipe or a device; or a link that leads back to itself.
    """
    target = target_of(wanted) if os.path.islink(wanted) else wanted
    there = next((each for each in (target, *target.parents) if os.path.lexists(each)), target)
    kind = special_kind(there) or ("a file" if there.is_file() else "")
    if kind not in ("", "a folder") and not (kind == "a file" and there == target and is_log_file(target)):
        raise OSError(f"{there} is {kind}")
    return target


@deferring_signals
def check_writable(path: str | PathLike[str], argument: str, advice: str) -> None:
    """Raise a ValueError if no log can be written to `path`: before training, not during it.

    Args:
        path: a folder, which is created, or a .jsonl file.
        argument: the argument's name for the message, such as "log=".
        advice: the last sentence of the message.
    """
    try:
        wanted = given_path(path, argument.rstrip(" ="))
    except OSError as error:
        raise ValueError(f"{error} {advice}") from error
    try:
        target = log_target(wanted)
        folder = target.parent if is_log_file(target) else target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\n")  # a full disk makes empty files
    except OSError as error:
        raise ValueError(
            f"{argument}{path}: cannot write there ({error.strerror or error}); expected a writable folder or .jsonl "
            f"file. {advice}"
        ) from error
