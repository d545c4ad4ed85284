"""An optimizer at one moment, to restore in place: what it steps, its state, its settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.apex.hooked_optimizer import HookedOptimizer
from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.as_found import Undo, rebind
from amplab.trace.optimizer_hooks import observe_steps
from amplab.trace.own_files import is_of_own_class
from amplab.trace.random_states import restorers
from amplab.trace.tensor_copies import TensorCopy, restore_all

__all__ = ["OptimizerState", "contents_of", "unchanged_optimizers", "with_inner"]


@contextmanager
def unchanged_optimizers() -> Iterator[None]:
    """Restore every optimizer that this thread steps in the block: parameters, state and settings.

    A loss may step an optimizer by itself, to train a discriminator.

    Sync: none.
    """
    seen: dict[int, OptimizerState] = {}

    def remember(optimizer: Optimizer, *_arguments: object) -> None:
        if id(optimizer) not in seen:
            # These copies are not ops of the step, so they are neither cast nor recorded.
            with without_function_modes(), _disable_current_modes():
                seen[id(optimizer)] = OptimizerState.of(optimizer)

    def restore() -> None:
        with without_function_modes():
            for state in seen.values():
                state.restore()

    with Undo() as undo:
        undo.add(restore)
        observe_steps(undo, before=remember)
        yield


_APART = nn.Module, Optimizer, LRScheduler, FunctionType, type
_OF_A_STEP = "grad_scale", "found_inf"
"""What a GradScaler gives a fused optimizer for one step, and deletes."""


class OptimizerState(NamedTuple):
    """An optimizer with its parameters, state and settings.

    Attributes:
        optimizer: it.
        stepped: the values of its parameters; of masters those of the half parameters, too.
        slots: those of the other tensors in its state, its settings and its attributes.
        containers: restore the dicts and lists around them, and random generators of its own.
        hooks: its dicts of hooks, each with what it has.
        attributes: its own, such as a count of steps, or what a scheduler of torch's has put there.
    """

    optimizer: Optimizer
    stepped: list[TensorCopy]
    slots: list[TensorCopy]
    containers: list[Callable[[], object]]
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerState:
        """Copy what a step can change."""
        hooks = [(each, dict(each)) for each in hooks_of(optimizer)]
        parameters_of = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stepped = [TensorCopy.of(parameter) for parameter in [*parameters_of, *_halves_of(hooks)]]
        found, containers = contents_of([optimizer.state, optimizer.param_groups, *vars(optimizer).values()])
        containers += restorers(vars(optimizer).values())
        parameters = {id(copy.tensor) for copy in stepped}
        slots = [TensorCopy.of(tensor) for tensor in found if id(tensor) not in parameters]
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _OF_A_STEP}
        return cls(optimizer, stepped, slots, containers, hooks, attributes)

    def is_unmoved(self) -> bool:
        """Whether no parameter has changed. Sync: one for each."""
        return all(torch.equal(copy.tensor, copy.value) for copy in self.stepped)

    def restore(self) -> None:
        """Restore everything, in the same tensors and containers."""
        try:
            restore_all([*self.stepped, *self.slots])
        finally:
            rebind(vars(self.optimizer), self.attributes)
            for hooks, before in self.hooks:
                rebind(hooks, before)
            for restore in self.containers:
                restore()


def with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return optimizers, and after them those that they have in their attributes, as Lookahead has."""
    found = [*optimizers]
    for each in found:  # which grows
        for value in vars(each).values():
            values = value if isinstance(value, list | tuple) else [value]
            found += [one for one in values if isinstance(one, Optimizer) and not any(one is other for other in found)]
    return found


def _halves_of(hooks: Iterable[tuple[Any, dict[Any, Any]]]) -> list[Tensor]:
    """The half parameters whose masters the hooks of a session let an optimizer step."""
    owners = {getattr(hook, "__self__", None) for _, those in hooks for hook in those.values()}
    return [pair.model for each in owners if isinstance(each, HookedOptimizer) for pair in each.masters.pairs]


def contents_of(values: Iterable[Any]) -> tuple[list[Tensor], list[Callable[[], object]]]:
    """Return the tensors in nested containers and plain objects, and functions that restore these, in place.

    Dicts, lists, tuples and deques are looked into, as the history of LBFGS is a list, and objects of own classes,
    such as a preconditioner. Modules, optimizers and schedulers are not.
    """
    tensors: list[Tensor] = []
    containers: list[Callable[[], object]] = []
    waiting, seen = [*values], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            containers.append(partial(rebind, value, dict(value)))
            waiting += value.values()
        elif isinstance(value, list | deque):
            containers.append(partial(_refill, value, [*value]))
            waiting += value
        elif isinstance(value, tuple):
            waiting += value
        elif is_of_own_class(value) and not isinstance(value, _APART):
            waiting.append(getattr(value, "__dict__", None))
    return tensors, containers


def _refill(owned: list[Any] | deque[Any], before: list[Any]) -> None:
    owned.clear()
    owned.extend(before)
