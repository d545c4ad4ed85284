"""What the steps of the other fused optimizers reach, against the same rule in torch.

    Adagrad, Adadelta, RMSprop    torch.optim's, as it is by default
    LAMB, NovoGrad                torch has none: the rule in torch's operators, tensor by tensor, as scripts write it

Both sides step the same parameters with the same state by turns. AdamW is in ``optimizer_rows.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import random_tensors, resnet50_shapes
from amplab.optimizers import FusedAdadelta, FusedAdagrad, FusedLAMB, FusedNovoGrad, FusedRMSprop

__all__ = ["rule_cases"]

_RATE = 1e-3
_DECAY = 1e-2
_BETAS = (0.9, 0.999)
_EPS = 1e-6

Shapes = Sequence[tuple[int, ...]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Rule:
    """One rule on both sides: how each optimizer is made, and what the table calls theirs."""

    name: str
    against: str
    ours: Make
    theirs: Make


def rule_cases(shapes: Shapes | None = None) -> list[Case]:
    """Return one case for each rule.

    Args:
        shapes: of the parameters; ResNet50's where None.
    """
    return [
        Case(
            f"{rule.name} step, ResNet50",
            rule.against,
            Goal("at least", 1.0),
            lambda rule=rule: _steps(rule, list(resnet50_shapes()) if shapes is None else shapes),
        )
        for rule in _RULES
    ]


def _steps(rule: _Rule, shapes: Shapes) -> Pair:
    params = [nn.Parameter(each) for each in random_tensors(shapes)]
    for param, grad in zip(params, random_tensors(shapes), strict=True):
        param.grad = grad * 1e-2
    ours, theirs = rule.ours(params), rule.theirs(params)
    ours.step()
    theirs.state.update(ours.state)
    sizes = {"tensors": len(params), "elements": sum(param.numel() for param in params)}
    return Pair(Contestant(ours.step), Contestant(theirs.step), sizes)


class _OneByOne(torch.optim.Optimizer):
    """A rule in torch's operators, one tensor after the other. A subclass says what happens to one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] += 1
            count = state["step"].item()
            self.step_one(param, param.grad, state, [1.0 - beta**count for beta in _BETAS])

    def step_one(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], corrections: list[float]) -> None:
        raise NotImplementedError


class _Lamb(_OneByOne):
    """LAMB, as `amplab.kernels.lamb_` has it."""

    def step_one(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], corrections: list[float]) -> None:
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(grad, 1.0 - _BETAS[0])
        second.mul_(_BETAS[1]).addcmul_(grad, grad, value=1.0 - _BETAS[1])
        update = (first / corrections[0]).div_((second / corrections[1]).sqrt_().add_(_EPS))
        update.add_(param, alpha=_DECAY)
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        param.sub_(update.mul_(ratio), alpha=_RATE)


class _NovoGrad(_OneByOne):
    """NovoGrad, as `amplab.kernels.novograd_` has it."""

    def step_one(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], corrections: list[float]) -> None:
        first, norm = state["exp_avg"], state["grad_norm"]
        norm.copy_((_BETAS[1] * norm.square() + (1.0 - _BETAS[1]) * grad.norm().square()).sqrt())
        divisor = (norm / corrections[1] ** 0.5).add_(_EPS)
        first.lerp_(grad, 1.0 - _BETAS[0])
        param.sub_((first / divisor).div_(corrections[0]).add_(param, alpha=_DECAY), alpha=_RATE)


_RULES = (
    _Rule(
        "Adagrad",
        "torch.optim.Adagrad",
        lambda params: FusedAdagrad(params, lr=_RATE, weight_decay=_DECAY),
        lambda params: torch.optim.Adagrad(params, lr=_RATE, weight_decay=_DECAY),
    ),
    _Rule(
        "Adadelta",
        "torch.optim.Adadelta",
        lambda params: FusedAdadelta(params, lr=_RATE, weight_decay=_DECAY),
        lambda params: torch.optim.Adadelta(params, lr=_RATE, weight_decay=_DECAY),
    ),
    _Rule(
        "RMSprop",
        "torch.optim.RMSprop",
        lambda params: FusedRMSprop(params, lr=_RATE, weight_decay=_DECAY),
        lambda params: torch.optim.RMSprop(params, lr=_RATE, weight_decay=_DECAY),
    ),
    _Rule(
        "LAMB",
        "its rule in torch's operators",
        lambda params: FusedLAMB(params, lr=_RATE, weight_decay=_DECAY, max_grad_norm=0.0, betas=_BETAS, eps=_EPS),
        _Lamb,
    ),
    _Rule(
        "NovoGrad",
        "its rule in torch's operators",
        lambda params: FusedNovoGrad(params, lr=_RATE, weight_decay=_DECAY, betas=_BETAS, eps=_EPS),
        _NovoGrad,
    ),
)
