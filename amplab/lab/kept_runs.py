"""The runs beside the present one: kept when a reset or another model replaces them, or trained to compare precisions.

A kept run is its history in memory, what was measured at its end, and, while memory allows, its experiment, from which
it can continue. One whose experiment is dropped continues from a checkpoint, which its owner writes before. At most
`MOST_RUNS` are kept; the logs on disk stay, also of a run that is removed.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from amplab.amp import MemoryUse
from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.lab.checkpoints import keep_checkpoint_of
from amplab.lab.config import ExperimentConfig
from amplab.lab.events import Failed
from amplab.lab.experiment import Experiment
from amplab.lab.history import History
from amplab.lab.run_store import RunStore

__all__ = ["LONGEST_NAME", "MOST_BYTES", "MOST_RUNS", "MOST_SHOWN", "KeptRun", "KeptRuns", "last_losses"]

MOST_RUNS = 12
"""Kept runs; the oldest is dropped for a new one. Its log stays."""

MOST_SHOWN = 6
"""Kept runs drawn at once; the oldest is hidden for a new one."""

MOST_BYTES = 2**29
"""Bytes of weights, optimizer states and skipped steps that are kept to continue runs."""

LONGEST_NAME = 24
"""Characters of a run's name."""

LAST_STEPS = 25
"""Steps at the end of a run whose losses are averaged."""


@dataclass(eq=False)
class KeptRun:
    """One run beside the present one.

    Attributes:
        number: Identifies it among the kept runs.
        name: Its name in charts and tables.
        config: The config in effect at its end.
        store: Its history and its log.
        experiment: What it can continue with, None if that was dropped.
        saved: A checkpoint of its end, from which it continues if its experiment was dropped or has failed. It stays
            while the run is kept.
        memory: Bytes of its parameters, gradients, masters and optimizer state.
        activations: Bytes that one forward keeps for its backward; None if not measured.
        held_out: Score on the held-out data at its end; None if not measured.
        is_compared: Whether it was trained to compare precisions.
        is_shown: Whether its line is drawn.
        is_training: Whether it is being trained.
        error: Why its training failed, "" if it did not.
        failure: What was published when it failed as the present run.
    """

    number: int
    name: str
    config: ExperimentConfig
    store: RunStore
    experiment: Experiment | None
    memory: MemoryUse
    activations: int | None = None
    held_out: float | None = None
    is_compared: bool = False
    is_shown: bool = True
    is_training: bool = False
    error: str = ""
    failure: Failed | None = None
    saved: Path | None = None

    @property
    def can_continue(self) -> bool:
        """Whether it has its weights, in memory or on disk, and is not in training; False for one that has failed."""
        has_weights = (self.experiment is not None and not self.error) or self.is_saved
        return has_weights and not self.is_training

    @property
    def is_saved(self) -> bool:
        """Whether its checkpoint is there: a folder keeps those of a few runs."""
        return self.saved is not None and self.saved.is_file()

    @property
    def history(self) -> History:
        """Every step of it."""
        return self.store.history

    @property
    def final_loss(self) -> float | None:
        """The mean loss of its last `LAST_STEPS` steps, None before the first step."""
        losses = last_losses(self.history)
        return float(np.mean(losses)) if losses else None

    @property
    def rate(self) -> float | None:
        """Steps per second of computing: pauses and waiting are left out. None before the first step."""
        seconds = self.store.seconds
        return len(self.history) / seconds if seconds > 0 else None


