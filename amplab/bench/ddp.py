"""Suite "ddp": the exchange of gradients between processes over loopback, combined against DistributedDataParallel.

    exchange = (forward, backward and averages) - (median of forward and backward)       in milliseconds

A row is not measured if other programs disturb the forward and backward by more than the exchange takes.

The model computes nothing: one autograd node returns a copy of a given gradient for every parameter, so that little but
the exchange is left. Every process has one thread. The times are those of rank 0, from a barrier to the end; all ranks
end with the last bucket. In a ring each rank sends ``2 (n - 1) / n`` of the bytes of a tensor.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amplab import kernels
from amplab.bench.interleaved import quartiles
from amplab.bench.rows import BenchResults, Goal, Row
from amplab.bench.suites import Progress, machine_facts
from amplab.parallel.combined_reducer import CombinedReducer

__all__ = ["EXCHANGES", "Exchange", "exchange_row", "run_ddp"]

_THEIRS = "DistributedDataParallel"
_WARM_UP = 3
_LIMIT = timedelta(minutes=5)
_MIB = 2**20


class Exchange(NamedTuple):
    """One comparison: the gradients, how many processes exchange them, and how many times as fast it is to be."""

    tensors: int
    elements: int
    processes: int
    goal: float

    @property
    def name(self) -> str:
        """The name of the row."""
        return f"exchange of {self.tensors} × {self.elements} float32, {self.processes} processes"


EXCHANGES = (
    Exchange(2000, 1000, 2, 1.5),
    Exchange(500, 10_000, 2, 1.0),
    Exchange(20, 250_000, 2, 0.9),
    Exchange(2000, 1000, 4, 1.0),
    Exchange(500, 10_000, 4, 0.9),
)


class Times(NamedTuple):
    """The seconds of each round on rank 0, and the bytes of all buckets."""

    alone: list[float]
    ours: list[float]
    theirs: list[float]
    our_bytes: int
    their_bytes: int


def run_ddp(
    exchanges: Sequence[Exchange] = EXCHANGES, *, rounds: int = 30, stream: TextIO | None = None
) -> BenchResults:
    """Measure each exchange in processes of its own, over gloo.

    Args:
        exchanges: what to measure.
        rounds: the rounds of each.
        stream: receives the progress; None for stderr.

    Raises:
        RuntimeError: a process failed, or took longer than 5 minutes.
    """
    kernels.ensure(wait=True)
    progress = Progress(len(exchanges), rounds, stream)
    rows = []
    for index, exchange in enumerate(exchanges):
        progress.begin(index, exchange.name)
        rows.append(exchange_row(exchange, _measured(exchange, rounds)))
        progress.end(rows[-1])
    return BenchResults("ddp", machine_facts(), tuple(rows))


def exchange_row(exchange: Exchange, times: Times) -> Row:
    """Return the row of one exchange; without a ratio if noise hides it in more than a quarter of the rounds."""
    alone = statistics.median(times.alone)
    ours, theirs = ([each - alone for each in side] for side in (times.ours, times.theirs))
    sent = 2 * (exchange.processes - 1) / exchange.processes / _MIB
    details: dict[str, float | int | str] = {
        "ours_ms": statistics.median(ours) * 1e3,
        "theirs_ms": statistics.median(theirs) * 1e3,
        "backward_ms": alone * 1e3,
        "wire_mib": times.our_bytes * sent,
        "their_wire_mib": times.their_bytes * sent,
        "rounds": len(ours),
        "tensors": exchange.tensors,
        "elements": exchange.tensors * exchange.elements,
        "processes": exchange.processes,
    }
    goal = Goal("at least", exchange.goal)
    lost = sum(min(pair) <= 0 for pair in zip(ours, theirs, strict=True))
    if lost > len(ours) / 4:  # then the median or a quartile is arbitrary
        return Row(exchange.name, _THEIRS, goal, details={**details, "why": _too_noisy(lost, len(ours))})
    ratios = [max(their, 1e-6) / max(our, 1e-6) for our, their in zip(ours, theirs, strict=True)]
    return Row(exchange.name, _THEIRS, goal, statistics.median(ratios), quartiles(ratios), details)


def _too_noisy(lost: int, rounds: int) -> str:
    return (
        f"in {lost} of {rounds} rounds the whole took no longer than the median of forward and backward alone, so that "
        "the time of the exchange is lost in the noise; close other programs, and measure 30 rounds or more"
    )


def _measured(exchange: Exchange, rounds: int) -> Times:
    """Start the processes and return what rank 0 has measured. Every process has ended by then."""
    context = multiprocessing.get_context("spawn")
    receives, sends = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="amplab-bench-") as folder:
        store = (Path(folder) / "store").as_uri()
        ranks = [
            context.Process(target=_rank, args=(rank, store, exchange, rounds, sends), daemon=True)
            for rank in range(exchange.processes)
        ]
        try:
            with _without_the_working_folder():
                for each in ranks:
                    each.start()
            sends.close()  # the processes have it; so the pipe ends when they do
            if not receives.poll(_LIMIT.total_seconds()):
                raise RuntimeError(f"{exchange.name}: no result after {_LIMIT}; is another program using all CPUs?")
            times: Times = receives.recv()
            for each in ranks:
                each.join(_LIMIT.total_seconds())
        except EOFError:
            raise RuntimeError(f"{exchange.name}: a process ended without a result; its message is above.") from None
        finally:
            for each in ranks:
                each.kill()
                each.join()
            receives.close()
    return times


@contextmanager
def _without_the_working_folder() -> Iterator[None]:
    """Let processes that start meanwhile import nothing from the working folder unless this process does.

    multiprocessing starts them by ``python -c``, which puts that folder first until they have the path of this process.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _rank(rank: int, store: str, exchange: Exchange, rounds: int, connection: Connection) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=exchange.processes, timeout=_LIMIT)
    times = _timed(exchange, rounds)
    dist.destroy_process_group()
    if rank == 0:
        connection.send(times)
    connection.close()


