"""What objects of one's own keep besides weights: the numbers, text, tensors and lists in their attributes.

A sampler counts its epochs, an optimizer its steps, a model its calls. A run that goes on in another process builds the
objects anew; what had changed in them since they were built is in its checkpoint.

    own_state(roots)             what they keep now, by where it is
    changes(state, before)       what is other than before; `lost_changes` names the objects of which that is not known
    add_state(roots, changes)    set what was other in another process
    own_state_kept(roots, …)     a block that leaves it as it is
    own_copy(value)              an object with what it keeps, apart from the original

Kept are attributes of objects whose class is no library's, of modules, optimizers, samplers and datasets, and the
variables that a function shares with others. Not kept are parameters, other objects, and what is large.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from queue import Queue
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from amplab.amp.apex.before_initialize import hooks_of
from amplab.policies.signals import is_interrupt
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.random_states import GENERATORS

__all__ = [
    "MOST_BYTES",
    "State",
    "add_state",
    "changes",
    "lost_changes",
    "merged",
    "own_copy",
    "own_state",
    "own_state_kept",
    "restore_state",
]

MOST_BYTES = 2**26
"""Bytes of tensors and arrays that are kept together, a quarter of it of one; those beyond are data, not state."""

_MOST_OBJECTS = 2_000
_MOST_ELEMENTS = 1_000  # of a container, unless all are numbers or text
_DEPTH = 5
_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict)
_THREADS = (threading.Thread, BaseProcess, Queue, Future, Executor, threading.Condition, threading.Event)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LIVE = (*_THREADS, *_LOCKS, io.IOBase)
_KIND = "amplab.kind"  # marks what a checkpoint has no type of its own for

_OF_LOADER = ("dataset", "sampler", "batch_sampler", "collate_fn")
_OF_EVERY_LOADER = frozenset(vars(DataLoader(TensorDataset())))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_OPTIMIZER = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))

State = dict[str, dict[str, Any]]
"""Values by name, by the path of the object that has them."""


def own_state(roots: Mapping[str, Any], weights: Sequence[Tensor] = ()) -> State:
    """Return copies of what objects keep now, in a form that a checkpoint can hold.

    Args:
        roots: Objects and functions by name.
        weights: Tensors that are kept in another way.

    >>> class Sampler:
    ...     epoch = 0
    >>> one = Sampler()
    >>> one.epoch, one.order = 3, [2, 0, 1]
    >>> own_state({"data": one})
    {'data': {'epoch': 3, 'order': [2, 0, 1]}}
    """
    encode = _Encoder(weights)
    state = {path: encode.values(names) for path, names in _holders(roots)}
    return {path: values for path, values in state.items() if values}


def changes(state: State, before: State) -> State:
    """Return the values of `state` that are not those of `before`, of objects all of whose changes can be kept.

    An object that has opened a file and notes that it has must not find the note alone.
    """
    return {path: values for path, values in _all_changes(state, before) if not any(map(_is_object, values.values()))}


def lost_changes(state: State, before: State) -> list[str]:
    """Return the paths of the objects whose changes `changes` leaves out."""
    return [path for path, values in _all_changes(state, before) if any(map(_is_object, values.values()))]


def _all_changes(state: State, before: State) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, values in state.items():
        old = before.get(path, {})
        new = {name: value for name, value in values.items() if not _same(value, old.get(name, _NO))}
        if new:
            yield path, new


def merged(state: State, later: State) -> State:
    """Return `state` with the values of `later` in place of its own."""
    return {path: {**state.get(path, {}), **later.get(path, {})} for path in state.keys() | later.keys()}


def add_state(roots: Mapping[str, Any], state: State, device: torch.device | None = None) -> None:
    """Set what `changes` returned, where the objects are still there; containers and tensors are written in place.

    Args:
        roots: As for `own_state`.
        state: The values.
        device: Where tensors belong that the object does not have yet; None for the CPU.
    """
    for path, names in [*_holders(roots)]:
        for name, value in state.get(path, {}).items():
            if not callable(own := names.get(name)) and not _is_object(value):  # a method stays one
                names[name] = _set_into(own, _decoded(value, device))


def restore_state(roots: Mapping[str, Any], state: State, weights: Sequence[Tensor] = ()) -> None:
    """Let objects keep what they did when `own_state` returned `state`; what they keep in addition now is removed.

    Args:
        roots: As for `own_state`.
        state: What it returned.
        weights: As for `own_state`.
    """
    now = own_state(roots, weights)
    for path, names in [*_holders(roots)]:
        for name in now.get(path, {}).keys() - state.get(path, {}).keys():
            del names[name]
    device = next((each.device for each in weights), None)
    add_state(roots, dict(_all_changes(state, now)), device)


@contextmanager
def own_state_kept(roots: Mapping[str, Any], weights: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Run a block, and let objects keep after it what they did before; see `own_state`."""
    before = own_state(roots, weights())
    try:
        yield
    finally:
        restore_state(roots, before, weights())


