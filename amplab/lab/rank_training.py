"""`amplab train` on several ranks: torchrun starts the processes, and each of them calls `train_on_ranks`.

    torchrun --nproc-per-node 2 --max-restarts 3 -m amplab train --steps 300

Rank 0 prints. If a rank dies, the others stop with a message, and torchrun starts all of them again if it may: they
continue from the last checkpoint, to the same result as a run without a restart.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from amplab.amp.run_state.paths import given_path
from amplab.amp.run_state.sharded_folder import on_every_rank
from amplab.lab.checkpoints import Checkpoint, checkpoint_of_launch
from amplab.lab.config import ExperimentConfig
from amplab.lab.console import TrainSummary, train
from amplab.lab.rank_exchange import RankExchange, RankLost
from amplab.lab.run_log import launch_of, load_run, runs_directory
from amplab.lab.run_log.ranks import rank_logs
from amplab.parallel.ranks import Rank, this_rank

__all__ = ["is_one_of_several", "logs_of_launch", "train_on_ranks"]

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for the others in an exchange; one that has died is noticed at once."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def is_one_of_several() -> bool:
    """Return whether torchrun, or another launcher that sets its variables, started this process among several."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def logs_of_launch(log_path: str | PathLike[str] | None, launch: str) -> dict[int, Path]:
    """Return the run logs of the ranks of one launch, by rank; empty if there is none.

    Args:
        log_path: As in `train_on_ranks`.
        launch: The name of the launch.
    """
    folders = {log.parent for log in _runs_in(log_path).glob("*/rank-*.jsonl")}
    for folder in sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True):
        logs = rank_logs(folder)
        for log in logs.values():
            with suppress(OSError, ValueError):  # the log of another program, or one that has no first line yet
                if launch_of(log)[0] == launch:
                    return logs
    return {}


def _runs_in(log_path: str | PathLike[str] | None) -> Path:
    """Return the folder of the folders of runs."""
    folder = runs_directory() if log_path is None else given_path(log_path, "--log")
    return folder.parent if folder.suffix == ".jsonl" else folder


def train_on_ranks(
    config: ExperimentConfig, *, steps: int, log_path: str | PathLike[str] | None = None
) -> TrainSummary:
    """Train one experiment together with the other ranks; the arguments are those of `console.train`.

    Each rank trains batches of its own, and gradients are averaged: n ranks train what one process trains that
    accumulates n times as many batches. A process group of gloo is made, unless there is one, for the time of the call.

    Raises:
        ImportError, ValueError: As `console.train`; and the run to continue had another number of ranks.
    """
    begins = not dist.is_initialized()
    if begins:
        _check_variables()
        _init_process_group()
    try:
        place = this_rank() or Rank(0, 1)
        exchange = RankExchange(place)
        with _stopped_by_signals(exchange):
            checkpoint = _checkpoint(place, log_path)
            summary = train(
                config,
                steps=steps,
                log_path=log_path,
                stream=io.StringIO() if place.rank else sys.stdout,
                exchange=exchange,
                checkpoint=checkpoint,
            )
            _report(summary, exchange)
        return summary
    finally:
        if begins:
            dist.destroy_process_group()


def _check_variables() -> None:
    """Raise a ValueError if the variables of the launcher do not say which of how many processes this is."""
    given = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")}
    for name, text in given.items():
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(
                f"{name}={text}: expected a whole number, as torchrun sets it; unset {name} to train alone."
            )
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise ValueError(
            f"RANK={given['RANK']}: expected a number below WORLD_SIZE={given['WORLD_SIZE']}, as torchrun sets it."
        )


def _init_process_group() -> None:
    """Initialize gloo from the variables of torchrun, with keys of its own for each restart.

    torchrun keeps its store over a restart, so under the same keys a rank may read addresses of ranks that have ended.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    own = PrefixStore(f"attempt {os.environ.get(_RESTARTS, '0')}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=TIMEOUT)


def _checkpoint(place: Rank, log_path: str | PathLike[str] | None) -> Checkpoint | None:
    """Return where to continue if torchrun has started the ranks again; None if this is the first start.

    Rank 0 finds it for all, by the launch in its log: without --rdzv-id each node has a name of its own for the launch.
    """
    finds = place.rank == 0 and os.environ.get(_RESTARTS, "0") != "0"
    found = [on_every_rank(lambda: checkpoint_of_launch(_runs_in(log_path), place) if finds else None)]
    dist.broadcast_object_list(found)
    return found[0]


@contextmanager
def _stopped_by_signals(exchange: RankExchange) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop all ranks after the same step, the first one if they come before it.

    torchrun ends the other ranks by SIGTERM when one has died; they then say so and close their logs.
    """

    def stop(*_: object) -> None:
        exchange.request("stop")

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _report(summary: TrainSummary, exchange: RankExchange) -> None:
    """Print what became of the ranks: the failure of each, and one line for each rank."""
    said = summary.failure or summary.log_failure
    if said and exchange.place.rank:  # rank 0 has printed its own
        sys.stderr.write(f"amplab train: {said}\n")
    if summary.failure:
        return
    with suppress(RankLost):  # of an output that stands still, whose rank others wait for in vain
        exchange.meet()  # every log is closed
    if exchange.place.rank == 0 and summary.log_path is not None:
        run = load_run(summary.log_path)
        sys.stdout.write("\n".join(["", *map(str, (run.rank_table(), *run.differences)), ""]))
