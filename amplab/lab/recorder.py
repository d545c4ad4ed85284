"""What is kept of a run: its history in memory, and its log on disk where one is wanted and can be written.

A log that cannot be made or written is told through `on_failure`, once, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path

from amplab.lab.config import ExperimentConfig
from amplab.lab.events import GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.history import History, row_of
from amplab.lab.run_log import RunLog, free_path, new_path
from amplab.lab.watched_run import WatchedRun

__all__ = ["Recorder"]


class Recorder:
    """Keeps the steps and the events of one run.

    The log is opened at the first step or event, so a run that never began leaves no file.

    Args:
        config: What the run starts with.
        log: A folder (a new file is named in it), a file (path-2, path-3, … where it is there), or None for no log.
        on_failure: Called with a sentence when the log fails.
    """

    def __init__(
        self,
        config: ExperimentConfig | WatchedRun,
        *,
        log: str | PathLike[str] | None,
        on_failure: Callable[[str], None],
    ) -> None:
        self.history = History()
        self._config = config
        self._wanted = None if log is None else Path(log)
        self._on_failure = on_failure
        self._log: RunLog | None = None
        self._path: Path | None = None

    @property
    def log_path(self) -> Path | None:
        """The file of the log, None before the first step and where there is none."""
        return self._path

    def append(self, record: StepRecord) -> None:
        """Keep one step."""
        self.append_row(row_of(record))

    def append_row(self, row: StepRow) -> None:
        """Keep one step as its values."""
        self.history.append_row(row)
        if self._wanted is not None:
            self._write(RunLog.append_row, row)

    def keep(self, sample: GradientSample) -> None:
        """Keep a histogram of the gradients."""
        self.history.keep(sample)
        if self._wanted is not None:
            self._write(lambda log: log.keep(sample))

    def keep_scales(self, mixed: MixedScales) -> None:
        """Keep the scales of one step's backwards, which were not all the same."""
        self.history.keep_scales(mixed)
        if self._wanted is not None:
            self._write(lambda log: log.keep_scales(mixed))

    def note(self, event: str, *, step: int, **details: object) -> None:
        """Keep an event; only the log has a place for it."""
        if self._wanted is not None:
            self._write(lambda log: log.note(event, step=step, **details))

    def flush(self) -> None:
        """Hand what is written to the operating system."""
        if self._log is not None:
            self._write(RunLog.flush)

    def close(self) -> None:
        """Flush and close the log; what comes later is kept in memory alone."""
        if self._log is not None:
            self._write(RunLog.close)
        self._wanted = self._log = None

    def _write(self, write: Callable[..., object], *values: object) -> None:
        try:
            if self._log is None:
                self._log = self._open(self._wanted)
            write(self._log, *values)
        except OSError as error:
            self._give_up(error)

    def _open(self, wanted: Path) -> RunLog:
        is_file = wanted.suffix == ".jsonl" and not wanted.is_dir()
        log = RunLog(free_path(wanted) if is_file else new_path(wanted, self._config), self._config)
        self._path = log.path
        return log

    def _give_up(self, error: OSError) -> None:
        where = self._path or self._wanted
        log, self._log, self._wanted = self._log, None, None
        if log is not None:
            with suppress(OSError):  # what could not be written before cannot be written now
                log.close()
        self._on_failure(
            f"log: cannot write {where} ({error.strerror or error}). The run goes on without a log; to have one, "
            f"name a folder that can be written in the environment variable AMPLAB_RUNS and begin anew."
        )
