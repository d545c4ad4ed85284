"""What objects of one's own keep besides weights: numbers, text, tensors and lists in their attributes.

A sampler counts its epochs, an optimizer its steps, a model its calls. A run that goes on in another process builds the
objects anew; what had changed in them since they were built is in its checkpoint.

    own_state(roots)           what they keep now, by where it is
    changes(state, before)     what is other than before; `lost_changes` names the objects of which that is not known
    add_state(roots, changes)  set it, in another process
    holders(roots)             the objects, with the names under which they keep values

Looked at are the modules of a model or a loss, optimizers, the hooks of both, the variables that a function shares with
the one around it, and data with their samplers and datasets. What these lead to otherwise may belong to others: it is
neither read nor changed. A value is set by a new one in its place, never written into.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from amplab.amp.apex.before_initialize import hooks_of
from amplab.amp.apex.optimizer_names import LENT_NAMES
from amplab.amp.run_state.file_format import RunStateError, is_loadable
from amplab.policies.signals import is_interrupt
from amplab.trace.as_found import rebind
from amplab.trace.optimizer_hooks import is_amplabs
from amplab.trace.untouched import WRAPPERS

__all__ = [
    "Names",
    "State",
    "add_state",
    "changes",
    "holders",
    "in_another_session",
    "lost_changes",
    "own_state",
    "storage_of",
]

_MOST_BYTES = 2**26  # of tensors and arrays together; what is beyond is data rather than state
_MOST_BYTES_COMPARED = 2**20  # of a tensor that is not kept; another one counts as changed when it is written to
_MOST_ELEMENTS = 1_000  # of a container, unless all are numbers or text
_DEPTH = 16  # of containers; a dict counts twice, for its pairs
_SCALARS = (bool, int, float, str, type(None))
_KIND = "amplab.kind"  # marks what a checkpoint has no type of its own for
_WEIGHT = "weight"  # a kind, whose value is a place among the weights
_MADE: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict)
}
_READERS = (DataLoader, Dataset, Sampler)

_HOOKS_OF_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_LOADER = ("dataset", "sampler", "batch_sampler")
_OF_EVERY_LOADER = frozenset(vars(DataLoader(TensorDataset())))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

State = dict[str, dict[str, Any]]
"""Values by name, by the path of the object that has them."""


def own_state(roots: Mapping[str, Any], weights: Sequence[Tensor] = ()) -> State:
    """Return copies of what objects keep now, in a form that a checkpoint can hold.

    Args:
        roots: Objects and functions by name.
        weights: Tensors that are kept in another way, as is what shares memory with them.

    >>> class Order:
    ...     epoch = 0
    >>> one = Order()
    >>> one.epoch, one.order = 3, [2, 0, 1]
    >>> own_state({"data": one})
    {'data': {'epoch': 3, 'order': [2, 0, 1]}}
    """
    encode = _Encoder(weights)
    state = {path: {**encode.values(names), **_steps_within(names)} for path, names in holders(roots)}
    return {path: values for path, values in state.items() if values}


def changes(state: State, before: State) -> State:
    """Return the values of `state` that are not those of `before`, of objects all of whose changes can be kept.

    An object that has opened a file and notes that it has must not find the note alone.
    """
    return {path: values for path, values in _all_changes(state, before) if not any(map(_is_object, values.values()))}


def lost_changes(state: State, before: State) -> list[str]:
    """Return the paths of the objects whose changes `changes` leaves out."""
    return [path for path, values in _all_changes(state, before) if any(map(_is_object, values.values()))]


def add_state(
    roots: Mapping[str, Any], state: State, device: torch.device | None = None, weights: Sequence[Tensor] = ()
) -> list[str]:
    """Set what `changes` returned; return the paths of objects that are not there, or use a name for something else.

    Args:
        roots: As for `own_state`.
        state: The values, as they were read from a file.
        device: Where tensors belong; None for the CPU.
        weights: As for `own_state`; lists and dicts may name them.

    Raises:
        RunStateError: A value that `own_state` does not return.
    """
    found = dict(holders(roots))
    missing = [path for path in state if path not in found]
    shared: dict[int, tuple[Any, Any, Any]] = {}  # by the object that it replaces: that, the encoding, the value
    for path, names in found.items():
        for name, encoded in state.get(path, {}).items():
            old, known, value = shared.get(id(names.get(name)), (None, None, None))
            if old is None or not _same(encoded, known):  # else two names stand for one object, as before
                old, value = names.get(name), _value_of(encoded, device, weights, f"{path}.{name}")
                if isinstance(value, defaultdict):  # whose function is no value
                    value.default_factory = getattr(old, "default_factory", None)
                if not isinstance(old, _SCALARS):
                    shared.setdefault(id(old), (old, encoded, value))
            if names.takes(name, value):
                names.set(name, value)
            elif path not in missing:
                missing.append(path)
    return missing


def _value_of(encoded: Any, device: torch.device | None, weights: Sequence[Tensor], where: str) -> Any:
    try:
        return _decoded(encoded, device, weights)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise RunStateError(f"{where}: expected a value of an attribute ({error}).") from error


def in_another_session(state: State, now: State) -> State:
    """Return `state` with the objects of now for those that are not kept: a session has replaced weights."""
    return {
        path: {
            name: now[path][name] if _is_object(value) and name in now.get(path, {}) else value
            for name, value in values.items()
        }
        for path, values in state.items()
    }


def _all_changes(state: State, before: State) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, values in state.items():
        old = before.get(path, {})
        new = {name: value for name, value in values.items() if not _same(value, old.get(name, _NO))}
        if new:
            yield path, new


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the names that torch and amplab use; the first optimizer of a process loads torch's compiler."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros(1)])), *LENT_NAMES))


# -- the objects ---------------------------------------------------------------------------------------


class Names(Mapping[str, Any]):
    """The names under which an object keeps values."""

    def __init__(self, owner: Any, names: dict[str, Any], without: frozenset[str] = frozenset()) -> None:
        self._owner, self._names, self._without = owner, names, without

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
        owner, is_new = self._owner, name not in self._names
        hidden = name.startswith("__") or name in self._without or callable(getattr(type(owner), name, None))
        if isinstance(owner, nn.Module):
            hidden = hidden or any(name in each for each in (owner._parameters, owner._buffers, owner._modules))
        return not hidden and (is_new or _may_follow(self._names[name], value))

    def restorer(self) -> Callable[[], None]:
        """Return a function that lets every name stand for what it stands for now."""
        if type(self._owner).__module__.startswith(WRAPPERS):
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
        return cell.cell_contents is not _NO
    except ValueError:
        return False


def _may_follow(own: Any, value: Any) -> bool:
    """Whether a value may follow another one in an attribute: a run has replaced it so, by the same code."""
    if isinstance(value, defaultdict):
        return isinstance(own, defaultdict)
    if isinstance(own, str) is not isinstance(value, str) and None not in (own, value):
        return False
    return not callable(own) and not isinstance(own, (nn.Parameter, Optimizer, *_READERS))


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
            waiting += [(f"{path}.{name}", part) for name, part in parts if issubclass(type(part), _READERS)]
            waiting += [reader for name, part in parts for reader in _readers_in(f"{path}.{name}", part)]


def _hooks(path: str, owner: nn.Module | Optimizer) -> list[tuple[str, Any]]:
    """Return the hooks of one's own that run in a step."""
    found = hooks_of(owner) if isinstance(owner, Optimizer) else [getattr(owner, name) for name in _HOOKS_OF_MODULE]
    hooks = [hook for hooks in found for hook in hooks.values() if not is_amplabs(hook)]
    return [(f"{path} hook {place}", hook) for place, hook in enumerate(hooks)]


