"""Suite "scaler": the whole call of unscale_, also with clipping, against torch's GradScaler."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

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
_COMBINED_GOALS = (("kept", 2.5), ("fresh", 7.0), ("clip", 3.0))
_Scaler = TypeVar("_Scaler", bound=torch.amp.GradScaler)


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
    combined = [_combined_case(many, kind, goal, elements) for kind, goal in _COMBINED_GOALS]
    return [*whole, clipping, *combined]


def combined_against_separate(count: int, elements: int, *, fresh: bool, clip: bool) -> Pair:
    """Return the whole call of unscale_ (and clip) with ``combine_grad=True`` and without."""
    ours, theirs = (
        _with_buffers(Gradients(count, elements, fresh=fresh), combine=combine, clip=clip) for combine in (True, False)
    )
    return Pair(ours, theirs, {"tensors": count, "elements": count * elements})


def _with_buffers(gradients: Gradients, *, combine: bool, clip: bool) -> Contestant:
    scaler = GradScaler("cpu", init_scale=_SCALE, growth_interval=2**30, combine_grad=combine)
    if clip:
        return iteration(scaler, gradients, lambda scaler: scaler.unscale_and_clip_(gradients.optimizer, _MAX_NORM))
    return iteration(scaler, gradients, lambda scaler: scaler.unscale_(gradients.optimizer))


def _combined_case(count: int, kind: str, goal: float, elements: int) -> Case:
    call = "unscale_and_clip_" if kind == "clip" else "unscale_"
    gradients = "fresh" if kind == "fresh" else "kept"
    return Case(
        f"GradScaler(combine_grad=True).{call}, {count} × {elements}, {gradients}",
        "the same without combine_grad",
        Goal("at most", goal),
        lambda: combined_against_separate(count, elements, fresh=kind == "fresh", clip=kind == "clip"),
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
