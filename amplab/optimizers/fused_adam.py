"""Adam and AdamW in one pass: `FusedAdam` with apex's arguments, `FusedAdamW` with torch's.

::

    g <- g / grad_scale * min(1, max_grad_norm / (norm + 1e-6))
    m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
    p <- p (1 - lr weight_decay) - lr m / c1 / (sqrt(v / c2) + eps),   c = 1 - beta^step
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import adam_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedAdam", "FusedAdamW"]


class _FusedAdam(FusedOptimizer, torch.optim.Adam):
    """The rule of both classes."""

    def _begin_state(self, param: Tensor, _group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = new_state(param), new_state(param)
        return False

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        beta1, beta2 = group["betas"]
        adam_(
            batch.params,
            grads,
            batch.state("exp_avg"),
            batch.state("exp_avg_sq"),
            batch.state("step"),
            batch.copies,
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=group["eps"],
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )


class FusedAdamW(_FusedAdam, torch.optim.AdamW):
    """``torch.optim.AdamW`` whose one pass over the tensors also unscales, clips and skips.

    Its ``state_dict`` is that of ``torch.optim.AdamW``: each loads the other's. After a step under a scaler
    gradients are unscaled; see `FusedOptimizer`.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: weight decay factor.
        amsgrad: must be False.
        maximize: ascend instead of descend.
        foreach: must not be True.
        capturable: ignored; the step count is always on the parameter's device.
        differentiable: must be False.
        fused: must not be False.
        max_grad_norm: clip the norm of all gradients to this; None for no clipping.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master.

    Raises:
        RuntimeError: an unsupported argument; the message names the alternative.
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: ``torch.optim.AdamW``.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> FusedAdamW([weight], lr=0.5, weight_decay=0.0).step()
    >>> weight.item()
    0.5
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        if fused is False:
            raise RuntimeError("FusedAdamW got fused=False: expected True or None; use torch.optim.AdamW for that.")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=True,
        )
        own = {"bias_correction": True, "eps_inside_sqrt": False, "master_weights": master_weights}
        self._add_defaults(own, max_grad_norm)


class FusedAdam(_FusedAdam):
    """Adam or AdamW in one pass, with apex's arguments, including those from before ``amp.initialize``.

    Its ``state_dict`` is that of ``torch.optim.Adam`` and ``AdamW``: each loads the other's. ``group["step"]`` is
    the number of steps, as in apex, but bias correction uses the count in each parameter's state, which is lower if the
    parameter had no gradient in some steps. After a step under a scaler gradients are unscaled; see `FusedOptimizer`.

    Args:
        params: as `FusedAdamW`.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta^step``.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        adam_w_mode: decay the weights directly; False: through the gradient.
        weight_decay: weight decay factor.
        amsgrad: must be False, as in apex.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.
        capturable: ignored; the step count is always on the parameter's device.
        master_weights: keep a float32 master of every 16-bit parameter in the state, and step the master; the
            parameter is written in the same pass.
        max_grad_norm: clip the norm of all gradients to this; 0 for no clipping.
        eps_inside_sqrt: add ``eps`` under the root, ``sqrt((v + eps) / c2)``.
        use_mt: ignored; there is always one pass.

    Raises:
        RuntimeError: ``amsgrad=True``.
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: apex ``FusedAdam`` (the last three: ``apex.contrib``).
    """

    _counts_in_groups = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
    ) -> None:
        del use_mt
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant; use torch.optim.Adam(amsgrad=True).")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            capturable=capturable,
            fused=True,
            decoupled_weight_decay=bool(adam_w_mode),
        )
        own = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "master_weights": master_weights}
        self._add_defaults({**own, "set_grad_none": set_grad_none}, max_grad_norm)

    def step(self, closure: Callable[[], Any] | None = None, **old: Any) -> Any:
        """Step once, as `FusedAdamW`.

        Raises:
            RuntimeError: an argument of apex's versions before ``amp.initialize``.
        """
        if any(value is not None for value in old.values()):
            raise RuntimeError(
                f"FusedAdam.step got {', '.join(old)}: expected a closure or nothing; gradients are unscaled by "
                "amp.scale_loss."
            )
        return super().step(closure)
