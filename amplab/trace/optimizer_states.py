"""Optimizers that step while somebody looks, put back: their state, what they step, and their groups' settings.

A loss that trains a discriminator on its way steps an optimizer that nobody has named; a hook on the steps of all
optimizers names it.

Reference: torch.optim.optimizer.register_optimizer_step_pre_hook.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amplab.trace.tensor_copies import TensorCopy

__all__ = ["unchanged_optimizers"]


@contextmanager
def unchanged_optimizers() -> Iterator[None]:
    """Put every optimizer that this thread steps in the block back to where it was before its first step.

    Sync: none.
    """
    seen: dict[int, _OptimizerState] = {}
    thread = get_ident()

    def remember(optimizer: Optimizer, *_arguments: object) -> None:
        if get_ident() == thread and id(optimizer) not in seen:
            # No op of the step: neither to be cast nor to be recorded.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                seen[id(optimizer)] = _OptimizerState.of(optimizer)

    hook = register_optimizer_step_pre_hook(remember)
    try:
        yield
    finally:
        hook.remove()
        with torch._C.DisableTorchFunction():
            for state in seen.values():
                state.restore()


class _OptimizerState(NamedTuple):
    """What an optimizer has: a slot is a tensor with its value, or a plain value."""

    optimizer: Optimizer
    stepped: list[TensorCopy]
    slots: dict[Tensor, dict[str, Any]]
    settings: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "_OptimizerState":
        stepped = [TensorCopy.of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        slots = {
            parameter: {name: TensorCopy.of(slot) if isinstance(slot, Tensor) else slot for name, slot in state.items()}
            for parameter, state in optimizer.state.items()
        }
        return cls(optimizer, stepped, slots, [dict(group) for group in optimizer.param_groups])

    def restore(self) -> None:
        for copy in self.stepped:
            copy.restore()
        for parameter in [parameter for parameter in self.optimizer.state if parameter not in self.slots]:
            del self.optimizer.state[parameter]
        for parameter, slots in self.slots.items():
            state = self.optimizer.state[parameter]
            for name in [name for name in state if name not in slots]:
                del state[name]
            state.update({name: _value_of(slot) for name, slot in slots.items()})
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=False):
            group.update(settings)


def _value_of(slot: Any) -> Any:
    if not isinstance(slot, TensorCopy):
        return slot
    slot.restore()
    return slot.tensor