def _timed(exchange: Exchange, rounds: int) -> Times:
    alone, ours, wrapped = (_Given(exchange.tensors, exchange.elements) for _ in range(3))
    theirs = DistributedDataParallel(wrapped)
    reducer = CombinedReducer()
    reducer.prepare(ours.list)

    def average() -> None:
        reducer.follow(ours.list)
        reducer.begin()
        ours().backward()
        reducer.finish()

    sides: list[tuple[_Given, Callable[[], Any], list[float]]] = [
        (alone, lambda: alone().backward(), []),
        (ours, average, []),
        (wrapped, lambda: theirs().backward(), []),
    ]
    for number in range(_WARM_UP + rounds):
        for model, run, times in sides if number % 2 else sides[::-1]:
            for param in model.list:
                param.grad = None
            dist.barrier()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    reducer.release()
    our_bytes = sum(buffer.nbytes for buffer in reducer.buffers)
    their_bytes = sum(param.nbytes for param in wrapped.list)
    alone_times, our_times, their_times = (times[_WARM_UP:] for _, _, times in sides)
    return Times(alone_times, our_times, their_times, our_bytes, their_bytes)


class _Given(nn.Module):
    """A model whose backward gives each parameter a copy of a tensor."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.list = [nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
        for index, param in enumerate(self.list):
            self.register_parameter(f"param{index}", param)
        self._values = [torch.ones(elements) for _ in range(tensors)]

    def forward(self) -> Tensor:
        loss: Tensor = _GiveGradients.apply(self._values, *self.list)  # type: ignore[no-untyped-call]  # torch's
        return loss


class _GiveGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *_params: Tensor) -> Tensor:
        ctx.values = values
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(value.clone() for value in ctx.values)