def _readers_in(path: str, parts: Any) -> list[tuple[str, Any]]:
    """Return the datasets and samplers in a list, a tuple or a dict, as ConcatDataset has one."""
    if type(parts) not in (list, tuple, dict) or len(parts) > _MOST_ELEMENTS:
        return []
    named = [*parts.items()] if isinstance(parts, dict) else [*enumerate(parts)]
    return [(f"{path}[{name!r}]", part) for name, part in named if issubclass(type(part), _READERS)]


def _steps_within(names: Names) -> dict[str, Any]:
    """Return what tells that the optimizers and schedules which an optimizer has in its attributes have made steps."""
    if not isinstance(names._owner, Optimizer):
        return {}
    found = {}
    for name in names:
        values = names[name] if type(names[name]) in (list, tuple) else [names[name]]
        inner = [each for each in values if isinstance(each, Optimizer | LRScheduler)]
        if inner:
            found[name] = _Object(type(inner[0]), [*map(_steps_of, inner)])
    return found


def _steps_of(inner: Optimizer | LRScheduler) -> Any:
    if isinstance(inner, LRScheduler):
        return repr([each for each in vars(inner).items() if type(each[1]) in _SCALARS])
    return [
        each._version if isinstance(each, Tensor) and not each.is_inference() else repr(each)
        for state in inner.state.values()
        for each in (state.values() if isinstance(state, dict) else [state])
    ]


# -- the values ----------------------------------------------------------------------------------------

_NO = object()


class _Object(NamedTuple):
    """What stands for a value that is not kept: it says only whether another one is there."""

    kind: type
    number: Any


def _is_object(value: Any) -> bool:
    return isinstance(value, _Object)


class _NotKept(Exception):
    """Of a value that has no form in a checkpoint."""


class _PassesBy(Exception):
    """Of one that says nothing about the run, or is looked at by itself."""


class _SharesWeights(Exception):
    """Of one that has the memory of a weight: it is what its code makes it."""


def storage_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 without any."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # as of a sparse tensor, or of a subclass
        return 0


class _Encoder:
    """Copies values into the form of a checkpoint, up to `_MOST_BYTES` in all."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {id(each): place for place, each in reversed([*enumerate(weights)])}
        self._storages, self._left = {*map(storage_of, weights)} - {0}, _MOST_BYTES

    def values(self, names: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name in names:
            try:
                found[name] = self._loadable(names[name])
            except _PassesBy:
                continue
            except _SharesWeights:
                found[name] = _Object(type(names[name]), _SharesWeights)
            except Exception as refusal:  # of a strange object, or one that a thread changes meanwhile
                if is_interrupt(refusal):
                    raise
                found[name] = _Object(type(names.get(name)), self._number_of(names.get(name)))
        return found

    def _loadable(self, value: Any) -> Any:
        encoded = self._encoded(value, 0)
        if not is_loadable(encoded):
            raise _NotKept
        return encoded

    def _encoded(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value, depth)
        if isinstance(value, np.ndarray | np.generic):
            return {_KIND: kind.__name__, "value": self._of_array(np.asarray(value))}
        if isinstance(value, (FunctionType, MethodType, Optimizer, nn.Module, *_READERS)) or hasattr(kind, "__next__"):
            raise _NotKept if depth else _PassesBy
        if (kind is not list and kind.__name__ not in _MADE) or kind.__module__ not in ("builtins", "collections"):
            raise _NotKept
        if depth == _DEPTH or (len(value) > _MOST_ELEMENTS and not _are_scalars(value)):
            raise _NotKept
        items = [*value.items()] if isinstance(value, dict) else [*value]
        if kind is defaultdict and depth:
            raise _NotKept  # its function would be lost
        each = items if _are_scalars(items) else [self._encoded(one, depth + 1) for one in items]
        if kind is list:
            return each
        bound = {"maxlen": value.maxlen} if kind is deque else {}
        return {_KIND: kind.__name__, "value": each, **bound}

    def _of_tensor(self, value: Tensor, depth: int) -> Any:
        if depth and id(value) in self._weights:
            return {_KIND: _WEIGHT, "value": self._weights[id(value)]}
        if id(value) in self._weights or isinstance(value, nn.Parameter):
            raise _NotKept if depth else _PassesBy
        if storage_of(value) in self._storages:
            raise _NotKept if depth else _SharesWeights
        is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
        if not is_plain or (value.requires_grad and value.grad_fn is None):
            raise _NotKept
        if value.nbytes > min(self._left, _MOST_BYTES // 4) and value.grad_fn is not None:
            raise _NotKept if depth else _PassesBy  # a result that is kept for its graph, or to be looked at
        self._take(value.nbytes)
        return value.detach().clone()

    def _of_array(self, value: np.ndarray[Any, Any]) -> Tensor:
        self._take(value.nbytes)
        return torch.from_numpy(value.copy())  # raises for text, objects, and numbers of other byte orders

    def _take(self, nbytes: int) -> None:
        if nbytes > min(self._left, _MOST_BYTES // 4):
            raise _NotKept
        self._left -= nbytes

    def _number_of(self, value: Any, depth: int = 0) -> Any:
        """Return what is another number once a value that is not kept has changed, as far as that can be seen."""
        try:
            if isinstance(value, Tensor):
                return self._number_of_tensor(value)
            if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES // 4 and not value.dtype.hasobject:
                return zlib.crc32(value.tobytes())
            if isinstance(value, nn.Module) and depth:  # in a list, where its owner does not find it
                return id(value), *map(self._number_of_tensor, (*value.parameters(), *value.buffers()))
            if isinstance(value, list | tuple | deque | set | frozenset | dict) and depth < _DEPTH:
                items = [*value.items()] if isinstance(value, dict) else [*value]
                return hash(tuple(self._number_of_item(each, depth + 1) for each in items))
        except Exception as refusal:
            if is_interrupt(refusal):
                raise
        return id(value)

    def _number_of_item(self, value: Any, depth: int) -> Any:
        return repr(value) if type(value) in _SCALARS else self._number_of(value, depth)

    def _number_of_tensor(self, value: Tensor) -> Any:
        if storage_of(value) in self._storages:  # a weight, or what its code makes of one
            return storage_of(value), value.storage_offset(), value.shape
        if value.nbytes <= _MOST_BYTES_COMPARED and value.layout is torch.strided and value.device.type == "cpu":
            return zlib.crc32(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return id(value), None if value.is_inference() else value._version


def _are_scalars(values: Any) -> bool:
    return all(kind in _SCALARS for kind in set(map(type, values)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return is_like and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if _is_object(one):
        return bool(one == other)
    if isinstance(one, list | tuple):
        is_quick = len(one) == len(other) and _are_scalars(one) and _are_scalars(other) and one == other
        return is_quick or (len(one) == len(other) and all(map(_same, one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[name]) for name, each in one.items())
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def _decoded(value: Any, device: torch.device | None, weights: Sequence[Tensor]) -> Any:
    """Return the value of its encoding."""
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_decoded(each, device, weights) for each in value)
    if not isinstance(value, dict):
        return value
    kind, content = value[_KIND], value["value"]
    if isinstance(content, Tensor):
        array = content.numpy().copy()
        return array if kind == "ndarray" else array[()]
    if kind == _WEIGHT:
        return weights[content]
    made, items = _MADE[kind], _decoded(content, device, weights)
    if made is deque:
        return deque(items, value.get("maxlen"))
    if made is defaultdict:
        return defaultdict(None, items)
    return made(dict(items)) if issubclass(made, dict) else made(items)  # type: ignore[arg-type]
