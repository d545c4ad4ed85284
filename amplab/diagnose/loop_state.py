"""What a training step changes beside the model: optimizers, loss scales, schedules; kept, and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp import Session

__all__ = ["OptimizerState", "kept", "scales_of", "set_scale"]


@contextmanager
def kept(
    optimizers: Sequence[Optimizer], amp: Session | torch.amp.GradScaler | None, stateful: Sequence[Any]
) -> Iterator[list[OptimizerState]]:
    """Put everything back that the block changes; gives the optimizers as they were, in their order.

    Args:
        optimizers: with their parameters and gradients.
        amp: the session or scaler, with its loss scales.
        stateful: whatever else has state_dict and load_state_dict.
    """
    saved = [OptimizerState.of(optimizer) for optimizer in optimizers]
    scalers = [(scaler, scaler.state) for scaler in amp.scalers] if isinstance(amp, Session) else []
    others = [*stateful, *([amp] if isinstance(amp, torch.amp.GradScaler) else [])]
    states = [(each, copy.deepcopy(each.state_dict())) for each in others]
    try:
        yield saved
    finally:
        for optimizer in saved:
            optimizer.restore()
        for scaler, state in scalers:
            scaler.state = state
        for each, state in states:
            if state:  # that of a disabled scaler is empty
                each.load_state_dict(state)


def scales_of(amp: Session | torch.amp.GradScaler | None) -> tuple[float, ...]:
    """The loss scales in force, each once; 1.0 without scaling."""
    if amp is None:
        return (1.0,)
    scales = [scaler.scale for scaler in amp.scalers] if isinstance(amp, Session) else [amp.get_scale()]
    return tuple(dict.fromkeys(scales)) or (1.0,)


def set_scale(amp: Session | torch.amp.GradScaler | None, scale: float) -> None:
    """Let every loss scale of a session or a scaler be `scale`, a static one too."""
    if isinstance(amp, Session):
        for scaler in amp.scalers:
            scaler.state = replace(scaler.state, scale=scale)
    elif amp is not None and amp.is_enabled():
        amp.load_state_dict(amp.state_dict() | {"scale": scale})


class OptimizerState(NamedTuple):
    """An optimizer with its parameters, gradients, states and settings at one moment."""

    optimizer: Optimizer
    values: list[tuple[Tensor, Tensor, Tensor | None]]
    state: dict[Tensor, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerState:
        """Take note of everything; tensors are copied."""
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = [(each, each.detach().clone(), each.grad) for each in params]
        state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(optimizer, values, state, groups)

    def is_unmoved(self) -> bool:
        """Whether every parameter is what it was. Sync: one for each."""
        return all(torch.equal(parameter, value) for parameter, value, _ in self.values)

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back."""
        for parameter, value, grad in self.values:
            parameter.copy_(value)
            parameter.grad = grad
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, fields in zip(self.optimizer.param_groups, self.groups, strict=False):
            group.update(fields)


def _copied(state: Any) -> Any:
    # Not map_tensors, which returns a dict without tensors as it is: the optimizer would write into the copy.
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else copy.copy(state)
