"""Adagrad in one pass, with apex's arguments.

::

    h <- h + g^2;   p <- p - lr g / (sqrt(h) + eps),   g <- g + weight_decay p before both
"""

from typing import Any

import torch
from torch import Tensor

from amplab.kernels import adagrad_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedAdagrad"]


class FusedAdagrad(FusedOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` whose one pass over the tensors also unscales and skips.

    Its ``state_dict`` is that of ``torch.optim.Adagrad``: each loads the other's.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        eps: added to the root.
        weight_decay: weight decay factor.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        adagrad_w_mode: add the decay to the update, p <- p - lr (... + weight_decay p), not to the gradient.
        lr_decay: the learning rate of a step is lr / (1 + (step - 1) lr_decay).
        initial_accumulator_value: initial value of h.
        maximize: ascend instead of descend.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: apex ``FusedAdagrad``, ``torch.optim.Adagrad``.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.full((1,), 5.0)
    >>> FusedAdagrad([weight], lr=0.25).step()
    >>> weight.item()
    0.75
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize=maximize)
        own = {"adagrad_w_mode": adagrad_w_mode, "set_grad_none": set_grad_none, "master_weights": master_weights}
        self._add_defaults(own, max_grad_norm)

    _leading_state = "sum"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, also of torch's optimizer."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"] = None  # torch's Adagrad checks this, and has no fused step on every device

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "sum" not in state:  # a group added later, or cleared state
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["sum"] = new_state(param).fill_(group["initial_accumulator_value"])
        self._adopt_state(param, group, state)  # torch makes it in the constructor, in the dtype of the parameter
        return False

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        adagrad_(
            batch.params,
            grads,
            batch.state("sum"),
            batch.state("step"),
            batch.copies,
            lr=float(group["lr"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            lr_decay=float(group["lr_decay"]),
            decoupled=group["adagrad_w_mode"],
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )
