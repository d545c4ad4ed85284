"""The same experiment at several precisions, trained one after the other, a few steps at a time.

Each run starts from the same seed, so weights and batches are the same. One run trains at a time, in the trainer's own
thread, so that steps per second are those of a run that has the thread for itself. Between two slices the thread does
whatever was asked of it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.kept_runs import KeptRun

__all__ = ["SLICE_SECONDS", "Comparison", "Progress", "levels_of"]

SLICE_SECONDS = 0.05
"""Seconds of training between two looks at what was asked meanwhile."""


def levels_of(config: ExperimentConfig) -> list[ExperimentConfig]:
    """Return the experiment at each opt_level that a config can name.

    >>> [each.opt_level for each in levels_of(ExperimentConfig())][:4]
    ['O0', 'O1', 'O2', 'O3']
    """
    return [config.changed(opt_level=level) for level in FIELDS["opt_level"].values.choices()]


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Attributes:
        name: The run in training.
        run: Its place among the runs, from 1.
        runs: Their number.
        step: Its steps so far.
        steps: The steps of each.
    """

    name: str
    run: int
    runs: int
    step: int
    steps: int


class Comparison:
    """A queue of runs.

    Args:
        configs: One for each run.
        steps: Steps of each, > 0.
        begin: Makes a run of a config; None if it cannot, and the next one begins.
        train: Trains a run one step; it may raise, which ends that run alone.
        end: Called with a run that has made its steps or has failed, with the error.
    """

    def __init__(
        self,
        configs: Sequence[ExperimentConfig],
        steps: int,
        *,
        begin: Callable[[ExperimentConfig], KeptRun | None],
        train: Callable[[KeptRun], None],
        end: Callable[[KeptRun, str], None],
    ) -> None:
        self._configs, self._steps = list(configs), steps
        self._begin, self._train, self._end = begin, train, end
        self._done = 0
        self._run: KeptRun | None = None
        self._is_stopped = False

    @property
    def progress(self) -> Progress:
        """How far it is."""
        name = FIELDS["opt_level"].shown(self._configs[min(self._done, len(self._configs) - 1)].opt_level)
        run = self._run
        step = 0 if run is None else len(run.history)
        return Progress(name if run is None else run.name, self._done + 1, len(self._configs), step, self._steps)

    def stop(self) -> None:
        """End it after the present slice; what was trained stays."""
        self._is_stopped = True

    def advance(self) -> bool:
        """Train for about `SLICE_SECONDS`; return whether more is to be trained."""
        end = time.perf_counter() + SLICE_SECONDS
        while time.perf_counter() < end:
            if self._is_stopped or self._done == len(self._configs):
                break
            self._advance_one()
        if self._is_stopped and self._run is not None:
            self._finish()
        return not self._is_stopped and self._done < len(self._configs)

    def _advance_one(self) -> None:
        if self._run is None:
            self._run = self._begin(self._configs[self._done])
        if self._run is None:
            self._done += 1
            return
        try:
            self._train(self._run)
        except BaseException as error:  # noqa: BLE001  one precision that cannot train is a result
            self._finish(f"{type(error).__name__}: {error}")
            return
        if len(self._run.history) >= self._steps:
            self._finish()

    def _finish(self, error: str = "") -> None:
        if self._run is not None:
            self._end(self._run, error)
        self._run = None
        self._done += 1
