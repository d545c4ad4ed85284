"""Which of several optimizers a loop never steps; a step of the run is one of the first, so nothing else tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from amplab.diagnose import Finding
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.rules.parameters import model_parameters
from amplab.diagnose.rules.updates import never_stepped

__all__ = ["IdleOptimizers"]

ENOUGH = 5
"""Steps of another optimizer without one of this: a critic may take a few for each of its generator's."""


class IdleOptimizers:
    """Counts the steps of several optimizers; with one alone there is nothing to count."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps = [0] * len(optimizers)

    def follow(self) -> Callable[[], None]:
        """Begin to count; return what ends it."""
        if len(self._optimizers) == 1:
            return lambda: None
        ends = [
            each.register_step_pre_hook(self._counter(number)).remove for number, each in enumerate(self._optimizers)
        ]

        def end() -> None:
            for each in ends:
                each()

        return end

    def findings(self, model: nn.Module, scaling: str, steps: int) -> Iterator[Finding]:
        """The optimizers without a step whose parameters hold a finite gradient. Sync: one for each of those.

        Args:
            model: whose parameters they step.
            scaling: who scales the loss, as `Observation.scaling` has it.
            steps: of the run: those of the first optimizer, also where they were skipped.
        """
        counts = [max(self._steps[0], steps), *self._steps[1:]]
        for number, optimizer in enumerate(self._optimizers):
            if counts[number] == 0 and max(counts) > ENOUGH:
                names = _with_gradient(model, optimizer)
                if names:
                    yield never_stepped(
                        number,
                        names,
                        Api(ApiStyle(scaling)),
                        {"parameters": len(names), "steps_of_others": max(counts)},
                    )

    def _counter(self, number: int) -> Callable[..., None]:
        def count(*_: object) -> None:
            self._steps[number] += 1

        return count


def _with_gradient(model: nn.Module, optimizer: Optimizer) -> list[str]:
    own = {id(each) for each in model_parameters(optimizer)}
    masters = dict(zip(map(id, model_parameters(optimizer)), _stepped(optimizer), strict=True))
    held = [(name, each) for name, each in model.named_parameters() if id(each) in own]
    grads = [(name, each.grad if each.grad is not None else masters[id(each)].grad) for name, each in held]
    return [name for name, grad in grads if grad is not None and 0 < _norm(grad) < float("inf")]


def _stepped(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _norm(grad: torch.Tensor) -> float:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(values.float()).item()
