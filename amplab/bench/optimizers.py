"""The fused optimizers in suite "kernels": the step, the whole end of an iteration, and the step of float32 masters.

=====================  ==============================================================  ================================
case                   ours                                                            theirs, all torch's
=====================  ==============================================================  ================================
step                   ``FusedAdamW.step``                                             ``AdamW(fused=True).step``
tail                   check + norm; unscale × clip × step in one pass; ``update``     ``unscale_``, clip, step, update
masters                float16 gradients → float32 masters → float16 weights, a pass   copy, unscale, fused step, copy
=====================  ==============================================================  ================================

    Adagrad, Adadelta, RMSprop    against torch.optim's with default arguments
    LAMB, NovoGrad                against the rule in torch's operators, tensor by tensor: torch has no such optimizer

Both sides work alternately on the same tensors: the speed of a page of memory depends on its address, by more than the
differences to be measured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from amplab.amp import GradScaler
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import grads_of, random_tensors, resnet50_shapes, small_transformer
from amplab.kernels import adam_
from amplab.optimizers import FusedAdadelta, FusedAdagrad, FusedAdamW, FusedLAMB, FusedNovoGrad, FusedRMSprop

__all__ = ["optimizer_cases", "rule_cases"]

_SCALE = 2.0**10
_RATE = 1e-3
_MAX_NORM = 1.0
_FUSED = "torch.optim.AdamW(fused=True)"

Shapes = Sequence[tuple[int, ...]]


def optimizer_cases(large: Shapes | None = None, small: Shapes | None = None) -> list[Case]:
    """Return the cases of AdamW.

    Args:
        large: shapes of the parameters of a large model; None for ResNet50.
        small: shapes of the parameters of a small model; None for a transformer of 1.1 M parameters.
    """
    resnet = ("ResNet50", lambda: list(resnet50_shapes()) if large is None else large)
    transformer = ("small transformer", lambda: _transformer_shapes() if small is None else small)
    tails = [
        Case(
            f"AdamW under a GradScaler, clipped, {name}",
            "GradScaler + clip_grad_norm_ + fused AdamW",
            Goal("at least", goal),
            partial(_tails, shapes),
        )
        for (name, shapes), goal in ((resnet, 1.5), (transformer, 2.0))
    ]
    steps = [
        Case(f"AdamW step, {name}", _FUSED, Goal("at least", 1.0), partial(_steps, shapes))
        for name, shapes in (resnet, transformer)
    ]
    masters = Case(
        "AdamW on masters, float16 → float32 → float16, ResNet50",
        "copy + unscale + fused AdamW + copy",
        Goal("at least", 1.8),
        partial(_masters, resnet[1]),
    )
    return [*tails, masters, *steps]


def _transformer_shapes() -> Shapes:
    return [tuple(param.shape) for param in small_transformer().model.parameters()]


class _Training:
    """Parameters with scaled gradients, as after a backward."""

    def __init__(self, shapes: Shapes, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.params = [nn.Parameter(each) for each in random_tensors(shapes)]
        self.optimizer = make(self.params)
        self._values = [each * (_SCALE * 1e-2) for each in random_tensors(shapes)]
        for param in self.params:
            param.grad = torch.empty_like(param)
        self.refill()

    def refill(self) -> None:
        """Write the gradients as they were before they were unscaled and clipped."""
        torch._foreach_copy_(grads_of(self.params), self._values)


def _ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdamW(params, lr=_RATE)


def _clipping(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdamW(params, lr=_RATE, max_grad_norm=_MAX_NORM)


def _theirs(ours: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's optimizer of the same parameters, with the same tensors for its state."""
    ours.step()
    theirs = torch.optim.AdamW(ours.param_groups[0]["params"], lr=_RATE, fused=True)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": sum(torch.Size(shape).numel() for shape in shapes)}


def _steps(make: Callable[[], Shapes]) -> Pair:
    shapes = make()
    training = _Training(shapes, _ours)
    theirs = _theirs(training.optimizer)
    return Pair(Contestant(training.optimizer.step), Contestant(theirs.step), _sizes(shapes))


