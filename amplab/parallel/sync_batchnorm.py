"""BatchNorm over all processes: torch's, with apex's arguments."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, taking what apex's took.

    Args:
        num_features: channels of the input.
        eps, momentum, affine, track_running_stats, process_group: as in torch.
        channel_last: accepted; torch takes inputs of any memory format, channels in dimension 1.
        fuse_relu: True is refused.

    Raises:
        ValueError: ``fuse_relu=True``.

    Reference: apex ``SyncBatchNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        del channel_last
        if fuse_relu:
            raise ValueError("SyncBatchNorm got fuse_relu=True: expected False; put torch.nn.ReLU behind it.")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return ``module`` with every BatchNorm in it replaced by torch's SyncBatchNorm, weights and statistics kept.

    Args:
        module: any; it is changed in place, and is replaced itself where it is a BatchNorm.
        process_group: the processes to agree with; None for all.
        channel_last: accepted; torch takes inputs of any memory format.

    Reference: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.

    >>> type(convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3)))[0]).__name__
    'SyncBatchNorm'
    """
    del channel_last
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the processes into groups of ``group_size`` neighbours, for `convert_syncbn_model`; every process calls it.

    Args:
        group_size: processes in a group, a divisor of their number; 0 for one group of all.

    Returns:
        The group of this process; None, which stands for all, where ``group_size`` is 0.

    Raises:
        ValueError: the processes cannot be split like that.

    Reference: ``apex.parallel.create_syncbn_process_group``.
    """
    if group_size == 0:
        return None
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if group_size < 0 or world_size % group_size:
        raise ValueError(
            f"group_size={group_size}: expected a divisor of the {world_size} processes; 0 is one group of all."
        )
    firsts = range(0, world_size, group_size)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in firsts]
    return groups[rank // group_size]
