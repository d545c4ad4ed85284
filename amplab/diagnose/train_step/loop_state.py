"""What a train step changes besides the model: optimizers, loss scales, schedules; saved and restored."""

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
from amplab.trace.as_found import Undo
from amplab.trace.handed_step import Scaler

__all__ = ["OptimizerState", "kept", "scales_of", "set_scale"]


@contextmanager
def kept(
    optimizers: Sequence[Optimizer], scaler: Scaler | None, stateful: Sequence[Any]
) -> Iterator[list[OptimizerState]]:
    """Restore what the block changes; yield the saved states of the optimizers, in their order.

    Args:
        optimizers: with their parameters and gradients.
        scaler: the session or scaler, with its loss scales.
        stateful: other objects with state_dict and load_state_dict.
    """
    saved = [OptimizerState.of(optimizer) for optimizer in optimizers]
    scalers = [(each, each.state) for each in scaler.scalers] if isinstance(scaler, Session) else []
    others = [*stateful, *([scaler] if isinstance(scaler, torch.amp.GradScaler) else [])]
    states = [(each, copy.deepcopy(each.state_dict())) for each in others]
    enabled = [each for each in others if isinstance(each, torch.amp.GradScaler) and each.is_enabled()]
    iterations = list(map(_Iteration.of, enabled))

    def restore() -> None:
        for iteration in iterations:
            iteration.restore()
        for optimizer in saved:
            optimizer.restore()
        for scale, before in scalers:
            scale.state = before
        for each, state in states:
            if state:  # empty for a disabled scaler
                each.load_state_dict(state)

    with Undo() as undo:
        undo.add(restore)
        yield saved


class _Iteration(NamedTuple):
    """What a GradScaler has noted of each optimizer since its last `update`."""

    scaler: torch.amp.GradScaler
    noted: dict[int, dict[str, Any]]
    copies: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> _Iteration:
        noted = scaler._per_optimizer_states
        return cls(scaler, noted, {number: row.copy() for number, row in noted.items()})

    def restore(self) -> None:
        self.noted.clear()
        self.noted.update(self.copies)
        self.scaler._per_optimizer_states = self.noted


def scales_of(scaler: Scaler | None) -> tuple[float, ...]:
    """Return the distinct loss scales in force; 1.0 without scaling."""
    if scaler is None:
        return (1.0,)
    scales = [each.scale for each in scaler.scalers] if isinstance(scaler, Session) else [scaler.get_scale()]
    return tuple(dict.fromkeys(scales)) or (1.0,)


def set_scale(scaler: Scaler | None, scale: float) -> None:
    """Set every loss scale of a session or a scaler to `scale`, also a static one."""
    if isinstance(scaler, Session):
        for each in scaler.scalers:
            each.state = replace(each.state, scale=scale)
    elif scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})


class OptimizerState(NamedTuple):
    """An optimizer with its parameters, gradients, states and settings at one moment."""

    optimizer: Optimizer
    values: list[tuple[Tensor, Tensor, Tensor | None]]
    state: dict[Tensor, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerState:
        """Save everything; tensors are copied."""
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = [(each, each.detach().clone(), each.grad) for each in params]
        state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(optimizer, values, state, groups)

    def is_unmoved(self) -> bool:
        """Whether no parameter has changed. Sync: one for each."""
        return all(torch.equal(parameter, value) for parameter, value, _ in self.values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore it."""
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