# -- the objects ---------------------------------------------------------------------------------------


def _holders(roots: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield the path and the names of each object that keeps something, of each one once."""
    seen: set[int] = set()
    waiting = [(path, root, 0) for path, root in reversed([*roots.items()])]
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value, depth = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for part, names, parts in _parts(value):
            if names is not None:
                yield path + part, names
            if depth < _DEPTH:
                waiting += [(f"{path}{part}.{name}", each, depth + 1) for name, each in reversed([*parts.items()])]


def _parts(value: Any) -> Iterator[tuple[str, MutableMapping[str, Any] | None, dict[str, Any]]]:
    """Yield what an object keeps, and the objects that it leads to, by name."""
    if isinstance(value, nn.Module):
        for path, module in value.named_modules():
            names = _Attributes(module, _OF_EVERY_MODULE, is_librarys=_is_of_library(type(module).__module__))
            yield f"/{path}", names, _objects_in(names)
            yield f"/{path} buffers", module._buffers, {}
    elif isinstance(value, Optimizer):
        names = _Attributes(value, _OF_EVERY_OPTIMIZER)
        hooks = [hook for hooks in hooks_of(value) for hook in hooks.values() if not is_amplabs(hook)]
        yield "", names, {**_objects_in(names), **{f"hook {place}": hook for place, hook in enumerate(hooks)}}
    elif isinstance(value, DataLoader):
        yield "", _Attributes(value, _OF_EVERY_LOADER), {name: vars(value)[name] for name in _OF_LOADER}
    elif isinstance(value, FunctionType):
        cells = _Cells(value)
        yield "", cells, _objects_in(cells)
    elif isinstance(value, MethodType):
        yield "", None, {"self": value.__self__}
    elif isinstance(value, partial):
        yield "", None, _objects_in({"func": value.func, "args": value.args, "keywords": value.keywords})
    elif isinstance(value, list | tuple | dict):
        yield "", None, _objects_in(dict(value if isinstance(value, dict) else enumerate(value)))
    elif _is_ones_own(value) and not _has(value, _THREADS + _LOCKS):  # which a thread changes meanwhile
        names = _Attributes(value)
        yield "", names, _objects_in(names)


def _objects_in(names: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): each for name, each in names.items() if _may_keep(each)}


def _may_keep(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        values = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ELEMENTS and any(map(_may_keep_itself, values))
    return _may_keep_itself(value)


def _may_keep_itself(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial | DataLoader) or _is_ones_own(value)


def _is_ones_own(value: Any) -> bool:
    """Whether it is an object of a class that is no library's, or of torch's that read data."""
    if isinstance(value, (type, ModuleType, Tensor, nn.Module, Optimizer, LRScheduler, *GENERATORS, *_LIVE)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_of_library(type(value).__module__)


def _has(value: Any, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(each, kinds) for each in vars(value).values())


@functools.cache
def _is_of_library(name: str) -> bool:
    if name.startswith("torch.utils.data"):
        return False
    library = name.partition(".")[0]
    file = str(getattr(sys.modules.get(library), "__file__", None) or "")
    return library == "amplab" or library in sys.stdlib_module_names - {"__main__"} or "-packages" in file


class _Attributes(MutableMapping[str, Any]):
    """The attributes of an object, without those of every object of its kind; of one of a library the public ones."""

    def __init__(self, owner: Any, without: frozenset[str] = frozenset(), *, is_librarys: bool = False) -> None:
        self._owner, self._without, self._hidden = vars(owner), without, "_" if is_librarys else "__"

    def __getitem__(self, name: str) -> Any:
        return self._owner[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._without:
            self._owner[name] = value

    def __delitem__(self, name: str) -> None:
        del self._owner[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._owner) if name not in self._without and not name.startswith(self._hidden))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(MutableMapping[str, Any]):
    """The variables that a function shares with the function around it."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it has no value yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if self.get(name, _NO) is not _NO)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# -- the values ----------------------------------------------------------------------------------------

_NO = object()


class _Object(NamedTuple):
    """What stands for a value that is not kept: it says only whether another one is there."""

    kind: type
    number: int


def _is_object(value: Any) -> bool:
    return isinstance(value, _Object)


class _NotKept(Exception):
    """Of a value that has no form in a checkpoint."""


class _PassesBy(_NotKept):
    """Of one that says nothing about the run: a weight, a result with its graph, an iterator."""


class _Encoder:
    """Copies values into the form of a checkpoint, up to `MOST_BYTES` in all."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights, self._left = {id(each) for each in weights}, MOST_BYTES

    def values(self, names: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in names.items():
            try:
                found[name] = self.encoded(value)
            except _PassesBy:
                continue
            except _NotKept:
                found[name] = _Object(type(value), 0 if isinstance(value, Tensor | np.ndarray) else id(value))
        return found

    def encoded(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return {_KIND: kind.__name__, "value": self._of_array(np.asarray(value))}
        is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        if is_iterator or _may_keep(value) or isinstance(value, FunctionType | MethodType):
            raise _PassesBy  # what has something to keep does so by itself
        if kind not in _CONTAINERS:
            raise _NotKept
        if isinstance(value, dict):
            pairs = [(self.encoded(name), self.encoded(each)) for name, each in self._few(value).items()]
            return {_KIND: kind.__name__, "value": pairs}
        each = list(value) if _are_scalars(value) else [self.encoded(one) for one in self._few(value)]
        return each if kind is list else {_KIND: kind.__name__, "value": each}

    def _of_tensor(self, value: Tensor) -> Tensor:
        if id(value) in self._weights or isinstance(value, nn.Parameter) or value.grad_fn is not None:
            raise _PassesBy
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            raise _NotKept
        self._take(value.nbytes)
        return value.detach().clone()

    def _of_array(self, value: np.ndarray[Any, Any]) -> Tensor:
        self._take(value.nbytes)
        try:
            return torch.from_numpy(value.copy())
        except TypeError:  # such as text
            raise _NotKept from None

    def _take(self, nbytes: int) -> None:
        if nbytes > min(self._left, MOST_BYTES // 4):
            raise _NotKept
        self._left -= nbytes

    def _few(self, value: Any) -> Any:
        if len(value) > _MOST_ELEMENTS:
            raise _NotKept
        return value


def _are_scalars(values: Any) -> bool:
    return all(kind in _SCALARS for kind in set(map(type, values)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return is_like and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and (_quick(one, other) or all(map(_same, one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[name]) for name, each in one.items())
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _quick(one: Any, other: Any) -> bool:
    """Whether two lists without tensors are equal; of others it is not known."""
    return _are_scalars(one) and _are_scalars(other) and bool(one == other)


_MADE: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (tuple, dict, set, frozenset, deque, OrderedDict, Counter)
}


def _decoded(value: Any, device: torch.device | None) -> Any:
    """Return the value of its encoding."""
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_decoded(each, device) for each in value)
    if not isinstance(value, dict):
        return value
    kind, content = value.get(_KIND), value.get("value")
    if isinstance(content, Tensor):
        array = content.numpy().copy()
        return array if kind == "ndarray" else array[()]
    pairs = _decoded(content, device)
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return _MADE.get(str(kind), dict)(dict(pairs))
    return _MADE.get(str(kind), list)(pairs)


def _set_into(own: Any, value: Any) -> Any:
    """Write a value into the object that is there, which others may share; return what is to be there."""
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        if own.shape == value.shape and own.dtype == value.dtype and not own.requires_grad:
            return own.copy_(value)
        return value.to(own.device)
    if isinstance(own, np.ndarray) and isinstance(value, np.ndarray):
        if own.shape == value.shape and own.dtype == value.dtype and own.flags.writeable:
            own[...] = value
            return own
    elif isinstance(own, list) and isinstance(value, list):
        own[:] = value
        return own
    elif (isinstance(own, dict) and isinstance(value, dict)) or (isinstance(own, set) and isinstance(value, set)):
        own.clear()
        own.update(value)
        return own
    elif isinstance(own, deque) and isinstance(value, deque):
        own.clear()
        own.extend(value)
        return own
    return value


# -- copies --------------------------------------------------------------------------------------------


def own_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy of an object and of those of one's own that it leads to, with lists and arrays of their own.

    Shared are tensors, functions, objects of libraries, and an object that cannot be copied, that has a thread, a lock
    or a file, or whose class says what its end does: that could close a file of both.
    """
    if memo is None:
        return _copy_of_object(value, {})
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, np.ndarray):
        one: Any = value.copy() if value.nbytes <= MOST_BYTES // 4 else value
    elif type(value) in _CONTAINERS:
        one = _copy_of_container(value, memo)
    elif _is_ones_own(value) or isinstance(value, DataLoader):
        return _copy_of_object(value, memo)
    else:
        return value
    memo[id(value)] = value, one  # the first keeps its id from being that of another
    return one


def _copy_of_container(value: Any, memo: dict[int, Any]) -> Any:
    if len(value) > _MOST_ELEMENTS:
        return copy.copy(value)
    if isinstance(value, dict):
        one = copy.copy(value)
        one.update({name: own_copy(each, memo) for name, each in value.items()})
        return one
    if type(value) is deque:
        return deque((own_copy(each, memo) for each in value), value.maxlen)
    return type(value)(own_copy(each, memo) for each in value)


def _copy_of_object(value: Any, memo: dict[int, Any]) -> Any:
    memo[id(value)] = value, value
    if hasattr(value, "__del__"):
        return value
    try:
        one = copy.copy(value)
    except Exception as refusal:
        if is_interrupt(refusal):
            raise
        return value
    parts = getattr(one, "__dict__", {})  # a loader lets no one set its parts
    if one is value or _has(value, _LIVE):
        return one
    memo[id(value)] = value, one
    for name in _OF_LOADER if isinstance(value, DataLoader) else [*parts]:
        parts[name] = own_copy(parts[name], memo)
    return one
