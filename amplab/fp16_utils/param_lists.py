"""Two lists of parameters, the model's and float32 copies of them, and the copies between them.

    model_params, master_params = prep_param_lists(model)
    loss.backward();  model_grads_to_master_grads(model_params, master_params)
    optimizer.step(); master_params_to_model_params(model_params, master_params)

With ``flat_master=True`` the copy is one vector. amplab itself uses `amplab.scalers.MasterWeights`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = [
    "clip_grad_norm",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "prep_param_lists",
    "to_python_float",
]

clip_grad_norm = nn.utils.clip_grad_norm_


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable parameters of ``model``, and float32 copies of them for an optimizer.

    Args:
        model: any model.
        flat_master: return one flattened copy of all; the parameters must have one dtype.

    Raises:
        ValueError: ``flat_master`` with parameters of several dtypes.
    """
    model_params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(param.detach().clone().float()) for param in model_params]
    dtypes = {str(param.dtype) for param in model_params}
    if len(dtypes) != 1:
        raise ValueError(f"flat_master=True got parameters of {', '.join(sorted(dtypes))}: expected one dtype.")
    flat = _flatten_dense_tensors([param.detach() for param in model_params]).float()
    return model_params, [nn.Parameter(flat)]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the model to the masters. Sync: none."""
    if flat_master:
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in model_params]
        master_params[0].grad = _flatten_dense_tensors(grads).to(master_params[0].dtype)
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model. Sync: none."""
    if flat_master:
        master_params = _unflatten_dense_tensors(master_params[0].detach(), list(model_params))
    torch._foreach_copy_(list(model_params), list(master_params))


def to_python_float(value: Any) -> float:
    """Return the number in a tensor of one element, or the first element of a sequence. Sync: one."""
    return value.item() if isinstance(value, Tensor) else value[0]
