"""What the ranks of one experiment exchange in each step: averaged gradients, the buffers of rank 0, and requests.

    gradient <- sum over ranks (gradient / world_size)

as DistributedDataParallel computes it: divided before the sum, in the gradients' own dtype. All ranks therefore see the
same inf or NaN, and skip the same steps. The requests of every rank, such as to stop, travel in the same buffer, so
that all ranks act on them after the same step at no further cost. `SilentRanks` tells which rank the others wait for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from amplab.parallel.ranks import PostedTexts, Rank

__all__ = ["SILENT", "RankExchange", "RankLost", "SilentRanks"]

SILENT = 10.0
"""Seconds without an answer of a rank after which this is told."""

_ANSWERS_EVERY = 1.0  # seconds

_REQUESTS = ("stop", "checkpoint")
_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\] ")


class RankLost(RuntimeError):
    """An exchange failed: another rank has ended, or did not answer within the timeout of the process group."""


class RankExchange:
    """The exchange of one rank with the others; every rank makes the same calls in the same order.

    Args:
        place: this rank.

    Attributes:
        place: this rank.
        agreed: what some rank has requested, as of the last `average_`; equal on every rank.
        is_over: whether this rank takes part no longer, as after a failure.
    """

    def __init__(self, place: Rank) -> None:
        self.place = place
        self.agreed: frozenset[str] = frozenset()
        self.is_over = False
        self._requested: set[str] = set()

    def request(self, what: str) -> None:
        """Request "stop" or "checkpoint" of all ranks, with the next `average_`; callable from any thread."""
        if what not in _REQUESTS:
            raise ValueError(f"{what!r}: expected one of {', '.join(_REQUESTS)}.")
        self._requested.add(what)

    def begin_step(self, buffers: Sequence[Tensor]) -> None:
        """Give every rank the buffers of rank 0, in place, as DistributedDataParallel does before a forward."""
        self.agreed = frozenset()
        for buffer in buffers:
            self._wait_for(dist.broadcast(buffer, 0, async_op=True))

    def average_(self, grads: Sequence[Tensor]) -> None:
        """Average gradients over the ranks in place, one all-reduce for each dtype. Sync: one.

        Raises:
            RankLost: another rank has ended or does not answer.
        """
        requests = set(self._requested) if grads else set()
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            own = [grad for grad in grads if grad.dtype is dtype]
            flags = torch.tensor([float(name in requests) for name in _REQUESTS]).to(dtype)
            flat = torch.cat([*(grad.reshape(-1) for grad in own), flags])
            self._wait_for(dist.all_reduce(flat.div_(self.place.world_size), async_op=True))
            *averaged, flags = flat.split([*(grad.numel() for grad in own), len(_REQUESTS)])
            for grad, mean in zip(own, averaged, strict=True):
                grad.copy_(mean.view_as(grad))
            self.agreed |= {name for name, count in zip(_REQUESTS, flags.tolist(), strict=True) if count > 0}
        self._requested -= requests

    def meet(self) -> None:
        """Wait until every rank is here. Raises RankLost."""
        self._wait_for(dist.barrier(async_op=True))

    def _wait_for(self, work: dist.Work | None) -> None:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.place.rank} of {self.place.world_size} stopped: another rank has ended, or did not answer "
                f"in time ({_reason(error)})."
            ) from error


class SilentRanks:
    """Tells which ranks do not answer while a step waits for them, such as one that a signal has stopped.

    Each rank posts a number to the store of the process group once a second, from a thread that does not train. Rank 0
    looks at those of the others, and rank 1 at that of rank 0. Nothing waits for another rank.

    Attributes:
        place: this rank.
    """

    def __init__(self, place: Rank) -> None:
        self.place = place
        self._texts = PostedTexts("answers")
        others = range(1, place.world_size) if place.rank == 0 else range(place.rank == 1)
        self._silent: set[int] = set()
        self._answers, self._due = 0, 0.0
        # What each rank has posted, and how often this one had answered when that was new: not the time, which goes on
        # while a signal stops this rank, too.
        self._last = dict.fromkeys(others, ("", 0))

    def news(self) -> Iterator[str]:
        """Answer, if it is time, and yield a line about each rank that does so no longer, or again."""
        now = time.monotonic()
        if now < self._due:
            return
        self._answers, self._due = self._answers + 1, now + _ANSWERS_EVERY
        self._texts.post(str(self._answers))
        posted = self._texts.read() if self._last else {}
        for rank, (before, since) in self._last.items():
            if (text := posted.get(rank, "")) != before:
                self._last[rank] = text, self._answers
                if rank in self._silent:
                    self._silent.remove(rank)
                    yield f"rank {rank} answers again."
            elif (self._answers - since) * _ANSWERS_EVERY > SILENT and rank not in self._silent:
                self._silent.add(rank)
                yield f"rank {rank} has not answered for {SILENT:g} s; the other ranks wait for it."


def _reason(error: RuntimeError) -> str:
    """Return what gloo says, without the place in its source and its advice.

    >>> _reason(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by"))
    'Connection closed by peer [127.0.0.1]:1'
    """
    return _SOURCE.sub("", str(error)).partition("\n")[0].partition(". ")[0]
