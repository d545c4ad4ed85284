"""Clip gradients by their total norm, with few kernel calls for many tensors.

    norm <- (sum |g|^p)^(1/p);   g <- g * min(1, max_norm / (norm + 1e-6))

Small gradients of one dtype are copied into one flat tensor to compute the norm. A fused kernel multiplies.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels import unscale_

__all__ = ["clip_by_norm_"]

_SMALL = 1 << 16  # mean number of elements above which a copy costs more than one call per tensor


@torch.no_grad()
def clip_by_norm_(
    grads: Sequence[Tensor], max_norm: float, norm_type: float = 2.0, *, parts: Sequence[Tensor] | None = None
) -> Tensor:
    """Scale ``grads`` in place so that their total norm is at most ``max_norm``.

    Args:
        grads: strided floating-point tensors, on any devices.
        max_norm: > 0.
        norm_type: ``p``; inf for the largest magnitude.
        parts: the tensors to multiply, if ``grads`` have padding: a NaN norm would make the padding NaN.

    Returns:
        ``()``, the norm before clipping; 0.0 without gradients.

    Sync: none.

    Reference: ``torch.nn.utils.clip_grad_norm_``.

    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> clip_by_norm_(grads, 1.0), grads[0].item() < 0.6
    (tensor(5.), True)
    """
    groups = _by_device(grads)
    if not groups:
        return torch.tensor(0.0)
    first = next(iter(groups))
    norms = [_norm(group, norm_type).to(first, non_blocking=True) for group in groups.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()
    if parts is not None and not (first.type == "cpu" and math.isfinite(factor.item())):
        groups = _by_device(parts)
    for device, group in groups.items():
        unscale_(group, torch.zeros((), device=device), factor.to(device, non_blocking=True))
    return norm


def _by_device(grads: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return groups


def _norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm ``()`` of tensors on one device."""
    dtype = grads[0].dtype
    small = sum(grad.numel() for grad in grads) <= _SMALL * len(grads)
    if small and all(grad.dtype is dtype for grad in grads):
        flat: Tensor = torch._C._nn.flatten_dense_tensors(grads)
        norm: Tensor = torch.linalg.vector_norm(flat, norm_type)
        return norm
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else grads[0].new_zeros(())
