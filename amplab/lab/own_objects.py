"""The objects of one's own that a step may change, and the names under which they keep values.

Looked at are the modules of a model or a loss, optimizers, the hooks of both, the variables that a function shares with
the one around it, and data with their samplers and datasets; in attributes of modules, optimizers and hooks also
objects of a class of one's own, such as a meter. What these lead to otherwise may belong to others: it is neither read
nor changed.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from threading import Thread
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.apex.optimizer_names import LENT_NAMES
from amplab.lab.own_values import READERS, SCALARS
from amplab.trace.as_found import rebind
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.own_files import is_of_own_class
from amplab.trace.tensor_copies import write_value
from amplab.trace.untouched import WRAPPERS

__all__ = [
    "Cells",
    "Gradients",
    "Names",
    "holders",
    "is_followed",
    "names_of",
    "own_hooks",
]

_MOST_PARTS = 1_000  # of the containers of one attribute that may hold objects
_DEPTH = 4  # of such containers
_MOST_OBJECTS = 1_000  # that are followed to others, as the nodes of a tree
_CONTAINERS = frozenset((list, tuple, dict, deque, OrderedDict, defaultdict))
_HOOKS_OF_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_LOADER = ("dataset", "sampler", "batch_sampler")
_OF_EVERY_LOADER = frozenset(vars(DataLoader(TensorDataset())))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OTHERS = (type, nn.Module, Tensor, Optimizer, LRScheduler, Enum, BaseException, Thread, *READERS)  # not plain objects


class _Plain(Optimizer):
    """An optimizer with what every optimizer keeps. The first object of a class of torch changes how its hooks run."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the names that torch and amplab use; the first optimizer of a process loads torch's compiler."""
    return frozenset((*vars(_Plain([torch.zeros(1)], {})), *LENT_NAMES))


