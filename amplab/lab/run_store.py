"""Storage of a run: its history in memory, and optionally its log on disk.

A log that cannot be created or written, or that is deleted during the run, is reported once, through `on_failure`, and
the run continues without it, in memory. While the disk is full, which is reported once as well, lines wait in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from os import PathLike
from pathlib import Path

from amplab.amp import MemoryUse
from amplab.amp.run_state.paths import given_path
from amplab.diagnose import Finding
from amplab.lab.changes import config_changes, fault_change, restart_change, start_change
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import GradientSample, MixedScales, StepRecord, StepRow
from amplab.lab.findings import LOOK_BACK, finding_to_log
from amplab.lab.history import History, row_of
from amplab.lab.run_log import MOST_WAITING, RunLog, create_free, free_path, load_run, new_path
from amplab.lab.run_log.paths import is_log_file, log_target
from amplab.lab.run_log.ranks import rank_log
from amplab.lab.run_log.writer import ClosedLog, DiskFull
from amplab.lab.skip_explanation import ExplanationBudget, SkipExplanation
from amplab.lab.watched_run import WatchedRun
from amplab.parallel.rank_state import RankState
from amplab.parallel.ranks import AgreedText, this_rank
from amplab.policies.signals import DeferredSignals, deferring_signals, is_interrupt

__all__ = ["RetiredLogs", "RunStore"]


class RunStore:
    """Keeps the steps and the events of one run.

    The log is opened at the first step or event, so a run that never started leaves no file.

    Args:
        config: What the run starts with.
        log: A folder (a new file is named in it), a file (path-2, path-3, … if it exists), or None for no log. If
            several processes train together, a folder takes the place of the file, with a log of each; see
            `run_log.ranks`.
        on_failure: Called with a message if the log cannot be written.
        advice: The last sentence of that message: how the next run has a log.

    Attributes:
        history: The run in memory.
        seconds: Seconds that its steps took, without pauses; the owner counts them.
        budget: Which of its skipped steps to explain.
        found: (step, finding) of the latest steps that ran again.
        examined: (step, finding) of the latest examination of a step.
        run: What tells the run from others; one that begins again without a step has the same.
    """

    def __init__(
        self,
        config: ExperimentConfig | WatchedRun,
        *,
        log: str | PathLike[str] | None,
        on_failure: Callable[[str], None],
        advice: str = "For a log, set the environment variable AMPLAB_RUNS to a writable folder and reset.",
    ) -> None:
        self.history = History()
        if isinstance(config, ExperimentConfig):
            self.history.keep_changes(start_change(config))
        self._config = config
        self.seconds = 0.0
        self.run = object()
        self.budget = ExplanationBudget()
        self.found: deque[tuple[int, Finding]] = deque(maxlen=LOOK_BACK)
        self.examined: tuple[tuple[int, Finding], ...] = ()
        self._wanted = None if log is None else given_path(log, "log").absolute()  # the working folder may change
        self._on_failure, self._advice = on_failure, advice
        self._has_told_full = self._has_told_mixed = False
        self._log: RunLog | None = None
        self._appending: tuple[StepRow, int] | None = None  # with its row in the history
        self._path: Path | None = None
        self._closed: ClosedLog | None = None
        self._folder: AgreedText | None = None  # of the logs of all ranks
        self._late: list[Callable[[RunLog], object]] = []  # what was noted after `close`

    @classmethod
    def of_log(cls, path: Path, on_failure: Callable[[str], None], *, steps: int) -> RunStore:
        """Return the store of a run of the lab that was read back from its log, which later steps are added to.

        Raises:
            OSError: The log cannot be read.
            ValueError: It is damaged, or does not hold `steps` steps: no later step could follow.
        """
        run = load_run(path)
        if run.truncated or len(run.history) != steps or not isinstance(run.config, ExperimentConfig):
            raise ValueError(
                f"{path}: {len(run.history)} steps of a log of {run.config}; expected the log of the checkpoint, with "
                f"{steps} steps. It was altered, or lost its end: start a new run, or use an intact copy of the log."
            )
        store = cls(run.config, log=path, on_failure=on_failure)
        store.history, store._path, store._closed = run.history, path, ClosedLog.of(path)
        last = run.history.last
        store.seconds = 0.0 if last is None else last.seconds
        return store

    @property
    def log_path(self) -> Path | None:
        """The file of the log; None before the first step, and without a log that has every step."""
        return self._path

    @property
    def is_on_disk(self) -> bool:
        """Whether the log holds every step; False without a log, and while its disk is full."""
        return self._path is not None and (self._log is None or self._log.waiting == 0)

    def check_log(self) -> None:
        """Raise an OSError unless the log is at `log_path`: it may be moved, and another file have its name."""
        log = self._closed if self._log is None else self._log.closed
        if self._path is None or log is None or not self._path.is_file():
            raise FileNotFoundError(f"its log is not at {self._path} any more: it was moved or deleted")
        if not log.is_at(self._path):
            raise FileExistsError(f"its log is not at {self._path} any more: another file has its name now")

    @property
    def rank(self) -> int | None:
        """The rank of this process; None if it trains alone."""
        place = this_rank()
        return None if place is None else place.rank

    def append(self, record: StepRecord) -> None:
        """Add one step."""
        self.append_row(row_of(record))

    def append_row(self, row: StepRow) -> None:
        """Add one step as its values; after an interrupt in it, the next call of `append_row` or `close` does."""
        self._finish_append()
        self._appending = row, len(self.history)
        self._finish_append()

    @property
    def step_count(self) -> int:
        """The number of steps, and the number of the next one; for the loop alone, since it finishes an append."""
        self._finish_append()
        return len(self.history)

    def _finish_append(self) -> None:
        if self._appending is None:
            return
        row, place = self._appending
        if len(self.history) == place:
            self.history.append_row(row)
        if self._wanted is None:
            self._path = None  # the log of a run that has ended does not get this step
        elif self._log is None or self._log.last_step != row[0]:
            self._write(self._wanted, RunLog.append_row, row)
        self._appending = None

    def keep(self, sample: GradientSample) -> None:
        """Add a histogram of the gradients."""
        self.history.keep(sample)
        if self._wanted is not None:
            self._write(self._wanted, RunLog.keep, sample)

    def keep_memory(self, step: int, memory: MemoryUse) -> None:
        """Add the bytes that training holds from `step` on, if they have changed."""
        before = len(self.history.memory)
        self.history.keep_memory(step, memory)
        if len(self.history.memory) > before:
            self.note("memory", step=step, **asdict(memory))

    def keep_scales(self, mixed: MixedScales) -> None:
        """Add the scales of a step whose backwards had different ones."""
        self.history.keep_scales(mixed)
        if self._wanted is not None:
            self._write(self._wanted, RunLog.keep_scales, mixed)

    def explain(self, explanation: SkipExplanation) -> None:
        """Add why a step was skipped."""
        self.history.explain(explanation)
        self._note(lambda log: log.explain(explanation))

    def change(self, config: ExperimentConfig, previous: ExperimentConfig, *, step: int) -> None:
        """Add what differs between two configs, and write the new one to the log."""
        self.history.keep_changes(*config_changes(previous, config, step))
        self.note("config", step=step, config=str(config))

    def inject(self, fault: str, *, step: int, on: bool) -> None:
        """Add a fault that was injected, or one that was switched off."""
        self.history.keep_changes(fault_change(fault, step, on=on))
        self.note("inject", step=step, fault=fault, on=on)

    def restart(self, *, step: int) -> None:
        """Add that the processes were started again and the run continues at `step`."""
        self.history.keep_changes(restart_change(step))
        self.note("restart", step=step)

    def find(self, step: int, finding: Finding) -> None:
        """Add a finding in one step."""
        self.found.append((step, finding))
        self._note_finding(step, finding)

    def examine(self, step: int, findings: Iterable[Finding]) -> None:
        """Keep what the examination of one step found, in place of the examination before."""
        self.examined = tuple((step, each) for each in findings)
        for each in self.examined:
            self._note_finding(*each)

    def _note_finding(self, step: int, finding: Finding) -> None:
        self.note("finding", step=step, finding=finding_to_log(finding))

    def note(self, event: str, *, step: int, **details: object) -> None:
        """Write an event to the log; the history has no place for it."""
        self._note(lambda log: log.note(event, step=step, **details))

    def _note(self, write: Callable[[RunLog], object]) -> None:
        """Write to the log; to one that is closed, once it is open again."""
        if self._wanted is not None:
            self._write(self._wanted, write)
        elif self._path is not None:
            self._late.append(write)

    def flush(self) -> None:
        """Pass what is written to the operating system."""
        if self._wanted is not None and self._log is not None:
            self._write(self._wanted, RunLog.flush)

    def keep_state(self, state: RankState) -> None:
        """Write the state of this rank to the log, for a comparison of the ranks."""
        if self._wanted is not None:
            self._write(self._wanted, RunLog.keep_state, state)

    def close(self, raised: str = "") -> None:
        """Flush and close the log; later steps are kept in memory only.

        Args:
            raised: the exception that ended the loop, in words; "" for none.
        """
        self._finish_append()
        if self._wanted is not None and self._log is not None:
            log = self._log
            self._write(self._wanted, partial(RunLog.close, steps=len(self.history), raised=raised))
            self._closed = log.closed
        if self._folder is not None:
            self._folder.end()
        self._wanted = self._log = None

    def retire(self) -> bool:
        """As `close`, for a run that may continue; return whether its log is complete or given up.

        Lines for which a full disk has no space are not lost: they wait, and a later call writes them.
        """
        self._finish_append()
        self.flush()
        if self._log is not None and self._log.waiting:
            return False
        self.close()
        return True

    def reopen(self) -> None:
        """Write later steps to the same log again after `close`; without effect if steps are missing in it."""
        self._wanted = self._path
        late, self._late = self._late, []
        for write in late:
            self._note(write)

    def _write(self, wanted: Path, write: Callable[..., object], *values: object) -> None:
        try:
            log = self._log or self._open(wanted)
            write(log, *values)
            if log.is_mixed:
                self._tell_mixed()
        except DiskFull as error:
            self._tell_full(error)
        except OSError as error:
            if is_interrupt(error):  # a time limit, as a TimeoutError
                raise
            self._give_up(error)

    def _open(self, wanted: Path) -> RunLog:
        if self._path is not None:
            self._log = RunLog(self._path, self._config, continues=self._closed)
            return self._log
        target = log_target(wanted)
        path = target if is_log_file(target) else new_path(target, self._config)
        place = this_rank()
        if place is not None:
            # The clocks of ranks may differ.
            self._folder = AgreedText("run log", lambda: _reserved(path.with_suffix("")))
            path = rank_log(Path(self._folder.text), place.rank)
        create = partial(RunLog, config=self._config, rank=place)
        with DeferredSignals():  # the next step would begin another file
            self._log = log = create(path) if place is not None else create_free(path, create)
            self._path = log.path
        return log

    def _tell_full(self, error: OSError) -> None:
        if self._has_told_full:
            return
        self._has_told_full = True
        self._on_failure(
            f"log: cannot write {self._path} now ({error.strerror}). Up to {MOST_WAITING:,} lines wait in memory and "
            "are written when there is space: remove other files."
        )

    def _tell_mixed(self) -> None:
        if self._has_told_mixed:
            return
        self._has_told_mixed = True
        self._on_failure(
            f"log: another program has written to {self._path}. The run and its log continue, but the log cannot be "
            "loaded before these lines are deleted from it: stop the other program."
        )

    @deferring_signals
    def _give_up(self, error: OSError) -> None:
        where = self._path or self._wanted
        log, self._log, self._wanted, self._path = self._log, None, None, None  # what follows would leave a gap
        if log is not None:
            with suppress(OSError):  # what could not be written before cannot be written now
                log.close()
        self._on_failure(
            f"log: cannot write {where} ({error.strerror or error}). The run continues without a log and keeps its "
            f"steps in memory: amplab.lab.report writes them to a page. {self._advice}"
        )


class RetiredLogs:
    """The logs of runs that are over, whose last lines wait while their disk is full."""

    def __init__(self) -> None:
        self._waiting: list[RunStore] = []

    def add(self, store: RunStore) -> None:
        """End the log of a run, now or once the disk has space."""
        self.take_back(store)
        if not store.retire():
            self._waiting.append(store)

    def take_back(self, store: RunStore) -> None:
        """A run continues: its log does not end."""
        self._waiting = [each for each in self._waiting if each is not store]

    def write(self) -> None:
        """Write what waits, if the disk has space again."""
        if self._waiting:
            self._waiting = [store for store in self._waiting if not store.retire()]

    def close(self) -> None:
        """End all: a line that cannot be written now is lost, and the run's `on_failure` is told."""
        for store in self._waiting:
            store.close()
        self._waiting = []


@deferring_signals
def _reserved(path: Path) -> str:
    """Return a folder that no other launch has: at `path`, or at path-2, path-3, …

    It is made at once: two launches that begin in the same second want the same path.
    """
    try:
        return str(create_free(path, _make_folder))
    except OSError:  # as on a full disk: the log makes its folder when there is space, or says why it cannot
        return str(free_path(path))


def _make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
