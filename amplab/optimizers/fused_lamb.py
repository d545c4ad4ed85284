"""LAMB in one pass, with apex's arguments.

::

    g <- g / grad_scale * min(1, max_grad_norm / (norm + 1e-6))
    m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
    u  = m / c1 / (sqrt(v / c2) + eps) + weight_decay p,   c = 1 - beta^step
    p <- p - lr (|p| / |u|) u
"""

from typing import Any

import torch
from torch import Tensor

from amplab.kernels import lamb_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state
from amplab.optimizers.group_settings import check_settings

__all__ = ["FusedLAMB", "FusedMixedPrecisionLamb"]


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's step with a rate for each tensor, from the norms of its weight and its update.

    The ratio |p| / |u| is 1 if either norm is 0, and for groups without decay unless ``use_nvlamb``. ``group["step"]``
    is the number of steps, as in apex, but bias correction uses the count in each parameter's state, which is lower if
    the parameter had no gradient in some steps. After a step under a scaler gradients are unscaled; see
    `FusedOptimizer`.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta^step``.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: weight decay factor.
        amsgrad: must be False, as in apex.
        adam_w_mode: add the decay to the update; False: to the gradient.
        grad_averaging: True: the first moment adds (1 - beta1) g; False: it adds g.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        max_grad_norm: clip the norm of all gradients to this; 0 for no clipping.
        use_nvlamb: also adapt groups without decay.
        max_weight_norm: upper bound of a weight's norm.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        RuntimeError: ``amsgrad=True``.
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: apex ``FusedLAMB``; Y. You et al., "Large batch optimization for deep learning: training BERT in 76
    minutes", 2019, which is ``max_grad_norm=0, use_nvlamb=True``.
    """

    _counts_in_groups = True
    _reads_whole_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        max_weight_norm: float = float("inf"),
        master_weights: bool = False,
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise RuntimeError(f"{name} does not support the AMSGrad variant; use FusedLAMB without, or FusedAdam.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        own = {"bias_correction": bias_correction, "grad_averaging": grad_averaging, "set_grad_none": set_grad_none}
        norms = {"max_weight_norm": max_weight_norm, "master_weights": master_weights}
        modes = {"adam_w_mode": bool(adam_w_mode), "use_nvlamb": bool(use_nvlamb)}
        self._add_defaults({**own, **norms, **modes}, max_grad_norm)

    def _begin_state(self, param: Tensor, _group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = new_state(param), new_state(param)
        return False

    def _adapts(self, group: dict[str, Any]) -> bool:
        """Return whether each tensor has its own rate."""
        return bool(group["use_nvlamb"]) or group["weight_decay"] != 0

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        lamb_(
            batch.params,
            grads,
            batch.state("exp_avg"),
            batch.state("exp_avg_sq"),
            batch.state("step"),
            batch.copies,
            lr=float(group["lr"]),
            betas=group["betas"],
            beta3=None if group["grad_averaging"] else 1.0,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["adam_w_mode"],
            bias_correction=bool(group["bias_correction"]),
            adapt=self._adapts(group),
            max_weight_norm=float(group["max_weight_norm"]),
            grad_factor=factor,
            found_inf=found_inf,
        )


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` with a float32 master of every 16-bit parameter in its state.

    Args:
        params: as `FusedLAMB`, and so are all arguments not listed here.
        step: the number of earlier steps, for the bias correction.
        reduced_precision_dtype: ignored; every 16-bit parameter has a master.

    Reference: apex ``FusedMixedPrecisionLamb``, whose groups keep ``lr`` and ``step`` as tensors.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        check_settings(type(self).__name__, {"reduced_precision_dtype": reduced_precision_dtype})
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
            master_weights=True,
        )
        self._add_defaults({"first_step": step, "step": step}, max_grad_norm)

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        begins = "exp_avg" not in state
        super()._begin_state(param, group, state)
        if begins:
            state["step"].fill_(group["first_step"])
        return False
