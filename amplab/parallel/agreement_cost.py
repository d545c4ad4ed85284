"""What an agreement of all ranks costs, on paper: an all-reduce of a few bytes, by formula and by simulation.

    tree    base + 2 * (floor(log2 g) * inside + floor(log2 h) * between)        g GPUs in a host, h hosts
    ring    base + 2 * (n - 1) * (between if h > 1 else inside)                  n = g * h

Both hold without jitter. With a delay of mean ``jitter`` on each message, the mean of a tree lies between the longest
path's mean and the sum of the expected maximum of each level; E[max of k delays] = jitter * (1 + 1/2 + … + 1/k).

`simulated_agreement` sends the messages of the tree one by one. The README of this folder has the results.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["LatencyModel", "agreement_bounds", "agreement_time", "harmonic", "simulated_agreement"]

_Delays = Callable[..., Tensor]
"""Returns random delays of a given shape."""


@dataclass(frozen=True)
class LatencyModel:
    """Latencies of small messages, in seconds. The defaults are those of torch's cost model for DTensor.

    Attributes:
        gpus_per_host: a power of two.
        base: of one collective, whatever its size.
        inside: of a message between two GPUs of a host.
        between: of a message between two hosts.
        jitter: mean of a random delay of each message, exponentially distributed.

    Raises:
        ValueError: ``gpus_per_host`` is not a power of two; a latency < 0.

    Reference: ``MeshTopoInfo`` and ``allreduce_cost`` in ``torch.distributed.tensor._collective_utils``, for NCCL.
    """

    gpus_per_host: int = 8
    base: float = 6.6e-6
    inside: float = 0.6e-6
    between: float = 2.7e-6
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.gpus_per_host < 1 or self.gpus_per_host & (self.gpus_per_host - 1):
            raise ValueError(f"gpus_per_host={self.gpus_per_host}: expected a power of two, such as 8.")
        for name in ("base", "inside", "between", "jitter"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected seconds >= 0.")

    def hosts(self, gpus: int) -> int:
        """Return the number of hosts of ``gpus`` GPUs.

        Raises:
            ValueError: ``gpus`` neither fits into one host nor fills all of its hosts.
        """
        if gpus < 1 or (gpus > self.gpus_per_host and gpus % self.gpus_per_host):
            raise ValueError(f"gpus={gpus}: expected a multiple of gpus_per_host={self.gpus_per_host}, or fewer.")
        return max(1, gpus // self.gpus_per_host)


def agreement_time(
    gpus: int, latency: LatencyModel | None = None, algorithm: Literal["tree", "ring"] = "tree"
) -> float:
    """Return the seconds of an all-reduce of a few bytes without jitter, after all ranks have arrived.

    Args:
        gpus: number of ranks.
        latency: None for the defaults.
        algorithm: "tree", which NCCL takes for few bytes, or "ring".

    >>> [round(agreement_time(gpus) * 1e6, 1) for gpus in (8, 1000, 10_000)]
    [10.2, 42.6, 64.2]
    >>> [round(agreement_time(gpus, algorithm="ring") * 1e6) for gpus in (8, 1000, 10_000)]
    [15, 5401, 54001]
    """
    latency = latency or LatencyModel()
    hosts = latency.hosts(gpus)
    if algorithm == "ring":
        return latency.base + 2 * (gpus - 1) * (latency.between if hosts > 1 else latency.inside)
    inside, between = _depths(gpus, latency)
    return latency.base + 2 * (inside * latency.inside + between * latency.between)


def agreement_bounds(gpus: int, latency: LatencyModel) -> tuple[float, float]:
    """Return a lower and an upper bound of the mean seconds of a tree with jitter.

    >>> low, high = agreement_bounds(1000, LatencyModel(jitter=5e-6))
    >>> round(low * 1e6, 1), round(high * 1e6, 1)
    (132.6, 425.2)
    """
    least = agreement_time(gpus, latency)
    low = least + 2 * sum(_depths(gpus, latency)) * latency.jitter
    messages = [count for counts in _messages(gpus, latency) for count in counts]
    hops = latency.base + 2 * sum(
        len(counts) * hop
        for counts, hop in zip(_messages(gpus, latency), (latency.inside, latency.between), strict=True)
    )
    return low, hops + 2 * latency.jitter * sum(map(harmonic, messages))


def simulated_agreement(
    gpus: int, latency: LatencyModel, *, spread: float = 0.0, trials: int = 200, seed: int = 0
) -> Tensor:
    """Simulate all-reduces over a binomial tree: first within each host, then over the hosts, then back.

    Args:
        gpus: number of ranks.
        latency: of the messages.
        spread: mean seconds by which a rank arrives late, exponentially distributed.
        trials: number of all-reduces.
        seed: of the delays.

    Returns:
        ``(trials,)`` float64: seconds from the first possible arrival until the last rank has the result.

    >>> round(simulated_agreement(10_000, LatencyModel(), trials=1).item() * 1e6, 1)
    64.2
    """
    generator = torch.Generator().manual_seed(seed)
    hosts = latency.hosts(gpus)

    def delays(mean: float, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64).exponential_(1.0, generator=generator) * mean

    arrived = delays(spread, trials, hosts, gpus // hosts)
    at_host = _reduced(arrived, latency.inside, lambda *shape: delays(latency.jitter, *shape))
    at_root = _reduced(at_host, latency.between, lambda *shape: delays(latency.jitter, *shape))
    at_hosts = _sent(at_root, hosts, latency.between, lambda *shape: delays(latency.jitter, *shape))
    at_all = _sent(at_hosts, gpus // hosts, latency.inside, lambda *shape: delays(latency.jitter, *shape))
    return latency.base + at_all.flatten(1).amax(1)


def harmonic(count: int) -> float:
    """Return ``1 + 1/2 + … + 1/count``, the expected maximum of as many exponential delays of mean 1.

    >>> [round(harmonic(count), 2) for count in (8, 1000, 10_000)]
    [2.72, 7.49, 9.79]
    """
    return math.fsum(1.0 / each for each in range(1, count + 1))


def _depths(gpus: int, latency: LatencyModel) -> tuple[int, int]:
    """Return the messages on the longest path within a host, and over the hosts."""
    hosts = latency.hosts(gpus)
    return (gpus // hosts).bit_length() - 1, hosts.bit_length() - 1


def _messages(gpus: int, latency: LatencyModel) -> tuple[list[int], list[int]]:
    """Return how many messages each level of the tree has: within all hosts, and over the hosts."""
    hosts = latency.hosts(gpus)
    inside = [hosts * count for count in _pairs(gpus // hosts)]
    return inside, _pairs(hosts)


def _pairs(count: int) -> list[int]:
    """Return the messages of each level of a binomial tree: rank ``i`` with bit ``l`` lowest sends in level ``l``."""
    return [len(range(1 << level, count, 2 << level)) for level in range((count - 1).bit_length())]


def _reduced(times: Tensor, hop: float, delays: _Delays) -> Tensor:
    """Return when the first of the ranks in the last dimension has the values of all."""
    while times.size(-1) > 1:
        receivers, senders = times[..., 0::2], times[..., 1::2]
        sent = senders + hop + delays(*senders.shape)
        paired = torch.maximum(receivers[..., : senders.size(-1)], sent)
        times = torch.cat([paired, receivers[..., senders.size(-1) :]], -1)
    return times[..., 0]


def _sent(root: Tensor, count: int, hop: float, delays: _Delays) -> Tensor:
    """Return when each of ``count`` ranks, in a new last dimension, has what the first one has at ``root``."""
    times = root.unsqueeze(-1)
    for level in reversed(range((count - 1).bit_length())):
        ranks = len(range(0, count, 1 << level))
        senders = times[..., : ranks // 2]
        received = senders + hop + delays(*senders.shape)
        both = torch.stack([senders, received], -1).flatten(-2)
        times = torch.cat([both, times[..., ranks // 2 :]], -1)
    return times
