"""Find the optimizers of a watched loop that never step, though their parameters hold gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amplab.amp.backward.optimizer_params import params_of
from amplab.diagnose import Finding
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.updates import never_stepped
from amplab.diagnose.train_step.masters import model_parameters
from amplab.formats.stored_values import stored_values
from amplab.scalers.unscaler import local_shard
from amplab.trace.untouched import observing_steps

__all__ = ["ENOUGH_STEPS", "IdleOptimizers"]

ENOUGH_STEPS = 5
"""An optimizer without a step is idle once another one has made more steps than this. The critic of a GAN may take a
few steps for each step of its generator."""


class IdleOptimizers:
    """Counts the steps of several optimizers, since the steps of a run are those of the first only."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps = [0] * len(optimizers)

    def follow(self) -> Callable[[], None]:
        """Start counting, if there are several optimizers; return a function that ends it."""
        if len(self._optimizers) == 1:
            return lambda: None
        ends = [
            each.register_step_pre_hook(self._counter(number)).remove for number, each in enumerate(self._optimizers)
        ]

        def end() -> None:
            for each in ends:
                each()

        return end

    @property
    def saw_a_step(self) -> bool:
        """Whether one of several optimizers has stepped."""
        return any(self._steps)

    def findings(self, model: nn.Module, scaling: str, steps: int) -> Iterator[Finding]:
        """Yield a finding for each optimizer without a step whose parameters hold a finite gradient.

        Sync: one for each optimizer without a step.

        Args:
            model: the model whose parameters they update.
            scaling: what scales the loss, as `Observation.scaling`.
            steps: number of steps of the run, which are those of the first optimizer, skipped ones included.
        """
        counts = [max(self._steps[0], steps), *self._steps[1:]]
        for number, optimizer in enumerate(self._optimizers):
            if counts[number] == 0 and max(counts) > ENOUGH_STEPS:
                names = _with_gradient(model, optimizer)
                if names:
                    seen = {"parameters": len(names), "steps_of_others": max(counts)}
                    yield never_stepped(number, names, Api(ApiStyle(scaling)), {**seen})

    def _counter(self, number: int) -> Callable[..., None]:
        def count(*_: object) -> None:
            self._steps[number] += 1

        return observing_steps(count, self._optimizers[number])


def _with_gradient(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters with a finite gradient that is not zero."""
    own = {id(each) for each in model_parameters(optimizer)}
    masters = dict(zip(map(id, model_parameters(optimizer)), params_of(optimizer), strict=True))
    held = [(name, each) for name, each in model.named_parameters() if id(each) in own]
    grads = [(name, each.grad if each.grad is not None else masters[id(each)].grad) for name, each in held]
    return [name for name, grad in grads if grad is not None and 0 < _norm(grad) < float("inf")]


def _norm(grad: Tensor) -> float:
    return float(torch.linalg.vector_norm(stored_values(local_shard(grad)).float()).item())