class Names(Mapping[str, Any]):
    """The names under which an object, the `owner`, keeps values."""

    def __init__(self, owner: Any, names: dict[str, Any], without: frozenset[str] = frozenset()) -> None:
        self.owner, self._names, self._without = owner, names, without

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def set(self, name: str, value: Any) -> None:
        """Let a name stand for a value."""
        self._names[name] = value

    def remove(self, name: str) -> None:
        """Let a name stand for nothing."""
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._names) if name not in self._without and not name.startswith("__"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def again(self) -> Names:
        """Return the names as they stand now."""
        return self

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
        return name in self._names and (value is None or isinstance(value, Tensor))


class _TensorsOutside(_Buffers):
    """The parameters, or the buffers, of a module that is no part of the model, such as an average of its weights."""

    def set(self, name: str, value: Any) -> None:
        if isinstance(own := self._names[name], nn.Parameter):
            write_value(own, value)
        else:
            self._names[name] = value

    def takes(self, name: str, value: Any) -> bool:
        own = self._names.get(name)
        is_like = not isinstance(own, nn.Parameter) or own.shape == getattr(value, "shape", None)
        return super().takes(name, value) and is_like

    def restorer(self) -> Callable[[], None]:
        return Names.restorer(self)


class Gradients(Names):
    """The gradients of tensors that are no part of the model, such as those of a critic."""

    def __init__(self, owner: Any, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        super().__init__(owner, {name: each.grad for name, each in self._tensors.items()})

    def again(self) -> Names:
        """Return the gradients of now."""
        return Gradients(self.owner, self._tensors)

    def restorer(self) -> Callable[[], None]:
        """Return a function that gives each tensor the gradient that it has now."""

        def restore() -> None:
            for name, tensor in self._tensors.items():
                tensor.grad = self._names[name]

        return restore


class _Slots(Names):
    """The attributes of an object that are not in its `__dict__`."""

    def __init__(self, owner: Any, slots: tuple[str, ...]) -> None:
        self._slots = slots
        super().__init__(owner, {name: getattr(owner, name) for name in slots if hasattr(owner, name)})

    def again(self) -> Names:
        return _Slots(self.owner, self._slots)

    def set(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)  # of a frozen dataclass, too

    def remove(self, name: str) -> None:
        object.__delattr__(self.owner, name)

    def takes(self, name: str, value: Any) -> bool:
        return name in self._slots and _may_follow(self._names.get(name), value)

    def restorer(self) -> Callable[[], None]:
        def restore() -> None:
            for name in self._slots:
                if name in self._names:
                    self.set(name, self._names[name])
                elif hasattr(self.owner, name):
                    self.remove(name)

        return restore


class Cells(Names):
    """The variables that a function shares with the function around it."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if _has_value(cell)}
        super().__init__(function, {name: cell.cell_contents for name, cell in self._cells.items()})

    def again(self) -> Names:
        """Return the variables as they stand now."""
        return Cells(self.owner)

    def set(self, name: str, value: Any) -> None:
        """Let a variable stand for a value."""
        self._cells[name].cell_contents = value

    def takes(self, name: str, value: Any) -> bool:
        """Whether a value of a file may stand here: the function has the variable, and it replaces no function."""
        return name in self._cells and _may_follow(self._names[name], value)

    def restorer(self) -> Callable[[], None]:
        """Return a function that lets every variable stand for what it stands for now."""

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
    if isinstance(own, nn.Parameter):
        return isinstance(value, nn.Parameter)
    return not callable(own) and not isinstance(own, (Optimizer, *READERS))


def holders(roots: Mapping[str, Any], followed: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Names]]:
    """Yield the path and the names of each object that keeps something, of each one once.

    Args:
        roots: objects and functions by name; those of a class of one's own are looked at, and not followed to others.
        followed: objects, or `Names`, that are followed; `own_code.named_by` finds those of the code of a step.
    """
    seen, left = set[int](), _MOST_OBJECTS
    waiting = deque((*roots.items(), *(followed or {}).items()))
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Names):
            yield path, value
            waiting += _parts_in(path, value, is_followed)
        elif isinstance(value, nn.Module):
            for place, module in value.named_modules():
                seen.add(id(module))
                yield f"{path}/{place}", (names := Names(module, vars(module), _OF_EVERY_MODULE))
                if path in roots:  # the weights are those of the model
                    yield f"{path}/{place} buffers", _Buffers(module, _listed(module._buffers))
                else:
                    yield f"{path}/{place} buffers", _TensorsOutside(module, _listed(module._buffers))
                    yield f"{path}/{place} weights", _TensorsOutside(module, _listed(module._parameters))
                waiting += _parts_in(f"{path}/{place}", names, is_followed) + own_hooks(f"{path}/{place}", module)
        elif isinstance(value, Optimizer):
            if not type(value).__module__.startswith(("torch.", "amplab.")):  # whose state_dict has all
                yield path, (names := Names(value, vars(value), _of_every_optimizer()))
                waiting += _parts_in(path, names, is_followed)
            waiting += own_hooks(path, value)
        elif isinstance(value, FunctionType):
            yield path, Cells(value)
        elif isinstance(value, MethodType | partial):
            waiting.append((path, value.__self__ if isinstance(value, MethodType) else value.func))
        elif not isinstance(value, type):
            # Data and losses share what they have with all runs, and with cells that may change it meanwhile.
            follows = left > 0 and path not in roots and _is_of_ones_own(value)
            left -= follows
            for kept in names_of(path, value):
                yield kept
                waiting += [] if isinstance(value, DataLoader) else _parts_in(path, kept[1], _is_reader)
                waiting += _parts_in(path, kept[1], is_followed) if follows else []
            parts = _attributes(value) or {}
            waiting += [
                (f"{path}.{name}", part) for name in _OF_LOADER if _attributes(part := parts.get(name)) is not None
            ]


def _listed(tensors: Any) -> dict[str, Any]:
    """Return the buffers or parameters of a module; of a scripted one, which keeps them in C++, those of now."""
    return tensors if isinstance(tensors, dict) else dict(tensors.items())


def names_of(path: str, value: Any) -> Iterator[tuple[str, Names]]:
    """Yield the attributes of an object with their path: those in its `__dict__`, those in slots. Sync: none."""
    if (kept := _attributes(value)) is not None:
        yield path, Names(value, kept, _OF_EVERY_LOADER if isinstance(value, DataLoader) else frozenset())
    if slots := _slots_of(type(value)):
        yield f"{path} slots", _Slots(value, slots)


def own_hooks(path: str, owner: nn.Module | Optimizer | Tensor) -> list[tuple[str, Any]]:
    """Return the hooks of one's own that run in a step, with their paths. Sync: none."""
    is_module = isinstance(owner, nn.Module)
    found = [getattr(owner, name) for name in _HOOKS_OF_MODULE] if is_module else [*hooks_of(owner)]
    hooks = [hook for hooks in found for hook in hooks.values() if not is_amplabs(hook)]
    return [(f"{path} hook {place}", hook) for place, hook in enumerate(hooks)]


def _parts_in(path: str, names: Mapping[str, Any], is_part: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Return the objects of a kind in attributes, and in containers there, as ConcatDataset has a list of them."""
    found = []
    for name in names:
        waiting: list[tuple[tuple[Any, ...], Any]] = [((), names.get(name))]  # None once a thread has deleted it
        for keys, value in waiting:  # which grows
            if type(value) in SCALARS:
                continue
            if type(value) not in _CONTAINERS:
                found += [(f"{path}.{name}{''.join(map(_index, keys))}", value)] if is_part(value) else []
            elif len(keys) < _DEPTH and len(value) + len(waiting) <= _MOST_PARTS:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [((*keys, key), part) for key, part in [*items] if type(part) not in SCALARS]
    return found


def _index(key: Any) -> str:
    return f"[{key!r}]" if type(key) in SCALARS else f"[{type(key).__name__}]"


def is_followed(value: Any) -> bool:
    """Whether it is a module, or a plain object of a class of one's own. Sync: none."""
    return isinstance(value, nn.Module) or _is_of_ones_own(value)


def _is_reader(value: Any) -> bool:
    return issubclass(type(value), READERS)


def _is_of_ones_own(value: Any) -> bool:
    """Whether it is a plain object, of a class that is not installed.

    An object of a library may stand for something outside, such as a file that it writes.
    """
    kind = type(value)
    if not is_of_own_class(value):
        return kind is SimpleNamespace
    return (_attributes(value) is not None or bool(_slots_of(kind))) and not issubclass(kind, _OTHERS)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, whatever its class makes of names; None without one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _slots_of(kind: type) -> tuple[str, ...]:
    listed = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__ if base.__module__ != "builtins"]
    names = [_mangled(base, name) for base, slots in listed for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _mangled(kind: type, name: str) -> str:
    """Return the name of an attribute as Python keeps it: a private one has that of its class before it."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
