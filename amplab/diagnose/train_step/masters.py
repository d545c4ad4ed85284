"""Which parameters of a model an optimizer updates, also where it holds float32 masters of them."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["half_and_master", "model_parameters"]


def model_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that receive gradients from backward: the model's, also where the optimizer updates masters."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_master = {id(master): model for model, master in half_and_master(optimizer)}
    return [by_master.get(id(parameter), parameter) for parameter in stepped]


def half_and_master(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return (half parameter, float32 master) of an optimizer that amp has initialized; the names are apex's."""
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None or not stash.all_fp32_from_fp16_params:
        return []
    masters = stash.all_fp32_from_fp16_params
    by_id = {id(master) for master in masters}
    groups = zip(stash.fp16_groups, stash.fp32_from_fp16_groups, strict=True)
    return [
        (half, master) for halves, ms in groups for half, master in zip(halves, ms, strict=True) if id(master) in by_id
    ]
