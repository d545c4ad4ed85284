"""What a train step changes besides the model: optimizers, loss scales, schedules; saved and restored."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from amplab.amp import Session
from amplab.diagnose.train_step.schedules import reached_from
from amplab.trace.as_found import Undo
from amplab.trace.handed_step import Scaler
from amplab.trace.optimizer_states import OptimizerState

__all__ = ["kept", "other_scalers", "scalers_kept", "scales_of", "set_scale"]


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
    grads = [(each.tensor, each.tensor.grad) for state in saved for each in state.stepped]
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
        for parameter, grad in grads:
            parameter.grad = grad
        for scale, before in scalers:
            scale.state = before

    with Undo() as undo:
        for each, state in reversed(states):
            if state or not isinstance(each, torch.amp.GradScaler):  # empty for a disabled scaler
                undo.add(partial(_load_back, each, state))  # on its own: another one may raise
        undo.add(restore)
        for parameter, _ in grads:  # of another model too, whose gradients the block would add to
            parameter.grad = None
        yield saved


@contextmanager
def scalers_kept(scaler: Scaler | None, *functions: Callable[..., Any] | None) -> Iterator[None]:
    """Restore the scales of `scaler` and of the GradScalers that the code of `functions` names, and their iterations.

    A loss may train a discriminator by itself. Sync: a few.
    """
    others = {id(each): each for function in functions if function for each in other_scalers(function, scaler)}
    with kept((), scaler, list(others.values())):
        yield


def other_scalers(function: Callable[..., Any], scaler: Scaler | None) -> Iterator[torch.amp.GradScaler]:
    """The GradScalers besides `scaler` that the code of a function names; a loop should have one per optimizer."""
    reached = reached_from(inspect.unwrap(function))
    scalers = {id(each): each for each in reached if isinstance(each, torch.amp.GradScaler)}
    yield from (each for each in scalers.values() if each is not scaler)


def _load_back(owner: Any, state: Any) -> None:
    """Load a state, of a scaler only if it has changed: a graph may need the scale as it is, in memory."""
    if not isinstance(owner, torch.amp.GradScaler) or owner.state_dict() != state:
        owner.load_state_dict(state)


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
