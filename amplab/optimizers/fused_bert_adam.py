"""FusedBertAdam: the Adam of BERT's training, with a learning-rate schedule."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amplab.kernels import lamb_
from amplab.kernels.step_reference import StepLists, square_root, step_reference
from amplab.optimizers.fused_optimizer import FusedOptimizer, StepBatch, new_state
from amplab.optimizers.group_settings import REQUIRED

__all__ = ["FusedBertAdam"]

# The factor of the learning rate after the warm-up; x is the completed share of all steps, w that of the warm-up.
_SCHEDULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "warmup_cosine": lambda x, _: 0.5 * (1.0 + torch.cos(math.pi * x)),
    "warmup_constant": lambda x, _: torch.ones_like(x),
    "warmup_linear": lambda x, w: ((x - 1.0) / (w - 1.0)).clamp(min=0.0),
    "warmup_poly": lambda x, _: (1.0 - x).clamp(min=0.0) ** 0.5,
}
_NEVER = -1


@dataclass(frozen=True)
class _Rule:
    """The settings of one group; see `FusedBertAdam`."""

    lr: float
    b1: float
    b2: float
    e: float
    weight_decay: float
    warmup: float
    t_total: int
    schedule: str


class FusedBertAdam(FusedOptimizer):
    """Adam without bias correction, with decoupled decay, a warm-up and a schedule.

    ::

        m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
        p <- p - lr s(x) (m / (sqrt(v) + e) + weight_decay p)
        x = steps so far / t_total;   s(x) = x / warmup during the warm-up, then the schedule

    Args:
        params: parameters or groups of them.
        lr: maximum learning rate; may be omitted if every group has one.
        warmup: fraction of ``t_total`` in which the rate rises from 0; -1 for none.
        t_total: number of steps; -1 for a constant rate.
        schedule: "warmup_linear" (to 0 at ``t_total``), "warmup_cosine", "warmup_constant" or "warmup_poly" (a root).
        b1, b2: decay rates of the two moments.
        e: added to the denominator.
        weight_decay: weight decay factor.
        max_grad_norm: clip the 2-norm of all gradients to this; -1 for no clipping.
        set_grad_none: `zero_grad` sets gradients to None; False: to zeros.

    Raises:
        ValueError: an unknown schedule, or a number out of its range.

    Sync: none.

    Reference: J. Devlin et al., "BERT: pre-training of deep bidirectional transformers for language understanding",
    2019, and the ``BertAdam`` of its PyTorch versions; Ascend apex ``NpuFusedBertAdam``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = REQUIRED,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
        set_grad_none: bool = True,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: {type(self).__name__} expected one of {', '.join(_SCHEDULES)}.")
        defaults = {"lr": lr, "warmup": warmup, "t_total": t_total, "schedule": schedule, "b1": b1, "b2": b2, "e": e}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self._add_defaults({"set_grad_none": set_grad_none}, None if max_grad_norm <= 0 else max_grad_norm)

    _leading_state = "next_m"

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step for each parameter with a gradient; [0] before the first step.

        Sync: one for each parameter.
        """
        rates = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        return [0]
                    rates.append(float(_rate(_rule_of(group), self.state[param]["step"].double())))
        return rates

    def _begin_state(self, param: Tensor, _group: dict[str, Any], state: dict[str, Any]) -> bool:
        if "next_m" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["next_m"], state["next_v"] = new_state(param), new_state(param)
        return False

    def _run(self, batch: StepBatch, grads: list[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        rule = _rule_of(batch.group)
        next_m, next_v, steps = batch.state("next_m"), batch.state("next_v"), batch.state("step")
        rate = _shared_rate(rule, steps)
        if rate is None:
            lists = StepLists(batch.params, grads, [next_m, next_v], steps, batch.copies, factor, found_inf)
            step_reference(lists, functools.partial(_bert_adam_rule, rule))
            return
        lamb_(
            batch.params,
            grads,
            next_m,
            next_v,
            steps,
            batch.copies,
            lr=rate,
            betas=(rule.b1, rule.b2),
            eps=rule.e,
            weight_decay=rule.weight_decay,
            bias_correction=False,
            adapt=False,
            grad_factor=factor,
            found_inf=found_inf,
        )


def _rule_of(group: dict[str, Any]) -> _Rule:
    numbers = {name: float(group[name]) for name in ("lr", "b1", "b2", "e", "weight_decay", "warmup")}
    return _Rule(**numbers, t_total=group["t_total"], schedule=group["schedule"])


def _rate(rule: _Rule, done: Tensor) -> Tensor:
    """Return the learning rate after ``done`` steps, ``()`` float64."""
    if rule.t_total == _NEVER:
        return torch.full_like(done, rule.lr)
    progress = done / rule.t_total
    after = _SCHEDULES[rule.schedule](progress, rule.warmup)
    return rule.lr * (torch.where(progress < rule.warmup, progress / rule.warmup, after) if rule.warmup > 0 else after)


def _shared_rate(rule: _Rule, steps: list[Tensor]) -> float | None:
    """Return the learning rate of all; None if it differs, or if the step counts are on a device."""
    if rule.t_total == _NEVER:
        return rule.lr
    if steps[0].device.type != "cpu":
        return None
    done = {step.item() for step in steps}
    return _rate(rule, torch.tensor(done.pop(), dtype=torch.float64)).item() if len(done) == 1 else None


def _bert_adam_rule(
    rule: _Rule, grad: Tensor, param: Tensor, states: Sequence[Tensor], step: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    if step is None:
        raise RuntimeError("steps is empty: expected one float32 element for each parameter.")
    next_m = states[0] * rule.b1 + grad * (1.0 - rule.b1)
    next_v = states[1] * rule.b2 + grad * (1.0 - rule.b2) * grad
    update = next_m / (square_root(next_v) + rule.e) + param * rule.weight_decay
    return param - update * _rate(rule, step - 1.0).to(param.dtype), [next_m, next_v]
