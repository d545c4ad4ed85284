"""Tell by which scale the gradients of the optimizers are still multiplied while the first one steps.

=================================================  ==============================
gradients of                                       are still multiplied by
=================================================  ==============================
a fused optimizer in its own step                  its ``grad_scale``
an optimizer that the scaler has unscaled          nothing
one that waits for its step                        the loss scale
one that waits, but they are of its step before    nothing
one without a scaler, or of a session              nothing
=================================================  ==============================

A scaler's record of the iteration tells whether it has unscaled an optimizer. A loop may zero the gradients of a
network only before its own backward, as that of a GAN does; until then they are those of the step before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amplab.amp import Session
from amplab.amp.backward.optimizer_params import params_of
from amplab.trace.untouched import observing_steps

__all__ = ["LeftScales"]


class _UsedGradient(NamedTuple):
    """A gradient as a step has left it."""

    gradient: weakref.ref[Tensor]  # a loop that sets gradients to None frees their memory
    version: int  # a backward that adds to the gradient changes it


class LeftScales:
    """Knows the scale that is left on the gradients of each optimizer of a watched loop.

    Args:
        optimizers: those of the loop. The scales are asked for while the first one steps.
        scaler: what scales the losses; None without a scaler.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Session | torch.amp.GradScaler | None) -> None:
        self._first, self._others = optimizers[0], optimizers[1:]
        self._scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        self._used: dict[int, _UsedGradient] = {}

    def follow(self) -> Callable[[], None]:
        """Start to follow the steps of the other optimizers under a scaler; return a function that ends it."""
        followed = self._others if self._scaler is not None else ()
        ends = [each.register_step_post_hook(observing_steps(self._see_step, each)).remove for each in followed]

        def end() -> None:
            for each in ends:
                each()

        return end

    def of(self, optimizer: Optimizer) -> float:
        """Return what the gradients of `optimizer` are multiplied by, while the first optimizer steps.

        Sync: none; one each for the loss scale and a ``grad_scale`` that are left and on a device.
        """
        own = vars(optimizer).get("grad_scale")  # set during a step by torch and amplab, or by the loop as a factor
        left = 1.0 if own is None else float(own)
        if self._scaler is None or optimizer is self._first or not self._is_scaled(self._scaler, optimizer):
            return left
        return left * self._scaler.get_scale()

    def _is_scaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
        row = scaler._per_optimizer_states.get(id(optimizer))  # without making one
        if row is not None and row["stage"] is not OptState.READY:
            return False
        used, now = self._used.get(id(optimizer)), _first_gradient(optimizer)
        return used is None or now is None or used.gradient() is not now or used.version != now._version

    def _see_step(self, optimizer: Optimizer, *_: object) -> None:
        """Remember one gradient, which stands for all: a backward changes them together."""
        gradient = _first_gradient(optimizer)
        if gradient is not None:
            self._used[id(optimizer)] = _UsedGradient(weakref.ref(gradient), gradient._version)


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    return next((weight.grad for weight in params_of(optimizer) if weight.grad is not None), None)
