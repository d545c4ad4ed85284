"""BatchNorm over all processes: torch's SyncBatchNorm with apex's arguments, also on the CPU.

    n = sum over processes;   mean = sum (x) / n;   var = sum (x - mean)^2 / n;   y = (x - mean) / sqrt(var + eps)

Each sum is one all_reduce; its gradient is another all_reduce.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amplab.parallel.agreement import explained_absence

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group", "sync_batch_norm_on_cpu"]

_torch_forward = nn.SyncBatchNorm.forward


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with apex's arguments.

    Args:
        num_features: channels of the input.
        eps, momentum, affine, track_running_stats, process_group: as in torch.
        channel_last: ignored; torch takes inputs of any memory format, with channels in dimension 1.
        fuse_relu: must be False.

    Raises:
        ValueError: ``fuse_relu=True``.

    Reference: apex ``SyncBatchNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        del channel_last
        if fuse_relu:
            raise ValueError("SyncBatchNorm got fuse_relu=True: expected False; add torch.nn.ReLU after it.")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize over the batches of all processes; on the CPU in float32, rounded to the dtype of ``input``."""
        return sync_batch_norm_on_cpu(self, input)


def sync_batch_norm_on_cpu(module: nn.SyncBatchNorm, inputs: Tensor) -> Tensor:
    """Run the forward of any SyncBatchNorm, also on the CPU.

    Args:
        module: in training with several processes it uses the statistics of all; else it is a plain BatchNorm.
        inputs: ``(N, C, ...)`` floating.

    Returns:
        A tensor of the shape and dtype of ``inputs``.

    Sync: one all_reduce for the mean and one for the variance; the same in backward.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if not (inputs.device.type == "cpu" and module.training and distributed):
        return _torch_forward(module, inputs)
    if dist.get_world_size(module.process_group) <= 1:  # -1 outside of the group
        return nn.modules.batchnorm._BatchNorm.forward(module, inputs)
    if inputs.dim() < 2:
        raise ValueError(f"SyncBatchNorm got {inputs.dim()}D input: expected at least 2D, channels in dimension 1.")
    wide = inputs if inputs.dtype is torch.float64 else inputs.float()
    normalized = _normalized(module, wide)
    if module.affine:
        shape = [1, -1, *[1] * (inputs.dim() - 2)]
        normalized = normalized * module.weight.to(wide.dtype).view(shape) + module.bias.to(wide.dtype).view(shape)
    return normalized.to(inputs.dtype)


def _normalized(module: nn.SyncBatchNorm, wide: Tensor) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps)`` over all processes, and update the running statistics."""
    around = [dim for dim in range(wide.dim()) if dim != 1]
    own = torch.tensor([wide.numel() // max(1, wide.size(1))], dtype=wide.dtype)  # a process may have an empty batch
    sums = _summed(module, torch.cat([wide.sum(around), own]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(1, -1, *[1] * (wide.dim() - 2))
    var = _summed(module, centred.square().sum(around)) / count
    if module.track_running_stats:
        _follow(module, mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)))
    return centred * (var + module.eps).rsqrt().view(1, -1, *[1] * (wide.dim() - 2))


def _summed(module: nn.SyncBatchNorm, tensor: Tensor) -> Tensor:
    summed: Tensor = _AllReduced.apply(tensor, module.process_group)  # type: ignore[no-untyped-call]  # torch's
    return summed


class _AllReduced(torch.autograd.Function):
    """The sum over processes. It is part of the loss of every process, so the gradient is the sum of gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed = tensor.contiguous().clone()
        with explained_absence("add up the statistics of SyncBatchNorm"):
            dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllReduced.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]  # torch's


@torch.no_grad()
def _follow(module: nn.SyncBatchNorm, mean: Tensor, var: Tensor) -> None:
    """Update the running statistics as ``nn.BatchNorm``: by ``momentum``, or to the cumulative mean if it is None."""
    if module.num_batches_tracked is None or module.running_mean is None or module.running_var is None:
        return
    module.num_batches_tracked.add_(1)
    factor = 1.0 / module.num_batches_tracked.item() if module.momentum is None else module.momentum
    for running, new in ((module.running_mean, mean), (module.running_var, var)):
        running.copy_(running.to(new.dtype) * (1 - factor) + new * factor)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return ``module`` with every BatchNorm replaced by a `SyncBatchNorm` with its weights and statistics.

    One that has several names, as a layer that is called twice may have, stays one module.

    Args:
        module: modified in place; if it is a BatchNorm, the replacement is returned.
        process_group: the processes whose batches are normalized together; None for all.
        channel_last: ignored; torch takes inputs of any memory format.

    On the CPU wrap the model in ``amplab.parallel.DistributedDataParallel``, or use ``combine_ddp``: torch's wrapper
    refuses every SyncBatchNorm there ("SyncBatchNorm layers only work with GPU modules").

    Reference: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.

    >>> type(convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3)))[0]).__name__
    'SyncBatchNorm'
    """
    del channel_last
    return _converted(module, process_group, {})


def _converted(module: nn.Module, process_group: Any, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return what ``module`` becomes; ``done`` has what others have become."""
    if module not in done:
        converted = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            converted = _synced(module, process_group)
        done[module] = converted
        for name, child in module._modules.items():  # `named_children` leaves out other names of a child
            if child is not None:
                converted.add_module(name, _converted(child, process_group, done))
    return done[module]


def _synced(norm: nn.modules.batchnorm._BatchNorm, process_group: Any) -> SyncBatchNorm:
    """Return a `SyncBatchNorm` with the tensors of ``norm``."""
    affine, tracks = norm.affine, norm.track_running_stats
    synced = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, affine, tracks, process_group)
    for name, param in norm.named_parameters(recurse=False):
        setattr(synced, name, param)
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(synced, name, buffer)
    return synced.train(norm.training)


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the processes into groups of ``group_size`` for `convert_syncbn_model`; every process must call it.

    Args:
        group_size: processes in a group, a divisor of their number; 0 for one group of all.

    Returns:
        The group of this process; None, which means all, if ``group_size`` is 0.

    Raises:
        ValueError: ``group_size`` does not divide the number of processes.

    Reference: ``apex.parallel.create_syncbn_process_group``.
    """
    if group_size == 0:
        return None
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if group_size < 0 or world_size % group_size:
        raise ValueError(
            f"group_size={group_size}: expected a divisor of the {world_size} processes; 0 means one group of all."
        )
    firsts = range(0, world_size, group_size)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in firsts]
    return groups[rank // group_size]
