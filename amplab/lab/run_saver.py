"""When the checkpoint of the present run is written: every few seconds, and when the run comes to rest.

A checkpoint belongs to a log that holds every step up to it. Without such a log, and after a failure, none is written.
Several ranks write one after the same step, when rank 0 requests it. The files are in `checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from amplab.lab.checkpoints import Checkpoints
from amplab.lab.experiment import Experiment
from amplab.lab.rank_exchange import RankExchange, RankLost
from amplab.lab.run_store import RunStore

__all__ = ["RunSaver"]


class RunSaver:
    """Saves the runs of one trainer, in the trainer's thread and between two steps.

    Args:
        exchange: With the other ranks, if several processes train together.
        report: Called with a sentence if a checkpoint cannot be written; the run then continues without.
    """

    def __init__(self, exchange: RankExchange | None, report: Callable[[str], None]) -> None:
        self._exchange, self._report = exchange, report
        self._checkpoints: Checkpoints | None = None  # of the log that was saved last

    def save(self, experiment: Experiment, store: RunStore, *, is_running: bool, at_rest: bool = False) -> None:
        """Write a checkpoint beside the log, if it is time.

        Args:
            experiment: What to save.
            store: Its history and its log.
            is_running: Whether the run goes on.
            at_rest: Whether it has come to rest, when it is always time.
        """
        log = store.log_path
        if log is None or not log.is_file():
            return
        if self._checkpoints is None or self._checkpoints.log != log:
            self._checkpoints = Checkpoints(log)
        if not self._is_time(at_rest or self._checkpoints.is_due, is_running=is_running):
            return
        try:
            store.flush()
            if self._exchange is not None:
                self._exchange.meet()  # the log of every rank holds every step of the checkpoint
                if self._exchange.place.rank:
                    return
            if store.is_on_disk:
                self._checkpoints.write(experiment)
        except RankLost:
            return  # the next step says so
        except (OSError, RuntimeError) as error:
            self._checkpoints.give_up()
            self._report(
                f"checkpoint: cannot write {self._checkpoints.path} ({error}). The run continues, but a restarted "
                f"kernel cannot continue it."
            )

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
