"""The sum of the losses of a step, which is not read before it is needed."""

import torch
from torch import Tensor

from amplab.policies.casting.function_modes import without_function_modes

__all__ = ["added_losses"]


@torch.no_grad()
def added_losses(total: float | Tensor | None, loss: float | Tensor) -> float | Tensor:
    """Return the sum of two losses, in float64 where the device has it: that of half losses may be above 65504.

    Args:
        total: the sum so far; None for no loss yet.
        loss: the next one. A tensor of several elements is no loss, and neither is its sum with others: it is returned.

    Sync: none.
    """
    if total is None:
        return loss
    for each in (total, loss):
        if isinstance(each, Tensor) and each.numel() != 1:
            return each
    with without_function_modes():
        if isinstance(total, Tensor) and isinstance(loss, Tensor):
            loss = loss.to(total.device, non_blocking=True)
        return _wide(total) + _wide(loss)


def _wide(loss: float | Tensor) -> float | Tensor:
    if not isinstance(loss, Tensor):
        return loss
    return loss.to(torch.float32 if loss.device.type == "mps" else torch.float64)
