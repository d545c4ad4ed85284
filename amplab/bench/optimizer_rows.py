"""What the fused optimizers reach: the step alone, the whole mixed-precision tail, and the step of float32 masters.

=====================  ==============================================================  ================================
case                   ours                                                            theirs, all torch's
=====================  ==============================================================  ================================
step                   ``FusedAdamW.step``                                             ``AdamW(fused=True).step``
tail                   check + norm; unscale × clip × step in one pass; ``update``     ``unscale_``, clip, step, update
masters                float16 gradients → float32 masters → float16 weights, a pass   copy, unscale, fused step, copy
=====================  ==============================================================  ================================

Both sides work on the same tensors by turns: what a page of memory costs depends on where it lies, by more than is to
be measured.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from amplab.amp import GradScaler
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import random_tensors, resnet50_shapes, small_transformer
from amplab.kernels import adam_
from amplab.optimizers import FusedAdamW

__all__ = ["optimizer_cases"]

_SCALE = 2.0**10
_RATE = 1e-3
_MAX_NORM = 1.0
_FUSED = "torch.optim.AdamW(fused=True)"

Shapes = Sequence[tuple[int, ...]]


def optimizer_cases(large: Shapes | None = None, small: Shapes | None = None) -> list[Case]:
    """Return the cases of the optimizers.

    Args:
        large: shapes of the list that stands for a large model; ResNet50's where None.
        small: shapes of the list that stands for a small one; a transformer's of 1.1 M parameters where None.
    """
    resnet = ("ResNet50", lambda: list(resnet50_shapes()) if large is None else large)
    transformer = ("small transformer", lambda: _transformer_shapes() if small is None else small)
    tails = [
        Case(
            f"AdamW under a GradScaler, clipped, {name}",
            "GradScaler + clip_grad_norm_ + fused AdamW",
            Goal("at least", goal),
            lambda shapes=shapes: _tails(shapes()),
        )
        for (name, shapes), goal in ((resnet, 1.5), (transformer, 2.0))
    ]
    steps = [
        Case(f"AdamW step, {name}", _FUSED, Goal("at least", 1.0), lambda shapes=shapes: _steps(shapes()))
        for name, shapes in (resnet, transformer)
    ]
    masters = Case(
        "AdamW on masters, float16 → float32 → float16, ResNet50",
        "copy + unscale + fused AdamW + copy",
        Goal("at least", 1.8),
        lambda: _masters(resnet[1]()),
    )
    return [*tails, masters, *steps]


def _transformer_shapes() -> Shapes:
    return [tuple(param.shape) for param in small_transformer().model.parameters()]


class _Training:
    """Parameters with the scaled gradients of a backward."""

    def __init__(self, shapes: Shapes, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.params = [nn.Parameter(each) for each in random_tensors(shapes)]
        self.optimizer = make(self.params)
        self._values = [each * (_SCALE * 1e-2) for each in random_tensors(shapes)]
        for param in self.params:
            param.grad = torch.empty_like(param)
        self.refill()

    def refill(self) -> None:
        """Give the gradients what they were before they were unscaled and clipped."""
        torch._foreach_copy_([param.grad for param in self.params], self._values)


def _ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdamW(params, lr=_RATE)


def _clipping(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedAdamW(params, lr=_RATE, max_grad_norm=_MAX_NORM)


def _theirs(ours: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch's optimizer of the same parameters, with the same tensors for its state."""
    ours.step()
    theirs = torch.optim.AdamW(ours.param_groups[0]["params"], lr=_RATE, fused=True)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {"tensors": len(shapes), "elements": sum(torch.Size(shape).numel() for shape in shapes)}


def _steps(shapes: Shapes) -> Pair:
    training = _Training(shapes, _ours)
    theirs = _theirs(training.optimizer)
    return Pair(Contestant(training.optimizer.step), Contestant(theirs.step), _sizes(shapes))


def _tails(shapes: Shapes) -> Pair:
    training = _Training(shapes, _clipping)
    ours, theirs = training.optimizer, _theirs(training.optimizer)
    our_scaler, their_scaler = (
        make("cpu", init_scale=_SCALE, growth_interval=2**30) for make in (GradScaler, torch.amp.GradScaler)
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


def _masters(shapes: Shapes) -> Pair:
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
