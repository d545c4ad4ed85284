"""Suite "scaler": the whole call of unscale_, also with clipping, against torch's GradScaler."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch.nn.utils import clip_grad_norm_

from amplab.amp import GradScaler
from amplab.bench.interleaved import Case, Contestant, Pair
from amplab.bench.rows import Goal
from amplab.bench.workloads import grads_of, random_tensors

__all__ = ["Gradients", "clipping_against_torch", "iteration", "scaler_against_torch", "scaler_cases", "torch_scaler"]

_SCALE = 2.0**16
_MAX_NORM = 1.0
_THEIRS = "torch.amp.GradScaler.unscale_"
_Scaler = TypeVar("_Scaler", bound=torch.amp.GradScaler)


class _Combined(NamedTuple):
    """A comparison with and without ``combine_grad``: the call, on which gradients, and the most it may take."""

    call: str
    gradients: str
    goal: float


_COMBINED = (
    _Combined("unscale_", "kept", 1.1),
    _Combined("unscale_", "fresh", 1.1),
    _Combined("unscale_and_clip_", "kept", 1.0),
    _Combined("unscale_and_clip_ by the largest", "kept", 0.8),
    _Combined("unscale_and_clip_ by the largest", "fresh", 1.1),  # new gradients move into the buffer
)


class Gradients:
    """Parameters of one optimizer with scaled gradients, as after a backward.

    Args:
        count: the number of tensors.
        elements: the elements of each.
        fresh: make a new gradient tensor at each step, as after ``zero_grad()``; else refill the same one.
        device: the device of all of them.
    """

    def __init__(self, count: int, elements: int, *, fresh: bool, device: str = "cpu") -> None:
        shapes = [(elements,)] * count
        self.params = [torch.nn.Parameter(each.to(device)) for each in random_tensors(shapes)]
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        self._values = [each.to(device) * _SCALE for each in random_tensors(shapes)]
        self._fresh = fresh
        self._give()

    def refill(self) -> None:
        """Write the gradients of the next step, as its backward would."""
        if self._fresh:
            self._give()
        else:
            torch._foreach_copy_(grads_of(self.params), self._values)

    def _give(self) -> None:
        for param, values in zip(self.params, self._values, strict=True):
            param.grad = values.clone()


def scaler_cases(many: int = 2000, few: int = 200, elements: int = 1000) -> list[Case]:
    """Return the cases of ``amplab bench scaler``.

    Args:
        many: the number of gradients of the cases that only unscale.
        few: the number of gradients of the case that also clips.
        elements: the elements of each gradient, float32.
    """
    sizes = f"{many} × {elements} float32"
    whole = [
        Case(
            f"GradScaler.unscale_, {sizes}, {kind} gradients",
            _THEIRS,
            Goal("at least", 3.0),
            partial(scaler_against_torch, many, elements, fresh=kind == "fresh"),
        )
        for kind in ("fresh", "kept")
    ]
    clipping = Case(
        f"GradScaler.unscale_and_clip_, {few} × {elements}",
        "unscale_ + clip_grad_norm_",
        Goal("at least", 5.0),
        lambda: clipping_against_torch(few, elements),
    )
    combined = [_combined_case(many, elements, each) for each in _COMBINED]
    return [*whole, clipping, *combined]


def combined_against_separate(count: int, elements: int, call: str, *, fresh: bool) -> Pair:
    """Return a call of the scaler with ``combine_grad=True`` and without.

    Args:
        count: the number of gradients.
        elements: the elements of each.
        call: "unscale_", "unscale_and_clip_", or "unscale_and_clip_ by the largest" for the norm of infinite order.
        fresh: as for `Gradients`.
    """
    ours, theirs = (_called(Gradients(count, elements, fresh=fresh), call, combine=each) for each in (True, False))
    return Pair(ours, theirs, {"tensors": count, "elements": count * elements})


def _called(gradients: Gradients, call: str, *, combine: bool) -> Contestant:
    scaler = GradScaler("cpu", init_scale=_SCALE, growth_interval=2**30, combine_grad=combine)
    optimizer = gradients.optimizer
    if call == "unscale_":
        return iteration(scaler, gradients, lambda scaler: scaler.unscale_(optimizer))
    order = math.inf if call.endswith("largest") else 2.0
    return iteration(scaler, gradients, lambda scaler: scaler.unscale_and_clip_(optimizer, _MAX_NORM, order))


def _combined_case(count: int, elements: int, case: _Combined) -> Case:
    return Case(
        f"GradScaler(combine_grad=True).{case.call}, {count} × {elements}, {case.gradients}",
        "the same without combine_grad",
        Goal("at most", case.goal),
        lambda: combined_against_separate(count, elements, case.call, fresh=case.gradients == "fresh"),
    )


def scaler_against_torch(count: int, elements: int, *, fresh: bool, device: str = "cpu") -> Pair:
    """Return the whole call of unscale_ of both GradScalers, on float32 gradients."""
    ours, theirs = (Gradients(count, elements, fresh=fresh, device=device) for _ in range(2))
    return Pair(
        iteration(_our_scaler(device), ours, lambda scaler: scaler.unscale_(ours.optimizer)),
        iteration(torch_scaler(device), theirs, lambda scaler: scaler.unscale_(theirs.optimizer)),
        {"tensors": count, "elements": count * elements},
    )


def clipping_against_torch(count: int, elements: int, *, device: str = "cpu") -> Pair:
    """Return unscaling and clipping to a norm of 1, on new float32 gradients: one call here, two in torch."""
    ours, theirs = (Gradients(count, elements, fresh=True, device=device) for _ in range(2))

    def torchs(scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(theirs.optimizer)
        clip_grad_norm_(theirs.params, _MAX_NORM)

    return Pair(
        iteration(_our_scaler(device), ours, lambda scaler: scaler.unscale_and_clip_(ours.optimizer, _MAX_NORM)),
        iteration(torch_scaler(device), theirs, torchs),
        {"tensors": count, "elements": count * elements},
    )


def torch_scaler(device: str = "cpu") -> torch.amp.GradScaler:
    """Return torch's scaler with the constant scale of `Gradients`."""
    return torch.amp.GradScaler(device, init_scale=_SCALE, growth_interval=2**30)


def iteration(scaler: _Scaler, gradients: Gradients, run: Callable[[_Scaler], object]) -> Contestant:
    """Return the side that times ``run(scaler)`` within a complete iteration."""
    scaler.scale(torch.zeros((), device=gradients.params[0].device))
    scaler.unscale_(gradients.optimizer)

    def prepare() -> None:
        scaler.update()
        gradients.refill()

    return Contestant(lambda: run(scaler), prepare)


def _our_scaler(device: str) -> GradScaler:
    return GradScaler(device, init_scale=_SCALE, growth_interval=2**30)
