"""FusedAdamP: Adam without the part of its update that only changes the length of a weight."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amplab.kernels.step_reference import StepLists, step_reference
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state

__all__ = ["FusedAdamP"]


@dataclass(frozen=True)
class _Rule:
    """The settings of one group; see `FusedAdamP`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    delta: float
    wd_ratio: float
    nesterov: bool


class FusedAdamP(FusedOptimizer):
    """AdamP: Adam for weights whose length has no effect, as before a normalization.

    ::

        u  = Adam's step of g
        where max |cos(g, p)| < delta / sqrt(elements of a row), over the rows of p or else over p as one row:
            u <- u - (u . p / |p|) p / |p|        row by row, and weight_decay <- wd_ratio weight_decay
        p <- (1 - lr weight_decay) p - lr u

    Args:
        params: parameters or groups of them; those of one dimension are never projected.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to denominators and norms.
        weight_decay: weight decay factor.
        delta: bound of the cosine between gradient and weight.
        wd_ratio: factor of the decay of projected weights.
        nesterov: use Nesterov momentum.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.

    Raises:
        ValueError: a number out of its range.

    Sync: none.

    Reference: B. Heo et al., "AdamP: slowing down the slowdown for momentum optimizers on scale-invariant weights",
    2021, and its code.
    """

    _reads_whole_tensors = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "delta": delta, "wd_ratio": wd_ratio}
        defaults = {**numbers, "betas": betas, "nesterov": nesterov, "set_grad_none": set_grad_none}
        super().__init__(params, defaults)

    def _begin_state(self, param: Tensor, _group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = new_state(param), new_state(param)
        return False

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        group = batch.group
        numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay", "delta", "wd_ratio")}
        rule = _Rule(**numbers, beta1=group["betas"][0], beta2=group["betas"][1], nesterov=group["nesterov"])
        states = [batch.state("exp_avg"), batch.state("exp_avg_sq")]
        lists = StepLists(batch.params, grads, states, batch.state("step"), batch.copies, factor, found_inf)
        step_reference(lists, functools.partial(_adamp_rule, rule))


def _adamp_rule(
    rule: _Rule, grad: Tensor, param: Tensor, states: Sequence[Tensor], step: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    if step is None:
        raise RuntimeError("steps is empty: expected one float32 element for each parameter.")
    exp_avg = states[0] * rule.beta1 + grad * (1.0 - rule.beta1)
    exp_avg_sq = states[1] * rule.beta2 + grad * (1.0 - rule.beta2) * grad
    root = exp_avg_sq.sqrt() / (1.0 - rule.beta2**step).sqrt().to(param.dtype)
    moment = exp_avg * rule.beta1 + grad * (1.0 - rule.beta1) if rule.nesterov else exp_avg
    update, share = moment / (root + rule.eps), torch.ones((), dtype=param.dtype, device=param.device)
    if param.dim() > 1 and param.numel() > 0:
        update, share = _projected(param, grad, update, rule)
    step_size = (rule.lr / (1.0 - rule.beta1**step)).to(param.dtype)
    return param * (1.0 - rule.lr * rule.weight_decay * share) - update * step_size, [exp_avg, exp_avg_sq]


def _projected(param: Tensor, grad: Tensor, update: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Return the update without its part along the weight, by row or as a whole, and the factor of the decay."""
    p, g, u = (each.flatten(1) for each in (param, grad, update))  # (rows, elements of a row)
    sums = torch.stack([(p * p).sum(1), (g * g).sum(1), (g * p).sum(1), (p * u).sum(1)])  # (4, rows)
    by_row, rows_fit = _part_along(sums, p.shape[1], rule)
    as_one, whole_fits = _part_along(sums.sum(1, keepdim=True), p.numel(), rule)
    part = torch.where(rows_fit, by_row, torch.where(whole_fits, as_one, 0.0))
    share = torch.where(rows_fit | whole_fits, rule.wd_ratio, 1.0).to(param.dtype)
    return torch.addcmul(u, p, part.unsqueeze(1), value=-1).reshape_as(param), share


def _part_along(sums: Tensor, elements: int, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Return the part of each weight in its update, and whether every gradient is almost orthogonal to its weight.

    Args:
        sums: ``(4, rows)``, p . p, g . g, g . p and p . u of each row.
        elements: the elements of a row.
        rule: the settings.
    """
    weights, grads, across, along = sums
    length = weights.sqrt() + rule.eps
    cosine = across.abs() / (grads.sqrt() + rule.eps) / length
    return along / (length * length), cosine.max() < rule.delta / math.sqrt(elements)
