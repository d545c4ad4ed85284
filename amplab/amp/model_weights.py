"""Cast a model's parameters and buffers in place, and back.

Parameters keep their identity: only their data changes, as in ``Module.half()``. The optimizer's side of
the change, masters and state, is in `hooked_optimizer`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["LOW_PRECISION", "Uncast", "cast_model", "set_values"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Uncast(NamedTuple):
    """What a parameter held before it was cast."""

    values: Tensor
    grad: Tensor | None


def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool = False) -> dict[Tensor, Uncast]:
    """Cast every floating parameter, its gradient and every floating buffer of ``model`` to ``dtype``.

    Args:
        model: changed in place.
        dtype: of weights and buffers from now on.
        keep_batchnorm_fp32: leave BatchNorm layers that have weights of their own, and their running
            statistics, as they are. (apex's rule: one without weights is cast.)

    Returns:
        For each parameter that was cast what it held before.

    Sync: none.
    """
    before: dict[Tensor, Uncast] = {}
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        for param in module.parameters(recurse=False):
            if _to_cast(param, dtype):
                before[param] = Uncast(param.data, param.grad)
                set_values(param, param.data.to(dtype))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if _to_cast(buffer, dtype):
                setattr(module, name, buffer.to(dtype))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return before


def set_values(param: Tensor, values: Tensor) -> None:
    """Let ``param`` hold ``values`` of whatever dtype, its gradient cast along; no copy is made of the values."""
    grad, param.grad = param.grad, None
    param.data = values
    if grad is not None:
        param.grad = grad.to(values.dtype)


def _to_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype
