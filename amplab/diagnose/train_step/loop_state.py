"""What a train step changes besides the model: optimizers, loss scales, schedules; saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from amplab.amp import Session
from amplab.trace.as_found import Undo
from amplab.trace.handed_step import Scaler
from amplab.trace.named_state import set_aside
from amplab.trace.optimizer_states import OptimizerState, with_inner

__all__ = ["kept", "scales_of", "set_scale"]


@contextmanager
def kept(
    optimizers: Sequence[Optimizer], scaler: Scaler | None, stateful: Sequence[Any]
) -> Iterator[list[OptimizerState]]:
    """Restore what the block changes; yield the saved states of the optimizers, in their order, and of inner ones.

    Args:
        optimizers: with their parameters and gradients.
        scaler: the session or scaler, with its loss scales.
        stateful: other objects with state_dict and load_state_dict.
    """
    saved = [OptimizerState.of(optimizer) for optimizer in with_inner(optimizers)]
    grads = [(each.tensor, each.tensor.grad) for state in saved for each in state.stepped]
    of_session = [(each, each.state) for each in scaler.scalers] if isinstance(scaler, Session) else []
    own = {id(each): each for each in (*stateful, scaler) if isinstance(each, torch.amp.GradScaler)}
    others = [each for each in stateful if not isinstance(each, torch.amp.GradScaler)]
    states = [(each, copy.deepcopy(each.state_dict())) for each in others]

    def restore() -> None:
        for optimizer in saved:
            optimizer.restore()
        for parameter, grad in grads:
            parameter.grad = grad
        for scale, before in of_session:
            scale.state = before

    with Undo() as undo:
        for each, state in reversed(states):
            undo.add(partial(each.load_state_dict, state))  # on its own: another one may raise
        undo.add(restore)
        for each in own.values():
            set_aside(each, undo)
        for parameter, _ in grads:  # of another model too, whose gradients the block would add to
            parameter.grad = None
        yield saved


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
