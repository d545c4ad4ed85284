"""`named_by`: what the code of one's own that runs in a step keeps, as far as the names in it lead.

That is its variables, the attributes of its functions and classes, the variables of its files, and objects. A method is
followed if code that is followed names it, or if torch or Python calls it by itself, such as `forward` and `__call__`.
Other methods, such as one that evaluates, do not run in a step, and may name large data. Classes and files of installed
packages are neither read nor changed.
"""

from __future__ import annotations

import sys
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, partial
from itertools import chain, islice
from threading import local
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amplab.lab.own_objects import Cells, Gradients, Names, is_followed, names_of, own_hooks
from amplab.lab.own_values import READERS, SCALARS
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.own_files import is_installed, is_of_own_class, is_own_file
from amplab.trace.random_states import GENERATORS
from amplab.trace.reached_values import cell_contents, names_in, reached_from

__all__ = ["Followed", "named_by"]

_MOST_OBJECTS = 20_000
_MOST_ELEMENTS = 1_000  # of a container: a list of examples is long
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_HOLDERS = (local, UserDict, UserList, ChainMap)  # of the standard library, of nothing but what code gives them
_SEARCHED = (SimpleNamespace, Tensor, Optimizer, LRScheduler)  # for attributes that code gives them
_METHODS = (FunctionType, staticmethod, classmethod)
_FUNCTIONS = (FunctionType, MethodType, partial)
_GLOBAL_HOOKS = tuple(f"_global_{name}_hooks" for name in ("forward_pre", "forward", "backward_pre", "backward"))
_WRAPPERS = (staticmethod, classmethod, _lru_cache_wrapper)


