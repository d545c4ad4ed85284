"""BeforeInitialize: models and optimizers as they are before `initialize` changes them.

An interrupt can come between any two changes, and between a change and the line that stores what undoes it: torch may
have registered a hook whose handle nobody has. Therefore all that `initialize` may change is stored before it begins.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amplab.amp.apex.model_weights import Uncast
from amplab.amp.apex.optimizer_names import take_names_back
from amplab.amp.backward.optimizer_attributes import containers_in, optimizers_in
from amplab.amp.backward.optimizer_params import params_of

__all__ = ["BeforeInitialize", "hooks_of"]


class BeforeInitialize:
    """What `initialize` may change: values, gradients, buffers, what optimizers keep parameters in, state and hooks.

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
        inside = [each for optimizer in optimizers for each in optimizers_in(optimizer)]
        self._states = [(each.state, _copied(each.state)) for each in inside if hasattr(each, "state")]
        kept = [container for optimizer in optimizers for container in containers_in(optimizer)]
        self._containers = [(each, dict(each) if isinstance(each, dict) else list(each)) for each in kept]

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
        for container, before in self._containers:
            _restore(container, before)
        for state, entries in self._states:
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


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        for param in [key for key in container if isinstance(key, Tensor) and key not in before]:
            del container[param]
        container.update(before)
    elif isinstance(container, list):
        container[:] = before
    else:  # a set or a deque
        container.clear()
        container.extend(before) if isinstance(container, deque) else container.update(before)


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