class KeptRuns:
    """The kept runs of one trainer, oldest first. Every method may be called in any thread.

    Args:
        record: Records removing, renaming, showing and hiding, in words and with what takes it back.
        save: Writes the checkpoint of a run whose experiment is about to be dropped, and returns it; None if it cannot.
    """

    def __init__(
        self,
        record: Callable[[str, Callable[[], object]], None],
        save: Callable[[KeptRun], Path | None] = lambda _run: None,
    ) -> None:
        self._record, self._save = record, save
        self._lock = threading.RLock()
        renew_lock_in_forks(self, "_lock")
        self._runs: list[KeptRun] = []
        self._numbers = 0
        self.version = 0  # changes with every change of the list

    @property
    def runs(self) -> tuple[KeptRun, ...]:
        """The runs, oldest first."""
        with self._lock:
            return tuple(self._runs)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._runs)

    def numbered(self, number: int) -> KeptRun:
        """Return a run by its number.

        Raises:
            ValueError: There is no such run.
        """
        for run in self.runs:
            if run.number == number:
                return run
        numbers = ", ".join(str(run.number) for run in self.runs) or "none"
        raise ValueError(f"run {number} is not kept any more; the kept runs are {numbers}.")

    def of_store(self, store: RunStore) -> KeptRun | None:
        """Return a run by its store: it is kept in another object each time that it was present meanwhile."""
        return next((each for each in self.runs if each.store is store), None)

    def can_continue(self, run: KeptRun) -> bool:
        """Return whether a run is still kept, with its weights, and is not in training; one that has failed, too."""
        return run in self.runs and (run.can_continue or (run.experiment is not None and not run.is_training))

    def check_can_continue(self, run: KeptRun) -> None:
        """Raise a ValueError unless a run can be continued."""
        if run.error and not run.is_saved:
            raise ValueError(f"{run.name} cannot continue, because its training failed; restore its setting instead.")
        if not self.can_continue(run):
            why = "it is in training" if run.is_training else "its weights are not kept any more"
            raise ValueError(f"{run.name} cannot continue, because {why}; restore its setting instead.")

    def keep(
        self,
        name: str,
        config: ExperimentConfig,
        store: RunStore,
        experiment: Experiment,
        *,
        is_compared: bool = False,
        is_training: bool = False,
        failure: Failed | None = None,
        saved: Path | None = None,
    ) -> KeptRun:
        """Add a run and return it; drop what exceeds the limits."""
        with self._lock:
            self._numbers += 1
            taken = {run.name for run in self._runs}
            free = next(each for each in _candidates(name) if each not in taken)
            run = KeptRun(self._numbers, free, config, store, experiment, experiment.memory(), is_compared=is_compared)
            run.failure, run.error = failure, "Training failed." if failure else ""
            run.is_training, run.saved = is_training, saved
            self._insert(run)
        keep_checkpoint_of(run)
        self._bound_bytes()
        return run

    def put(self, run: KeptRun) -> None:
        """Add a run at its place; drop what exceeds the limits."""
        self._insert(run)
        self._bound_bytes()

    def _insert(self, run: KeptRun) -> None:
        with self._lock:
            insort(self._runs, run, key=lambda each: each.number)
            others = [each for each in self._runs if each is not run and not each.is_training]  # run may be the oldest
            for old in others[: max(0, len(self._runs) - MOST_RUNS)]:
                self._runs.remove(old)
                old.experiment = None
            shown = [each for each in self._runs if each.is_shown and each is not run]
            for old in shown[: max(0, len(shown) + run.is_shown - MOST_SHOWN)]:
                old.is_shown = False
            self.version += 1

    def take(self, run: KeptRun) -> None:
        """Remove a run from the list, for its experiment to continue."""
        with self._lock:
            self._runs.remove(run)
            self.version += 1

    def remove(self, number: int) -> None:
        """Remove a run, with undo; its log stays.

        Raises:
            ValueError: There is no such run.
        """
        run = self.numbered(number)
        self.take(run)
        self._record(f"Removed {run.name}", lambda: self.put(run))

    def rename(self, number: int, name: str) -> None:
        """Name a run, with undo.

        Raises:
            ValueError: There is no such run, or the name is empty or taken.
        """
        run, old, name = self.numbered(number), self.numbered(number).name, " ".join(name.split())[:LONGEST_NAME]
        if not name or any(other.name == name for other in self.runs if other is not run):
            raise ValueError(f"Name: {name!r} is {'taken' if name else 'empty'}; enter another name.")
        if name != old:
            self._set(run, "name", name)
            self._record(f"Renamed {old} to {name}", lambda: self._set_again(run, "name", old))

    def show(self, number: int, *, is_shown: bool) -> None:
        """Draw or hide the line of a run, with undo.

        Raises:
            ValueError: There is no such run, or `MOST_SHOWN` lines are drawn already.
        """
        run, is_shown = self.numbered(number), bool(is_shown)
        if is_shown and sum(each.is_shown for each in self.runs) >= MOST_SHOWN:
            raise ValueError(f"{MOST_SHOWN} runs are drawn already; hide one first.")
        if run.is_shown != is_shown:
            self._set(run, "is_shown", is_shown)
            text = f"{'Showed' if is_shown else 'Hid'} {run.name}"
            self._record(text, lambda: self._set_again(run, "is_shown", not is_shown))

    def touch(self) -> None:
        """Say that a run has changed."""
        with self._lock:
            self.version += 1

    def _set(self, run: KeptRun, attribute: str, value: object) -> None:
        setattr(run, attribute, value)
        self.touch()

    def _set_again(self, run: KeptRun, attribute: str, value: object) -> bool:
        """Put back an attribute of a run; return False if the run is not kept any more."""
        if (present := self.of_store(run.store)) is None:
            return False
        self._set(present, attribute, value)
        return True

    def _bound_bytes(self) -> None:
        """Drop the experiments of the oldest runs until the rest fit into `MOST_BYTES`; save them before."""
        held = 0
        for run in reversed(self.runs):  # without the lock: saving takes its time, and tells what fails
            if run.experiment is not None:
                held += run.memory.total + run.experiment.past_skips.nbytes
            if held > MOST_BYTES and not run.is_training and run.experiment is not None:
                run.saved = run.saved or self._save(run)
                run.experiment = None
                self.touch()


def last_losses(history: History) -> list[float]:
    """Return the losses of the last `LAST_STEPS` steps, or of fewer.

    Skipped steps into which a fault was injected are left out, because their losses are not the run's own.
    """
    last = history.records(max(0, len(history) - LAST_STEPS))
    return [record.loss for record in last if not (record.skipped and record.is_disturbed)] or [
        each.loss for each in last
    ]


def _candidates(name: str) -> Iterator[str]:
    """Yield name, name (2), name (3), …"""
    yield name
    for number in count(2):
        yield f"{name} ({number})"
