"""BeforeInitialize: models and optimizers as they are before `initialize` changes them.

An interrupt can come between any two changes, and between a change and the line that stores what undoes it: torch may
have registered a hook whose handle nobody has. Therefore all that `initialize` may change is stored before it begins.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amplab.amp.apex.model_weights import Uncast
from amplab.amp.apex.optimizer_names import take_names_back
from amplab.amp.backward.optimizer_params import params_of

__all__ = ["BeforeInitialize", "hooks_of"]


class BeforeInitialize:
    """What `initialize` may change: values, gradients, buffers, parameter groups, optimizer state and hooks.

    Tensors are not copied, since `initialize` replaces them.

    Args:
        models: as they are now.
        optimizers: as they are now.

    Attributes:
        params: the values and the gradient of every parameter.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._next_hook = RemovableHandle.next_id  # torch numbers all hooks of a process in one sequence
        self.models, self.optimizers = tuple(models), tuple(optimizers)
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        of_modules = [param for module in self._modules for param in module.parameters(recurse=False)]
        of_optimizers = [param for optimizer in optimizers for param in params_of(optimizer)]
        self.params = {param: Uncast(param.data, param.grad) for param in (*of_modules, *of_optimizers)}
        self._buffers = [(module, *named) for module in self._modules for named in module.named_buffers(recurse=False)]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._groups = [(params, tuple(params)) for params in groups]
        self._states = [(optimizer.state, _copied(optimizer.state)) for optimizer in optimizers]

    def changed(self) -> dict[Tensor, Uncast]:
        """Return those of `params` whose dtype is another one now."""
        return {param: before for param, before in self.params.items() if param.dtype != before.values.dtype}

    def restore(self) -> None:
        """Restore everything; a second call finishes what an interrupt has left. Sync: none."""
        for owner in (*self._modules, *self.params, *self.optimizers):
            for hooks in hooks_of(owner):
                for number in [number for number in hooks if isinstance(number, int) and number >= self._next_hook]:
                    del hooks[number]
        for optimizer in self.optimizers:
            take_names_back(optimizer)
        self._restore_weights()
        for params, before in self._groups:
            params[:] = before
        for state, entries in self._states:
            for param in [param for param in state if param not in entries]:
                del state[param]
            state.update(_copied(entries))

    def _restore_weights(self) -> None:
        for param, before in self.params.items():
            if param.grad is not before.grad:
                param.grad = None
            if param.dtype != before.values.dtype:
                param.data = before.values
            if before.grad is not None:
                param.grad = before.grad
        for module, name, buffer in self._buffers:
            setattr(module, name, buffer)
        for module in self._modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _copied(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the optimizer state with the same tensors in other dicts."""
    return {param: copy.copy(entry) if isinstance(entry, dict) else entry for param, entry in state.items()}


def hooks_of(owner: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts of hooks that torch keeps in an object, by number."""
    if isinstance(owner, Tensor):
        yield from filter(None, (owner._backward_hooks, owner._post_accumulate_grad_hooks))
        return
    for name, value in vars(owner).items():
        if name.startswith("_") and isinstance(value, OrderedDict):
            yield value
