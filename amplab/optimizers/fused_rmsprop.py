"""RMSprop in one pass, in the forms of torch and of TensorFlow.

::

    v <- alpha v + (1 - alpha) g^2,   g <- g + weight_decay p before all
    b <- momentum b + g / (sqrt(v) + eps);      p <- p - lr b       FusedRMSprop
    b <- momentum b + lr g / sqrt(v + eps);     p <- p - b          FusedRMSpropTF

with the gradient's variance instead of v if ``centered``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amplab.kernels import rmsprop_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedRMSprop", "FusedRMSpropTF"]


class _Variant(NamedTuple):
    """The differences between the two forms; see `amplab.kernels.rmsprop_`."""

    decoupled: bool = False
    eps_in_root: bool = False
    lr_in_momentum: bool = False


class FusedRMSprop(FusedOptimizer, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` whose one pass over the tensors also unscales and skips.

    Its ``state_dict`` is that of ``torch.optim.RMSprop``: each loads the other's.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        alpha: decay of the running means.
        eps: added to the root.
        weight_decay: weight decay factor; added to the gradient.
        momentum: decay of the buffer; 0 for none.
        centered: divide by the standard deviation of the gradient.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        maximize: ascend instead of descend.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: ``torch.optim.RMSprop``. If rounding makes the variance negative, it is 0 here and NaN there.
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

    def _variant(self, _group: dict[str, Any]) -> _Variant:
        """Return the differences to torch's form."""
        return _Variant()

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        variant = self._variant(group)
        rmsprop_(
            batch.params,
            grads,
            batch.state("square_avg"),
            batch.state("grad_avg") if group["centered"] else (),
            batch.state("momentum_buffer") if group["momentum"] > 0 else (),
            batch.state("step"),
            batch.copies,
            lr=float(group["lr"]),
            alpha=float(group["alpha"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            decoupled=variant.decoupled,
            eps_in_root=variant.eps_in_root,
            lr_in_momentum=variant.lr_in_momentum,
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )


class FusedRMSpropTF(FusedRMSprop):
    """RMSprop in TensorFlow's form: eps under the root, and the learning rate in the momentum.

    Args:
        params: as `FusedRMSprop`, and so are all arguments not listed here.
        alpha: decay of the running means.
        eps: added under the root.
        decoupled_decay: subtract ``weight_decay p``, without ``lr``, from the weight; do not add it to the gradient.
        lr_in_momentum: False: p <- p - lr b, as torch does.
        initial_square_avg: initial value of v: 1.0 in TensorFlow 1 and timm, 0.0 in Keras and in Ascend's apex.

    Raises:
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

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

    def _variant(self, group: dict[str, Any]) -> _Variant:
        return _Variant(group["decoupled_decay"], True, group["lr_in_momentum"])
