"""Clip gradients by their total norm, with few kernel calls for many tensors.

    norm <- (sum |g|^p)^(1/p);   g <- g * min(1, max_norm / (norm + 1e-6))

Small gradients of one dtype are copied into one flat tensor to compute the norm. A fused kernel multiplies.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels import unscale_
from amplab.parallel.shards import RankGroup, norm_over_ranks, rank_groups_of
from amplab.scalers import strided_grad, summed_values, to_device

__all__ = ["clip_by_norm_", "clip_shards_by_norm_"]

_SMALL = 1 << 16  # mean number of elements above which a copy costs more than one call per tensor


@torch.no_grad()
def clip_by_norm_(
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    parts: Sequence[Tensor] | None = None,
    summed: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale ``grads`` in place so that their total norm is at most ``max_norm``.

    Args:
        grads: strided floating-point tensors, on any devices.
        max_norm: > 0.
        norm_type: ``p``; inf for the largest magnitude.
        parts: the tensors to multiply, if ``grads`` have padding: a NaN norm would make the padding NaN.
        summed: the tensors to take the norm of, if ``grads`` are of sparse gradients whose duplicates are not added.

    Returns:
        ``()``, the norm before clipping; 0.0 without gradients.

    Sync: none.

    Reference: ``torch.nn.utils.clip_grad_norm_``.

    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> clip_by_norm_(grads, 1.0), grads[0].item() < 0.6
    (tensor(5.), True)
    """
    if not grads:
        return torch.tensor(0.0, dtype=torch.float32)
    norm = _norm(grads if summed is None else summed, norm_type)
    factor = _factor(norm, max_norm)
    keeps_padding = parts is None or (norm.device.type == "cpu" and math.isfinite(factor.item()))
    _multiply_(grads if keeps_padding or parts is None else parts, factor)
    return norm


@torch.no_grad()
def clip_shards_by_norm_(params: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Do the same for the gradients of sharded parameters; all ranks that hold shards call it.

    Args:
        params: DTensors and others; the gradients of the others count once.
        max_norm: > 0.
        norm_type: ``p`` > 0; inf for the largest magnitude, which is inf if an element is NaN.

    Returns:
        ``()``, the norm before clipping, the same on every rank.

    Raises:
        ValueError: another ``norm_type``; the gradients are unchanged.

    Sync: none; one on the CPU.

    Reference: ``torch.nn.utils.clip_grad_norm_`` for DTensors.
    """
    held: dict[tuple[RankGroup, ...], list[Tensor]] = {}
    written = [strided_grad(param) for param in params if param.grad is not None]
    for param in params:
        grads = held.setdefault(rank_groups_of(param), [])
        if param.grad is not None:
            grads.append(summed_values(param.grad))
    nothing = torch.zeros((), dtype=torch.float32, device=params[0].device)
    norms = [
        norm_over_ranks(_norm(grads, norm_type) if grads else nothing, groups, norm_type)
        for groups, grads in held.items()
    ]
    norm = _total(norms, norm_type)
    _multiply_(written, _factor(norm, max_norm))
    return norm


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()


def _multiply_(grads: Sequence[Tensor], factor: Tensor) -> None:
    for device, here in _by_device(grads).items():
        unscale_(here, torch.zeros((), dtype=torch.float32, device=device), to_device(factor, device))


def _norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm ``()`` of tensors on any devices, on the device of the first."""
    return _total([_norm_on_device(group, norm_type) for group in _by_device(grads).values()], norm_type)


def _total(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all, given the norms of the parts."""
    if len(norms) == 1:
        return norms[0]
    here = [to_device(norm, norms[0].device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(here), norm_type)
    return total


def _by_device(grads: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups


def _norm_on_device(grads: list[Tensor], norm_type: float) -> Tensor:
    dtype = grads[0].dtype
    small = sum(grad.numel() for grad in grads) <= _SMALL * len(grads)
    if small and all(grad.dtype is dtype for grad in grads):
        flat: Tensor = torch._C._nn.flatten_dense_tensors(grads)
        norm: Tensor = torch.linalg.vector_norm(flat, norm_type)
        return norm
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else grads[0].new_zeros(())