def _tails(make: Callable[[], Shapes]) -> Pair:
    shapes = make()
    training = _Training(shapes, _clipping)
    ours, theirs = training.optimizer, _theirs(training.optimizer)
    our_scaler, their_scaler = (
        kind("cpu", init_scale=_SCALE, growth_interval=2**30) for kind in (GradScaler, torch.amp.GradScaler)
    )
    for scaler in (our_scaler, their_scaler):
        scaler.scale(torch.zeros(()))

    def our_tail() -> None:
        our_scaler.step(ours)
        our_scaler.update()

    def their_tail() -> None:
        their_scaler.unscale_(theirs)
        clip_grad_norm_(training.params, _MAX_NORM)
        their_scaler.step(theirs)
        their_scaler.update()

    return Pair(Contestant(our_tail, training.refill), Contestant(their_tail, training.refill), _sizes(shapes))


class _Masters:
    """float32 masters with their moments, and the float16 weights and gradients of the model."""

    def __init__(self, shapes: Shapes) -> None:
        self.masters = random_tensors(shapes)
        self.weights = [each.half() for each in self.masters]
        self.grads = [(each * 1e-2).half() for each in random_tensors(shapes)]
        self.exp_avgs = [torch.zeros_like(each) for each in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(each) for each in self.masters]
        self.steps = [torch.zeros(()) for _ in shapes]


def _masters(make: Callable[[], Shapes]) -> Pair:
    shapes = make()
    tensors = _Masters(shapes)
    inverse, found_inf = torch.tensor(1.0 - 2.0**-12), torch.zeros(())
    widened: list[Tensor] = [torch.zeros(shape) for shape in shapes]

    def in_one_pass() -> None:
        adam_(
            tensors.masters,
            tensors.grads,
            tensors.exp_avgs,
            tensors.exp_avg_sqs,
            tensors.steps,
            tensors.weights,
            lr=_RATE,
            weight_decay=1e-2,
            grad_factor=inverse,
            found_inf=found_inf,
        )

    def in_four() -> None:
        torch._foreach_copy_(widened, tensors.grads)
        torch._amp_foreach_non_finite_check_and_unscale_(widened, found_inf, inverse)
        torch._foreach_add_(tensors.steps, 1)
        torch._fused_adamw_(
            tensors.masters,
            widened,
            tensors.exp_avgs,
            tensors.exp_avg_sqs,
            [],
            tensors.steps,
            lr=_RATE,
            beta1=0.9,
            beta2=0.999,
            weight_decay=1e-2,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        torch._foreach_copy_(tensors.weights, tensors.masters)

    return Pair(Contestant(in_one_pass), Contestant(in_four), _sizes(shapes))


_DECAY = 1e-2
_BETAS = (0.9, 0.999)
_EPS = 1e-6

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Rule:
    """One rule: how the optimizer of each side is made, and the name of theirs in the table."""

    name: str
    against: str
    ours: Make
    theirs: Make


def rule_cases(shapes: Shapes | None = None) -> list[Case]:
    """Return one case for each rule.

    Args:
        shapes: shapes of the parameters; None for ResNet50.
    """
    return [
        Case(
            f"{rule.name} step, ResNet50",
            rule.against,
            Goal("at least", 1.0),
            partial(_rule_steps, rule, shapes),
        )
        for rule in _RULES
    ]


def _rule_steps(rule: _Rule, given: Shapes | None) -> Pair:
    shapes = list(resnet50_shapes()) if given is None else given
    params = [nn.Parameter(each) for each in random_tensors(shapes)]
    for param, grad in zip(params, random_tensors(shapes), strict=True):
        param.grad = grad * 1e-2
    ours, theirs = rule.ours(params), rule.theirs(params)
    ours.step()
    theirs.state.update(ours.state)
    sizes = {"tensors": len(params), "elements": sum(param.numel() for param in params)}
    return Pair(Contestant(ours.step), Contestant(theirs.step), sizes)


class _OneByOne(torch.optim.Optimizer):
    """A rule in torch's operators, one tensor after the other; a subclass steps one tensor."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        """Step every parameter."""
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] += 1
            count = state["step"].item()
            self.step_one(param, param.grad, state, [1.0 - beta**count for beta in _BETAS])

    def step_one(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], corrections: list[float]) -> None:
        raise NotImplementedError


class _Lamb(_OneByOne):
    """LAMB, the rule of `amplab.kernels.lamb_`."""

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
    """NovoGrad, the rule of `amplab.kernels.novograd_`."""

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
