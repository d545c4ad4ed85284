"""The objects of one's own that a step may change, and the names under which they keep values.

Looked at are the modules of a model or a loss, optimizers, the hooks of both, the variables that a function shares with
the one around it, and data with their samplers and datasets. What these lead to otherwise may belong to others: it is
neither read nor changed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.apex.optimizer_names import LENT_NAMES
from amplab.lab.own_values import READERS
from amplab.trace.as_found import rebind
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.untouched import WRAPPERS

__all__ = ["Names", "holders"]

_MOST_PARTS = 1_000  # of a list that may hold datasets and samplers
_HOOKS_OF_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_LOADER = ("dataset", "sampler", "batch_sampler")
_OF_EVERY_LOADER = frozenset(vars(DataLoader(TensorDataset())))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the names that torch and amplab use; the first optimizer of a process loads torch's compiler."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros(1)])), *LENT_NAMES))


class Names(Mapping[str, Any]):
    """The names under which an object, the `owner`, keeps values."""

    def __init__(self, owner: Any, names: dict[str, Any], without: frozenset[str] = frozenset()) -> None:
        self.owner, self._names, self._without = owner, names, without

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def set(self, name: str, value: Any) -> None:
        """Let a name stand for a value."""
        self._names[name] = value

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._names) if name not in self._without and not name.startswith("__"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def takes(self, name: str, value: Any) -> bool:
        """Whether a value of a file may stand here: it hides no method or weight, and replaces no function or part."""
        owner, is_new = self.owner, name not in self._names
        hidden = name.startswith("__") or name in self._without or callable(getattr(type(owner), name, None))
        if isinstance(owner, nn.Module):
            hidden = hidden or any(name in each for each in (owner._parameters, owner._buffers, owner._modules))
        return not hidden and (is_new or _may_follow(self._names[name], value))

    def restorer(self) -> Callable[[], None]:
        """Return a function that lets every name stand for what it stands for now."""
        if type(self.owner).__module__.startswith(WRAPPERS):
            return lambda: None
        return partial(rebind, self._names, dict(self._names))


class _Buffers(Names):
    def restorer(self) -> Callable[[], None]:
        return lambda: None  # kept with the weights

    def takes(self, name: str, value: Any) -> bool:
        return name in self._names and isinstance(value, Tensor)


class _Cells(Names):
    """The variables that a function shares with the function around it."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if _has_value(cell)}
        super().__init__(function, {name: cell.cell_contents for name, cell in self._cells.items()})

    def set(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def takes(self, name: str, value: Any) -> bool:
        return name in self._cells and _may_follow(self._names[name], value)

    def restorer(self) -> Callable[[], None]:
        def restore() -> None:
            for name, value in self._names.items():
                self.set(name, value)

        return restore


def _has_value(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _may_follow(own: Any, value: Any) -> bool:
    """Whether a value may follow another one in an attribute: a run has replaced it so, by the same code."""
    if isinstance(value, defaultdict):
        return isinstance(own, defaultdict)
    if isinstance(own, str) is not isinstance(value, str) and None not in (own, value):
        return False
    return not callable(own) and not isinstance(own, (nn.Parameter, Optimizer, *READERS))


def holders(roots: Mapping[str, Any]) -> Iterator[tuple[str, Names]]:
    """Yield the path and the names of each object that keeps something, of each one once."""
    seen: set[int] = set()
    waiting = [*roots.items()]
    while waiting:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for place, module in value.named_modules():
                yield f"{path}/{place}", Names(module, vars(module), _OF_EVERY_MODULE)
                yield f"{path}/{place} buffers", _Buffers(module, module._buffers)
                waiting += _hooks(f"{path}/{place}", module)
        elif isinstance(value, Optimizer):
            if not type(value).__module__.startswith(("torch.", "amplab.")):  # whose state_dict has all
                yield path, Names(value, vars(value), _of_every_optimizer())
            waiting += _hooks(path, value)
        elif isinstance(value, FunctionType):
            yield path, _Cells(value)
        elif isinstance(value, MethodType | partial):
            waiting.append((path, value.__self__ if isinstance(value, MethodType) else value.func))
        elif isinstance(names := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
            without = _OF_EVERY_LOADER if isinstance(value, DataLoader) else frozenset()
            yield path, Names(value, names, without)
            parts = [(name, names.get(name)) for name in (_OF_LOADER if isinstance(value, DataLoader) else [*names])]
            waiting += [(f"{path}.{name}", part) for name, part in parts if issubclass(type(part), READERS)]
            waiting += [reader for name, part in parts for reader in _readers_in(f"{path}.{name}", part)]


def _hooks(path: str, owner: nn.Module | Optimizer) -> list[tuple[str, Any]]:
    """Return the hooks of one's own that run in a step."""
    found = hooks_of(owner) if isinstance(owner, Optimizer) else [getattr(owner, name) for name in _HOOKS_OF_MODULE]
    hooks = [hook for hooks in found for hook in hooks.values() if not is_amplabs(hook)]
    return [(f"{path} hook {place}", hook) for place, hook in enumerate(hooks)]


def _readers_in(path: str, parts: Any) -> list[tuple[str, Any]]:
    """Return the datasets and samplers in a list, a tuple or a dict, as ConcatDataset has one."""
    if type(parts) not in (list, tuple, dict) or len(parts) > _MOST_PARTS:
        return []
    named = [*parts.items()] if isinstance(parts, dict) else [*enumerate(parts)]
    return [(f"{path}[{name!r}]", part) for name, part in named if issubclass(type(part), READERS)]
