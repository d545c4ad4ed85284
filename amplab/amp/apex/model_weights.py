"""Cast a model's parameters and buffers in place, and back.

Parameters keep their identity: only their data changes, as in ``Module.half()``. Masters and optimizer state are
handled in `hooked_optimizer`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amplab.formats import LOW_PRECISION_DTYPES

__all__ = ["Uncast", "cast_model", "refuse_torn_params", "set_values"]

_NONE: Mapping[nn.Module, torch.dtype] = MappingProxyType({})


class Uncast(NamedTuple):
    """The values and the gradient of a parameter before it was cast."""

    values: Tensor
    grad: Tensor | None


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_batchnorm_fp32: bool = False,
    own_dtypes: Mapping[nn.Module, torch.dtype] = _NONE,
) -> None:
    """Cast every floating parameter, its gradient and every floating buffer of ``model`` to ``dtype``.

    A second call finishes what an interrupt has left.

    Args:
        model: changed in place.
        dtype: the new dtype of weights and buffers.
        keep_batchnorm_fp32: keep BatchNorm layers with weights, and their running statistics, in float32; those that
            are half already become float32. As in apex, those without weights are cast.
        own_dtypes: modules whose own weights and buffers get another dtype.

    Sync: none.
    """
    for module in model.modules():
        wanted = own_dtypes.get(module, dtype)
        if keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            if module.weight.dtype not in LOW_PRECISION_DTYPES:
                continue
            wanted = torch.float32
        for param in module.parameters(recurse=False):
            if _to_cast(param, wanted) or (param.grad is not None and _to_cast(param.grad, wanted)):
                set_values(param, param.data.to(wanted))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if _to_cast(buffer, wanted):
                setattr(module, name, buffer.to(wanted))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def refuse_torn_params(model: nn.Module, own_dtypes: Mapping[nn.Module, torch.dtype]) -> None:
    """Refuse to cast a parameter that modules of different dtypes share.

    Raises:
        ValueError: such a parameter; the message has both of its names.
    """
    places: dict[Tensor, tuple[str, torch.dtype | None]] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            other, dtype = places.setdefault(param, (name, own_dtypes.get(module)))
            if dtype is not own_dtypes.get(module):
                raise ValueError(
                    f"module_rules: {name} and {other} are the same parameter, and the rules give it two dtypes. Name "
                    "both modules in one rule, or neither."
                )


def set_values(param: Tensor, values: Tensor) -> None:
    """Set the values of ``param``, of any dtype and without a copy; cast its gradient to the same dtype."""
    param.data = values  # first: an interrupt then loses no gradient
    grad = param.grad
    if grad is not None and grad.dtype != values.dtype:
        param.grad = grad.to(values.dtype)


def _to_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype
