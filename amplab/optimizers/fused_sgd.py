"""SGD in one pass, with apex's arguments.

::

    g <- g / grad_scale * min(1, max_grad_norm / (norm + 1e-6))
    g <- g + weight_decay p;   b <- momentum b + (1 - dampening) g     b <- g, the first time
    p <- p - lr (nesterov ? g + momentum b : b)
"""

from typing import Any

import torch
from torch import Tensor

from amplab.kernels import sgd_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state
from amplab.optimizers.group_settings import REQUIRED

__all__ = ["FusedSGD"]

_BUFFER = "momentum_buffer"


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` whose one pass over the tensors also unscales, clips and skips.

    Its ``state_dict`` is that of ``torch.optim.SGD``: each loads the other's. After a step under a scaler
    gradients are unscaled; see `FusedOptimizer`.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The momentum of 16-bit
            ones, and the arithmetic, are float32.
        lr: learning rate; may be omitted if every group has one.
        momentum: momentum factor.
        dampening: dampening of the momentum.
        weight_decay: weight decay factor.
        nesterov: use Nesterov momentum.
        wd_after_momentum: add the decay after the momentum, ``p <- p - lr (b + weight_decay p)``.
        materialize_master_grads: ignored; masters of ``amp.initialize`` always have gradients, so that they can be
            clipped.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        maximize: ascend instead of descend.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number; under a scaler one at the first step of a momentum with dampening.

    Reference: apex ``FusedSGD``, ``torch.optim.SGD``.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.full((1,), 4.0)
    >>> FusedSGD([weight], lr=0.5, max_grad_norm=1.0).step()
    >>> round(weight.item(), 5)
    0.5
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = REQUIRED,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        del materialize_master_grads
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True)
        own = {"wd_after_momentum": wd_after_momentum, "master_weights": master_weights, "set_grad_none": set_grad_none}
        self._add_defaults(own, max_grad_norm)

    _leading_state = _BUFFER

    def _settings(self) -> tuple[Any, ...]:
        return tuple(group["momentum"] != 0 for group in self.param_groups)  # a schedule may enable it

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0 or group["master_weights"])

    def _asks_before_it_begins(self) -> bool:
        return any(group["momentum"] != 0 and group["dampening"] != 0 for group in self.param_groups)

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        if group["momentum"] == 0 or state.get(_BUFFER) is not None:
            return False
        state[_BUFFER] = new_state(param)
        return bool(group["dampening"] != 0)  # else momentum * 0 + g is g

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        sgd_(
            batch.params,
            grads,
            batch.state(_BUFFER) if group["momentum"] != 0 else (),
            batch.copies,
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            wd_after_momentum=group["wd_after_momentum"],
            first=batch.first,
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )
