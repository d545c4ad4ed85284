"""When the checkpoint of the present run is written: every few seconds, and once it is at rest.

It is at rest when it pauses, after each change of it while it is paused, and once the trainer's thread has had nothing
to do for some seconds, as after single steps.

A checkpoint belongs to a log that holds every step up to it; without such a log none is written. One that cannot be
written, as on a full disk, is reported once; the next one is due as always, and reported if it is written.
The first one of a run with code of one's own, and those at rest, are read again: a run that cannot continue from it is
told while its weights are still there.
Several ranks write one after the same step, when rank 0 requests it. The files are in `checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from amplab.lab.checkpoints import Checkpoints
from amplab.lab.events import Failed
from amplab.lab.experiment import Experiment
from amplab.lab.rank_exchange import RankExchange, RankLost
from amplab.lab.run_store import RunStore
from amplab.policies.signals import is_interrupt

__all__ = ["RunSaver"]

_MOST_CHECKS = 20  # of one run; a check makes a second model


class RunSaver:
    """Saves the runs of one trainer, in the trainer's thread and between two steps.

    Args:
        exchange: With the other ranks, if several processes train together.
        report: Called if a checkpoint cannot be written, and when one can again.
    """

    def __init__(self, exchange: RankExchange | None, report: Callable[[Failed], None]) -> None:
        self._exchange, self._report = exchange, report
        self._checkpoints: Checkpoints | None = None  # of the log that was saved last
        self._has_failed = False  # the last one of them that was due
        self._checks = 0  # whether they can be continued

    def save(self, experiment: Experiment, store: RunStore, *, is_running: bool, at_rest: bool = False) -> Path | None:
        """Write a checkpoint beside the log, if it is time; return it if it is of the present step.

        Args:
            experiment: What to save.
            store: Its history and its log.
            is_running: Whether the run goes on.
            at_rest: Whether it has come to rest, when it is always time.
        """
        log = store.log_path
        if log is None:
            return None
        if self._checkpoints is None or self._checkpoints.log != log:
            self._checkpoints, self._has_failed, self._checks = Checkpoints(log), False, 0
        checkpoints = self._checkpoints
        if not self._is_time(at_rest or checkpoints.is_due, is_running=is_running):
            return None
        try:
            store.flush()
            if self._exchange is not None:
                self._exchange.meet()  # the log of every rank holds every step of the checkpoint
                if self._exchange.place.rank:
                    return None
            if store.is_on_disk:
                store.check_log()
                checkpoints.write(experiment)
                self._tell(checkpoints.path, None)
                self._check_continues(experiment, checkpoints.path, at_rest=at_rest)
                return checkpoints.path
        except RankLost:
            pass  # the next step says so
        except Exception as error:  # also of objects of one's own, whose states are saved
            if is_interrupt(error):
                raise
            self._tell(checkpoints.path, error)
        return None

    def end(self) -> None:
        """The run has ended: its checkpoint stays while it is one of the latest."""
        self._checkpoints = None

    def _tell(self, path: Path, error: Exception | None) -> None:
        """Report the first checkpoint of a run that fails, and the first one after it that does not."""
        if error is not None and not self._has_failed:
            text = (
                f"checkpoint: cannot write {path} ({error}). The run continues, and the next checkpoint is tried as "
                f"usual. Until one is written, a restarted kernel cannot continue the run from later than the last one."
            )
            self._report(Failed(text))
        elif error is None and self._has_failed:
            text = f"checkpoint: {path} is written again; a restarted kernel can continue the run from here."
            self._report(Failed(text, mended=True))
        self._has_failed = error is not None

    def _check_continues(self, experiment: Experiment, path: Path, *, at_rest: bool) -> None:
        """Report once if a run of code of one's own cannot continue from its checkpoint."""
        is_wanted = self._checks == 0 or (at_rest and self._checks < _MOST_CHECKS)
        if not is_wanted or self._exchange is not None or not experiment.can_be_checked:
            return
        self._checks += 1
        try:
            with experiment.code_kept():
                Experiment.load(path, experiment.config)
        except (MemoryError, torch.OutOfMemoryError):
            pass  # there is no place for a second model, which a restarted kernel does not need
        except Exception as error:
            if is_interrupt(error):
                raise
            self._checks = _MOST_CHECKS
            why = f"{type(error).__name__}: {error}"
            text = f"checkpoint: a restarted kernel cannot continue this run from {path} ({why}). The run goes on here."
            self._report(Failed(text))

    def _is_time(self, is_due: bool, *, is_running: bool) -> bool:
        """Whether to write a checkpoint now; of several ranks all say the same."""
        if self._exchange is None:
            return is_due
        if self._exchange.is_over:
            return False
        if not is_running:
            return is_due
        if is_due and self._exchange.place.rank == 0:
            self._exchange.request("checkpoint")
        return "checkpoint" in self._exchange.agreed
