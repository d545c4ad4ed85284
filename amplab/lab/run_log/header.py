"""The first line of a run log: its format, what was started, and which of several processes wrote it."""

from __future__ import annotations

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from amplab import __version__
from amplab.amp.run_state.paths import special_kind
from amplab.lab.config import ExperimentConfig
from amplab.lab.history import COLUMNS
from amplab.lab.run_log.json_lines import is_count, read_json
from amplab.lab.run_log.paths import runs_directory
from amplab.lab.run_log.step_lines import OLD_NAMES
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.ranks import Rank

__all__ = [
    "COLUMNS_OF",
    "FORMAT",
    "LONGEST_HEADER",
    "held_by",
    "launch_of",
    "new_header",
    "open_log",
    "read_config",
    "read_header",
]

FORMAT = 4
"""Version of the file format, the value of "amplab_run" in the header."""

_OLD_COLUMNS = [OLD_NAMES.get(name, name) for name in COLUMNS]

COLUMNS_OF = {1: _OLD_COLUMNS[:-1], 2: _OLD_COLUMNS, 3: _OLD_COLUMNS, FORMAT: list(COLUMNS)}
"""The values of a step's line, by format."""

LONGEST_HEADER = 65536
"""Bytes."""


def new_header(
    path: Path, config: ExperimentConfig | WatchedRun, rank: Rank | None, *, is_held: bool
) -> dict[str, Any]:
    """Return the header of a log that begins now.

    Args:
        path: the log, which exists.
        config: what the run starts with.
        rank: this process, of several that train together.
        is_held: whether the process holds the lock of the log.
    """
    header = {"amplab_run": FORMAT, "amplab": __version__, "started": datetime.now(UTC).isoformat("T", "milliseconds")}
    place = {} if rank is None else {**asdict(rank), "held": held_by(path) if is_held else ["", 0]}
    return {**header, **place, "config": str(config), "columns": list(COLUMNS)}


def held_by(path: Path) -> list[str | int]:
    """Return what tells a log from a copy of it elsewhere: the host and the inode."""
    return [platform.node(), path.stat().st_ino]


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading. Raises: ValueError, if it is a pipe or a device, which may have no end."""
    if kind := special_kind(path):
        raise ValueError(
            f"{path}: not a regular file but {kind}; expected a run log, such as one in {runs_directory()}."
        )
    return path.open("rb")


def read_header(path: Path, line: bytes) -> dict[str, Any]:
    """Return the header of a log. Raises: ValueError, if it is no log, or one of another format."""
    header = read_json(line)
    if not isinstance(header, dict) or "amplab_run" not in header:
        what = "no run log" if line else "an empty file, as a process leaves it that is killed at its start"
        raise ValueError(
            f"{path}: {what}; expected a run log of amplab, a .jsonl file whose first line holds "
            f'"amplab_run". The default folder of run logs is {runs_directory()}.'
        )
    version = header["amplab_run"]
    columns = COLUMNS_OF.get(version) if type(version) is int else None
    if columns is None:
        raise ValueError(
            f"{path}: a run log of format {header['amplab_run']}, written by amplab {header.get('amplab', '?')}: "
            f"amplab {__version__} reads formats {', '.join(map(str, COLUMNS_OF))}; load it with the version that "
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


def read_config(path: Path, text: object) -> ExperimentConfig | WatchedRun:
    """Return the config in a header or in an event of a log. Raises: ValueError, if it is none of this version."""
    try:
        if WatchedRun.is_header(str(text)):
            return WatchedRun.parse(str(text))
        return ExperimentConfig.of_file(str(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def launch_of(path: Path) -> tuple[str, int]:
    """Return the launch of the processes of which one wrote a log, and their number; ("", 1) of a single process.

    Raises:
        OSError, ValueError: As `load_run`.
    """
    with open_log(path) as file:
        header = read_header(path, file.readline(LONGEST_HEADER))
    return header.get("launch", ""), header.get("world_size", 1)