class _Variables(Names):
    """The variables of a file that the code of a function names."""

    def __init__(self, owner: Any, variables: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(owner, {name: variables[name] for name in names if name in variables})
        self._variables, self._all = variables, names

    def again(self) -> Names:
        return _Variables(self.owner, self._variables, self._all)

    def restorer(self) -> Callable[[], None]:
        def restore() -> None:
            for name, value in self._names.items():
                if self._variables.get(name, self) is not value:
                    self._variables[name] = value

        return restore


class _OfClass(Names):
    """The attributes of a class, without those of its bases."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, dict(vars(kind)))

    def again(self) -> Names:
        return _OfClass(self.owner)

    def restorer(self) -> Callable[[], None]:
        def restore() -> None:
            now = dict(vars(self.owner))
            for name in {*Names(self.owner, now)} - {*self}:
                type.__delattr__(self.owner, name)
            for name in self:
                if now.get(name, self) is not self._names[name]:
                    type.__setattr__(self.owner, name, self._names[name])  # whatever its metaclass makes of it

        return restore


class _OfContext(Names):
    """The value of a variable of contextvars."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        try:
            now = {"value": variable.get()}  # of one that was not set, its default
        except LookupError:
            now = {}
        super().__init__(variable, now)

    def again(self) -> Names:
        return _OfContext(self.owner)

    def restorer(self) -> Callable[[], None]:
        def restore() -> None:
            for value in self._names.values():
                if self.owner.get() is not value:
                    self.owner.set(value)

        return restore


class _OfCall(Names):
    """The arguments that every call of a function gets, such as a list."""


class _OfOptimizer(Names):
    """The state and the settings of an optimizer of another model, such as a critic."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, {"state": optimizer.state, "param_groups": optimizer.param_groups})


class Followed:
    """Follows code from values.

    Args:
        values: functions, and objects whose code is followed.
        weights: tensors whose gradients, and whose optimizers, are kept in another way.

    Attributes:
        found: what keeps something, as `own_objects.holders` takes it.
        functions: those of one's own that were followed.
        seen: all values that the code leads to, by id.
    """

    def __init__(self, values: Iterable[Any], weights: Iterable[Tensor] = ()) -> None:
        self._weights = {*map(id, weights)}
        self.found: list[Any] = []
        self.functions: list[FunctionType] = []
        self._names = {"forward", "backward", "setup_context"}  # torch calls them
        self._spaces: list[Mapping[str, Any]] = []  # of classes and objects: what is named in them is followed
        self._classes: set[type] = set()
        self.seen: dict[int, Any] = {}
        waiting = [*values]
        while waiting and len(self.seen) < _MOST_OBJECTS:
            value = waiting.pop()
            if self._is_new(value):
                self.seen[id(value)] = value
                waiting += self._from(value)
            waiting = waiting or self._named_in_spaces()

    def _is_new(self, value: Any) -> bool:
        return type(value) not in SCALARS and type(value) not in ProxyTypes and id(value) not in self.seen

    def _named_in_spaces(self) -> list[Any]:
        found = (space.get(name) for space in self._spaces for name in self._names & space.keys())
        return [*filter(self._is_new, found)]

    def _from(self, value: Any) -> Iterable[Any]:
        """Return what a value leads to, and note what keeps something."""
        if isinstance(value, FunctionType):
            return self._from_function(value)
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, partial):
            return value.func, *self._of_call(value, value.args, value.keywords)
        if isinstance(value, property):
            return value.fget, value.fset, value.fdel
        if isinstance(value, (*_WRAPPERS, cached_property)):
            return (value.__wrapped__ if isinstance(value, _WRAPPERS) else value.func,)
        if isinstance(value, type):
            called = self._from_class(value)  # and `__init__`, since code that names a class may make an object
            return [*called, *(vars(each).get("__init__") for each in value.__mro__ if each in self._classes)]
        if isinstance(value, _CONTAINERS):
            return islice(chain(*value.items()) if isinstance(value, dict) else value, _MOST_ELEMENTS)
        return self._from_object(value)

    def _from_function(self, function: FunctionType) -> Iterable[Any]:
        code, variables = function.__code__, function.__globals__
        if is_installed(code.co_filename) or is_installed(variables.get("__file__") or ""):
            return [vars(function).get("__wrapped__"), *_functions_in(cell_contents(function))]
        self.functions.append(function)
        self._names |= (names := {*names_in(code)})
        named = _Variables(function, variables, names)
        self.found += [named, Cells(function), Names(function, vars(function))]
        values = [*named.values(), *cell_contents(function), *vars(function).values()]
        values += self._of_call(function, function.__defaults__ or (), function.__kwdefaults__ or {})
        return values + self._in_files([*values, *map(sys.modules.get, names)], names)  # it may import one itself

    def _of_call(self, owner: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
        """Note arguments that every call gets, such as a list."""
        given = {str(place): each for place, each in enumerate(args)} | {**keywords}
        self.found.append(_OfCall(owner, given))
        return [*given.values()]

    def _in_files(self, values: Iterable[Any], names: set[str]) -> list[Any]:
        """Return what code with these names finds in files of one's own, and in those that these name."""
        found: list[Any] = []
        files = [each for each in values if _is_file(each)]
        for file in files:  # which grows
            variables = _Variables(file, vars(file), names)
            self.found.append(variables)
            found += variables.values()
            files += [each for each in variables.values() if _is_file(each) and each not in files]
        return found

    def _from_object(self, value: Any) -> Iterable[Any]:
        """Return what an object leads to: its hooks and functions at once, and other attributes that code names."""
        self._note_object(value)
        if isinstance(value, nn.Module):
            return [each for module in value.modules() for each in self._from_module(module)]
        if _is_holder(value):
            return *vars(value).values(), *self._from_class(type(value))
        kept = {name: each for _, names in names_of("", value) for name, each in names.items()}
        if is_of_own_class(value) or isinstance(value, _SEARCHED):
            self._spaces.append(kept)
        optimizer = [value.optimizer] if isinstance(value, LRScheduler) else []
        hooks = [hook for _, hook in own_hooks("", value)] if isinstance(value, (Tensor, Optimizer)) else []
        return [*self._from_class(type(value)), *_functions_in(kept.values()), *optimizer, *hooks]

    def _note_object(self, value: Any) -> None:
        """Note what an object keeps, unless it is one of a library, which may stand for something outside."""
        if _is_holder(value) or isinstance(value, LRScheduler):
            self.found.append(Names(value, vars(value)))  # of a threading.local, those of this thread
        elif isinstance(value, ContextVar):
            self.found.append(_OfContext(value))
        elif isinstance(value, GENERATORS):
            self.found.append(Names(value, {"generator": value}))
        elif isinstance(value, Tensor):
            self._note_gradients(value, {"grad": value})
            self.found += [Names(value, vars(value))] if vars(value) else []
        elif isinstance(value, Optimizer):
            stepped = {id(each) for group in value.param_groups for each in group["params"]}
            self.found += [] if stepped & self._weights else [value, _OfOptimizer(value)]
        elif is_followed(value) or _is_own_reader(value):
            self.found.append(value)

    def _note_gradients(self, owner: Any, tensors: Mapping[str, Tensor]) -> None:
        others = {
            name: each
            for name, each in tensors.items()
            if each is not None and each.is_leaf and each.requires_grad and id(each) not in self._weights
        }
        self.found += [Gradients(owner, others)] if others else []

    def _from_module(self, module: nn.Module) -> list[Any]:
        self._note_gradients(module, dict(module.named_parameters(recurse=False)))
        self._spaces.append(vars(module))
        given = _functions_in(vars(module).values())  # such as the activation of an encoder layer of torch
        owners: list[nn.Module | Tensor] = [module, *module.parameters(recurse=False)]
        hooks = [hook for owner in owners for _, hook in own_hooks("", owner)]
        return [*self._from_class(type(module)), *given, *hooks, *_global_hooks()]

    def _from_class(self, kind: type) -> list[Any]:
        """Note a class with its bases; return the methods that Python calls by itself, such as `__call__`."""
        if kind in self._classes:
            return []
        own = [each for each in kind.__mro__ if is_own_file(sys.modules.get(each.__module__))]
        new = [vars(each) for each in own if each not in self._classes]
        self.found += [_OfClass(each) for each in own if each not in self._classes]
        self._classes |= {kind, *own}
        self._spaces += new
        if issubclass(kind, Enum):  # whose members may have attributes besides their values
            self.found += [Names(member, vars(member)) for member in kind if own]
        methods = [(name, each) for names in new for name, each in names.items() if isinstance(each, _METHODS)]
        replaced = [each for base in kind.__mro__ if base not in own for each in _functions_in(vars(base).values())]
        return [*(each for name, each in methods if name.startswith("__") and name != "__init__"), *replaced]


def _functions_in(values: Iterable[Any]) -> list[Any]:
    """Return the functions of one's own among what a library was given, and will call by itself."""
    return [each for each in values if isinstance(each, _FUNCTIONS) and _is_own_function(each)]


def _is_own_function(value: Any) -> bool:
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    return not (isinstance(value, FunctionType) and is_installed(value.__code__.co_filename) and not value.__closure__)


def _global_hooks() -> list[Any]:
    """Return the hooks of one's own that torch calls in every module."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(torch_module, name).values() if not is_amplabs(hook)]


def _is_holder(value: Any) -> bool:
    """Whether it holds what code of one's own gives it; what a library keeps in a class of its own is its."""
    return isinstance(value, _HOLDERS) and (type(value) in _HOLDERS or is_of_own_class(value))


def _is_own_reader(value: Any) -> bool:
    """Whether it is a dataset or a sampler of a class of one's own, such as a replay buffer."""
    return isinstance(value, READERS) and is_of_own_class(value)


def _is_file(value: Any) -> bool:
    return type(value) is ModuleType and is_own_file(value)


def named_by(values: Iterable[Any], weights: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Return what keeps something for the code that values lead to, as `holders` takes it.

    Args:
        values: Functions that run in a step, and models.
        weights: As for `Followed`.

    Sync: none.
    """
    followed = Followed((reached for each in values for reached in reached_from(each)), weights)
    return {str(place): each for place, each in enumerate(followed.found)}
