"""RMSprop in one pass, as torch writes it and as TensorFlow does.

::

    v <- alpha v + (1 - alpha) g^2,   g <- g + weight_decay p before all
    b <- momentum b + g / (sqrt(v) + eps);      p <- p - lr b       FusedRMSprop
    b <- momentum b + lr g / sqrt(v + eps);     p <- p - b          FusedRMSpropTF

with the gradient's variance in the place of v where ``centered``.
"""

from typing import Any

import torch
from torch import Tensor

from amplab.kernels import rmsprop_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedRMSprop", "FusedRMSpropTF"]


class FusedRMSprop(FusedOptimizer, torch.optim.RMSprop):
    """``torch.optim.RMSprop``, with the unscaling and the skip of a mixed-precision step in its one pass.

    Its ``state_dict`` is that of ``torch.optim.RMSprop``: either loads the other's and goes on.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones, and the
            arithmetic, is float32.
        lr: learning rate.
        alpha: decay of the running means.
        eps: added to the root.
        weight_decay: its factor; added to the gradient.
        momentum: decay of the buffer; 0 for none.
        centered: divide by the standard deviation of the gradient.
        set_grad_none: what `zero_grad` leaves: None, or zeros.
        maximize: go up the gradient.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step that.

    Raises:
        ValueError: a number out of its range.

    Sync: none, for an ``lr`` that is a number.

    Reference: ``torch.optim.RMSprop``. A variance that rounding takes below 0 is 0 here, and NaN there.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, maximize=maximize)
        self._add_defaults({"set_grad_none": set_grad_none, "master_weights": master_weights}, max_grad_norm)

    _leading_state = "square_avg"

    def _settings(self) -> tuple[Any, ...]:
        return tuple((group["momentum"] > 0, group["centered"]) for group in self.param_groups)

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "square_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["square_avg"] = new_state(param)
        if group["momentum"] > 0 and "momentum_buffer" not in state:
            state["momentum_buffer"] = new_state(param)
        if group["centered"] and "grad_avg" not in state:
            state["grad_avg"] = new_state(param)
        return False

    def _variant(self, _group: dict[str, Any]) -> dict[str, bool]:
        """What of the rule is not as torch writes it."""
        return {}

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        rmsprop_(
            batch.params,
            grads,
            batch.state("square_avg"),
            batch.state("grad_avg") if group["centered"] else (),
            batch.state("momentum_buffer") if group["momentum"] > 0 else (),
            batch.state("step"),
            batch.copies,
            **{name: float(group[name]) for name in ("lr", "alpha", "eps", "weight_decay", "momentum")},
            **self._variant(group),
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )


class FusedRMSpropTF(FusedRMSprop):
    """RMSprop with eps below the root and the learning rate in the momentum, as TensorFlow has it.

    Args:
        params: as `FusedRMSprop`, as are all arguments that are not named here.
        alpha: decay of the running means.
        eps: added below the root.
        decoupled_decay: take ``weight_decay p``, not times ``lr``, off the weight, and add nothing to the gradient.
        lr_in_momentum: False: p <- p - lr b, as torch does.
        initial_square_avg: where v starts: 1.0 in TensorFlow 1 and timm, 0.0 in Keras and in Ascend's apex.

    Raises:
        ValueError: a number out of its range.

    Sync: none, for an ``lr`` that is a number.

    Reference: timm's ``RMSpropTF``; Ascend apex ``NpuFusedRMSpropTF``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        set_grad_none: bool = True,
        *,
        initial_square_avg: float = 0.0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, set_grad_none, maximize=maximize)
        own = {"decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum, "master_weights": master_weights}
        self._add_defaults({**own, "initial_square_avg": initial_square_avg}, max_grad_norm)

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        begins = "square_avg" not in state
        super()._begin_state(param, group, state)
        if begins:
            state["square_avg"].fill_(group["initial_square_avg"])
        return False

    def _variant(self, group: dict[str, Any]) -> dict[str, bool]:
        decoupled, lr_in_momentum = group["decoupled_decay"], group["lr_in_momentum"]
        return {"eps_in_root": True, "decoupled": decoupled, "lr_in_momentum": lr_in_momentum}
