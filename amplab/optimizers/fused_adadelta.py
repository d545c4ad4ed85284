"""Adadelta in one pass.

::

    v <- rho v + (1 - rho) g^2;   d = g sqrt(u + eps) / sqrt(v + eps),   g <- g + weight_decay p before all
    u <- rho u + (1 - rho) d^2;   p <- p - lr d
"""

from typing import Any

import torch
from torch import Tensor

from amplab.kernels import adadelta_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedAdadelta"]


class FusedAdadelta(FusedOptimizer, torch.optim.Adadelta):
    """``torch.optim.Adadelta`` whose one pass over the tensors also unscales and skips.

    Its ``state_dict`` is that of ``torch.optim.Adadelta``: each loads the other's.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        rho: decay of the running means.
        eps: added under the roots.
        weight_decay: weight decay factor; added to the gradient.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        maximize: ascend instead of descend.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: ``torch.optim.Adadelta``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, rho, eps, weight_decay, maximize=maximize)
        self._add_defaults({"set_grad_none": set_grad_none, "master_weights": master_weights}, max_grad_norm)

    _leading_state = "acc_delta"

    def _begin_state(self, param: Tensor, _group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "square_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["square_avg"], state["acc_delta"] = new_state(param), new_state(param)
        return False

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        adadelta_(
            batch.params,
            grads,
            batch.state("square_avg"),
            batch.state("acc_delta"),
            batch.state("step"),
            batch.copies,
            **{name: float(batch.group[name]) for name in ("lr", "rho", "eps", "weight_decay")},
            maximize=batch.group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )
