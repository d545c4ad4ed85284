"""NovoGrad in one pass, with apex's arguments.

::

    n <- sqrt(beta2 n^2 + (1 - beta2) |g|^2);   m <- beta1 m + (1 - beta1) g
    p <- p - lr (m / c1 / (n / sqrt(c2) + eps) + weight_decay p),   c = 1 - beta^step
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import novograd_
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedNovoGrad"]

_MAXIMUM_NORM, _TWO_NORM = 0, 2
_FIRST = -1.0  # stored as the norm before the first step, which replaces it by the norm of its gradient


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: gradients divided by a running mean of the norm of their tensor.

    ``group["step"]`` is the number of steps, as in apex, but bias correction uses the count in each parameter's state,
    which is lower if the parameter had no gradient in some steps. After a step under a scaler gradients are unscaled;
    see `FusedOptimizer`.

    Args:
        params: parameters or groups of them: float16, bfloat16, float32 or float64. The state of 16-bit ones,
            and the arithmetic, are float32.
        lr: learning rate.
        bias_correction: False: c1 and c2 are 1.
        betas: decay rates of the moment and of the norm.
        eps: added to the norm.
        weight_decay: weight decay factor.
        amsgrad: must be False, as in apex.
        reg_inside_moment: average g / (n / sqrt(c2) + eps) + weight_decay p in the moment.
        grad_averaging: True: the moment adds (1 - beta1) g; False: it adds g.
        norm_type: 2, or 0 for the maximum norm, whose mean is not of squares.
        init_zero: start n at 0 instead of the norm of the first gradient.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.

    Raises:
        RuntimeError: ``amsgrad=True``; another ``norm_type``.
        ValueError: a number out of its range.

    Sync: none if ``lr`` is a number.

    Reference: apex ``FusedNovoGrad``, which keeps the norms in its groups; its checkpoints are converted;
    B. Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments", 2019, which is
    ``bias_correction=False, reg_inside_moment=True, grad_averaging=False``.
    """

    _counts_in_groups = True
    _reads_whole_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant; leave it out, or use FusedAdam.")
        if norm_type not in (_MAXIMUM_NORM, _TWO_NORM):
            raise RuntimeError(f"norm_type={norm_type}: FusedNovoGrad expected 2, or 0 for the maximum norm.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        own = {"bias_correction": bias_correction, "grad_averaging": grad_averaging, "set_grad_none": set_grad_none}
        norms = {"norm_type": norm_type, "init_zero": init_zero, "reg_inside_moment": bool(reg_inside_moment)}
        self._add_defaults({**own, **norms}, None)

    def _begin_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = new_state(param)
            state["grad_norm"] = torch.full_like(state["step"], 0.0 if group["init_zero"] else _FIRST)
        return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, also of apex's optimizer, which has the norms of a group in two tensors, for half and float32.

        Raises:
            RuntimeError: the number of norms is not that of the parameters with a state.
        """
        for group in state["param_groups"]:
            if "exp_avg_sq" in group:
                _give_norms(group.pop("exp_avg_sq"), group["params"], state["state"])
        super().__setstate__(state)

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        novograd_(
            batch.params,
            grads,
            batch.state("exp_avg"),
            batch.state("grad_norm"),
            batch.state("step"),
            batch.copies,
            lr=float(group["lr"]),
            betas=group["betas"],
            beta3=None if group["grad_averaging"] else 1.0,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decay_in_moment=group["reg_inside_moment"],
            maximum_norm=group["norm_type"] == _MAXIMUM_NORM,
            bias_correction=bool(group["bias_correction"]),
            grad_factor=factor,
            found_inf=found_inf,
        )


def _give_norms(norms: Sequence[Tensor], params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Move the norms of a group of apex's FusedNovoGrad to the states of its parameters. Sync: none."""
    stepped = [param for param in params if param in states]
    by_dtype = [[param for param in stepped if (param.dtype == torch.float16) is half] for half in (True, False)]
    if [len(each) for each in norms] != [len(each) for each in by_dtype]:
        raise RuntimeError(
            f"A group of apex's FusedNovoGrad has {[len(each) for each in norms]} norms in exp_avg_sq, for float16 and "
            f"float32: expected {[len(each) for each in by_dtype]}, one for each parameter with a state; load it into "
            "parameters of the same dtypes, or start without it, from the norms of the next gradients."
        )
    for each, mine in zip(norms, by_dtype, strict=True):
        for norm, param in zip(each.unbind(), mine, strict=True):
            states[param]["grad_norm"] = norm.detach().clone().float().to(param.device)
