"""Decisions and norms over sharded gradients, as FSDP2 (``fully_shard``) and tensor parallelism make them.

    found_inf <- max over the ranks that hold shards          one all-reduce of 4 bytes
    norm      <- (sum over those ranks of norm^p)^(1/p)       one all-reduce of 8 bytes

Each rank holds its own elements of every gradient. Without these, the rank with an inf would skip a step that the
others take. Every rank makes the same calls in the same order, whether or not it has gradients: what is sharded is
read from the parameters. Gradients that DistributedDataParallel averages need no agreement, since all ranks have the
same values. The local shard of one tensor is `amplab.scalers.local_shard`.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amplab.scalers import is_sharded

__all__ = [
    "RankGroup",
    "agree_on_found_inf",
    "is_fully_sharded",
    "reshard",
    "norm_over_ranks",
    "rank_groups",
    "rank_groups_of",
]


class RankGroup(NamedTuple):
    """The ranks that hold the shards of a parameter along one dimension of its mesh.

    Attributes:
        group: the process group.
        device_type: the device on which the group communicates; gradients may be offloaded to another one.
    """

    group: Any
    device_type: str


def rank_groups_of(param: Tensor) -> tuple[RankGroup, ...]:
    """Return the groups of ranks that hold different elements of ``param``: none for a tensor that is not sharded.

    Dimensions of the mesh over which a parameter is replicated are left out: the values there are the same.
    Sync: none.
    """
    if not is_sharded(param):
        return ()
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # a DTensor has both
    return tuple(
        RankGroup(mesh.get_group(dim), mesh.device_type)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def rank_groups(params: Iterable[Tensor]) -> tuple[RankGroup, ...]:
    """Return the groups of `rank_groups_of` over all ``params``, each once, in the order of the parameters.

    Sync: none.
    """
    return tuple(dict.fromkeys(group for param in params for group in rank_groups_of(param)))


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on ``model`` itself. Sync: none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Let the modules of FSDP2 have their shards: after a forward the outermost one keeps its parameters whole.

    Sync: none.

    Reference: torch.distributed.fsdp.FSDPModule.reshard.
    """
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]  # a method of FSDPModule


def agree_on_found_inf(found_inf: Tensor, groups: Sequence[RankGroup]) -> Tensor:
    """Return ``found_inf`` after the ranks of each group have taken the maximum, in place.

    Args:
        found_inf: one float32 element; > 0 if a gradient of this rank is inf or NaN.
        groups: of `rank_groups`; every rank of a group calls this.

    Returns:
        ``found_inf``. Sync: none; one on the CPU, where a collective waits for the other ranks.

    Reference: ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    >>> agree_on_found_inf(torch.ones(1), [])
    tensor([1.])
    """
    for group, device_type in groups:
        _all_reduce(found_inf, dist.ReduceOp.MAX, group, device_type)
    return found_inf


def norm_over_ranks(norm: Tensor, groups: Sequence[RankGroup], norm_type: float = 2.0) -> Tensor:
    """Return the norm of gradients whose elements are spread over the ranks of each group.

    Args:
        norm: ``()``, the norm of the elements on this rank; 0.0 if it has none.
        groups: as `agree_on_found_inf`.
        norm_type: ``p`` > 0; inf for the largest magnitude.

    Returns:
        ``()`` in the dtype of ``norm``, the same on each of the ranks. Sums of powers are float64.

    Raises:
        ValueError: another ``norm_type``.

    Sync: as `agree_on_found_inf`.

    >>> norm_over_ranks(torch.tensor(3.0), [])
    tensor(3.)
    """
    if not groups:
        return norm
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: expected a number > 0 for sharded gradients, such as 2.0, or inf.")
    if norm_type == float("inf"):
        largest = norm.nan_to_num(nan=float("inf"), posinf=float("inf"))  # a maximum may drop NaN
        return agree_on_found_inf(largest, groups)
    powers = norm.double() ** norm_type
    for group, device_type in groups:
        _all_reduce(powers, dist.ReduceOp.SUM, group, device_type)
    total: Tensor = (powers ** (1.0 / norm_type)).to(norm.dtype)
    return total


@torch.no_grad()
def _all_reduce(value: Tensor, operation: Any, group: Any, device_type: str) -> None:
    sent = value.to(device_type)
    dist.all_reduce(sent, op=operation, group=group)
    if sent is not value:
        value.copy_(sent)
