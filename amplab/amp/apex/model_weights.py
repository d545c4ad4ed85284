"""Cast a model's parameters and buffers in place, and back.

Parameters keep their identity: only their data changes, as in ``Module.half()``. The optimizer's side of
the change, masters and state, is in `hooked_optimizer`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Uncast", "cast_model", "refuse_torn_params", "set_values"]

_NONE: Mapping[nn.Module, torch.dtype] = MappingProxyType({})


class Uncast(NamedTuple):
    """What a parameter held before it was cast."""

    values: Tensor
    grad: Tensor | None


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_batchnorm_fp32: bool = False,
    own_dtypes: Mapping[nn.Module, torch.dtype] = _NONE,
) -> dict[Tensor, Uncast]:
    """Cast every floating parameter, its gradient and every floating buffer of ``model`` to ``dtype``.

    Args:
        model: changed in place.
        dtype: of weights and buffers from now on.
        keep_batchnorm_fp32: leave BatchNorm layers that have weights of their own, and their running
            statistics, as they are. (apex's rule: one without weights is cast.)
        own_dtypes: the modules whose own weights and buffers get another dtype than ``dtype``.

    Returns:
        For each parameter that was cast what it held before.

    Sync: none.
    """
    before: dict[Tensor, Uncast] = {}
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        wanted = own_dtypes.get(module, dtype)
        for param in module.parameters(recurse=False):
            if _to_cast(param, wanted):
                before[param] = Uncast(param.data, param.grad)
                set_values(param, param.data.to(wanted))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if _to_cast(buffer, wanted):
                setattr(module, name, buffer.to(wanted))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return before


def refuse_torn_params(model: nn.Module, own_dtypes: Mapping[nn.Module, torch.dtype]) -> None:
    """Refuse to cast a parameter that modules of different dtypes share.

    Raises:
        ValueError: names both places of the parameter.
    """
    places: dict[Tensor, tuple[str, torch.dtype | None]] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            other, dtype = places.setdefault(param, (name, own_dtypes.get(module)))
            if dtype is not own_dtypes.get(module):
                raise ValueError(
                    f"module_rules: {name} and {other} are one parameter, and the rules give it two dtypes; "
                    "let a rule name both modules or neither."
                )


def set_values(param: Tensor, values: Tensor) -> None:
    """Replace the values of ``param``, of any dtype, without a copy, and cast its gradient to their dtype."""
    grad, param.grad = param.grad, None
    param.data = values
    if grad is not None:
        param.grad = grad.to(values.dtype)


def _to_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype
