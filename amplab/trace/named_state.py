"""What the code of a step names besides models and optimizers, kept: GradScalers and random generators.

A GradScaler is set aside: a block uses it outside of an iteration, at the same scales.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import amplab.amp
from amplab.trace.as_found import Undo, rebind
from amplab.trace.optimizer_states import contents_of
from amplab.trace.random_states import restorers
from amplab.trace.reached_values import reached_from
from amplab.trace.tensor_copies import TensorCopy, restore_all

__all__ = ["named_scalers", "named_state_kept", "set_aside"]


@contextmanager
def named_state_kept(*functions: Callable[..., Any] | None) -> Iterator[None]:
    """Set aside the GradScalers that the code of ``functions`` names, and restore the random generators.

    A loss may train a discriminator by itself, or draw noise from a generator of its own.

    Sync: a few.
    """
    given = [inspect.unwrap(function) for function in functions if function is not None]
    reached = {id(each): each for function in given for each in reached_from(function)}.values()
    with Undo() as undo:
        for restore in restorers(reached):
            undo.add(restore)
        for each in reached:
            if isinstance(each, torch.amp.GradScaler):
                set_aside(each, undo)
        yield


def named_scalers(function: Callable[..., Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that the code of a function names, each once; a loop should have one per optimizer."""
    reached = reached_from(inspect.unwrap(function))
    return list({id(each): each for each in reached if isinstance(each, torch.amp.GradScaler)}.values())


def set_aside(scaler: torch.amp.GradScaler, undo: Undo) -> None:
    """Let ``scaler`` begin an iteration with copies of its scales, until ``undo`` ends.

    The graph of a loss that is scaled already, and a captured graph, need the tensors themselves, unchanged.

    Sync: two for each loss, or none.
    """
    if not scaler.is_enabled():
        return
    tensors, containers = contents_of(_added_by_subclass(scaler))
    undo.add(partial(restore_all, [*map(TensorCopy.of, tensors)]))
    for restore in containers:
        undo.add(restore)
    undo.add(partial(rebind, vars(scaler), dict(vars(scaler))))
    if isinstance(scaler, amplab.amp.GradScaler):
        vars(scaler).update(scaler._outside_of_iteration())
        return
    copies: dict[str, Any] = {
        name: value.clone() for name, value in vars(scaler).items() if isinstance(value, torch.Tensor)
    }
    rows: Any = scaler._per_optimizer_states
    vars(scaler).update(copies, _per_optimizer_states=defaultdict(rows.default_factory))


def _added_by_subclass(scaler: torch.amp.GradScaler) -> list[Any]:
    """Return the attributes that a class of one's own adds to those of its base, such as a list of past scales."""
    base = amplab.amp.GradScaler if isinstance(scaler, amplab.amp.GradScaler) else torch.amp.GradScaler
    if type(scaler) is base:
        return []
    of_base = vars(base(scaler._device))
    return [value for name, value in vars(scaler).items() if name not in of_base]
