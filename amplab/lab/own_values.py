"""The form in which a checkpoint holds what an object of one's own keeps: numbers, text, tensors, arrays, containers.

`Encoder` makes that form, `Decoder` the value again. An `UnkeptValue` stands for one that has none. Tensors and arrays
of which one is a view of the other share memory in that form, and again in the values.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from amplab.amp.run_state.file_format import is_loadable
from amplab.policies.signals import is_interrupt
from amplab.trace.random_states import GENERATORS, state_of

__all__ = [
    "GONE",
    "READERS",
    "SCALARS",
    "Decoder",
    "Encoder",
    "UnkeptValue",
    "has_tensors",
    "is_gone",
    "is_unkept",
    "same",
    "storage_of",
    "shared_in",
]

SCALARS = (bool, int, float, str, type(None))
READERS = (DataLoader, Dataset, Sampler)

_MOST_BYTES = 2**26  # of tensors and arrays together; what is beyond is data rather than state
_MOST_BYTES_COMPARED = 2**20  # of a tensor that is not kept; another one counts as changed when it is written to
_MOST_ELEMENTS = 1_000  # of a container, unless all are numbers or text
_DEPTH = 16  # of containers; a dict counts twice, for its pairs
_KIND = "amplab.kind"  # marks what a checkpoint has no type of its own for
_WEIGHT = "weight"  # a kind, whose value is a place among the weights
_PARAMETER = "Parameter"  # whose value is that of the tensor, and `requires_grad`
_GONE = "gone"  # of a name that stands for nothing any more
_MADE: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict)
}


class UnkeptValue(NamedTuple):
    """What stands for a value that is not kept: it says only whether another one is there."""

    kind: type
    number: Any


GONE: dict[str, Any] = {_KIND: _GONE, "value": None}
"""The encoding of what a name stands for that is not there any more."""


def is_gone(value: Any) -> bool:
    """Whether a value is `GONE`."""
    return isinstance(value, dict) and value.get(_KIND) == _GONE


def is_unkept(value: Any) -> bool:
    """Whether an `UnkeptValue` stands for a value."""
    return isinstance(value, UnkeptValue)


PASSES_BY = UnkeptValue(type(None), None)
"""Stands for a value that says nothing about the run, or is kept in another way."""


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


class Encoder:
    """Copies values into the form of a checkpoint, up to `_MOST_BYTES` in all."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {id(each): place for place, each in reversed([*enumerate(weights)])}
        self._storages, self._left = {*map(storage_of, weights)} - {0}, _MOST_BYTES
        self._copied: list[tuple[Tensor, Tensor]] = []  # what is kept, and its copy
        self._encodings: dict[int, tuple[Any, Any]] = {}  # by the id of a value: that, and its encoding

    def values(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values by name."""
        found = {}
        for name in names:
            try:
                found[name] = self._loadable(names[name])
            except _PassesBy:
                found[name] = PASSES_BY
            except _SharesWeights:
                found[name] = UnkeptValue(type(names[name]), _SharesWeights)
            except Exception as refusal:  # of a strange object, or one that a thread changes meanwhile
                if is_interrupt(refusal):
                    raise
                found[name] = UnkeptValue(type(names.get(name)), self._number_of(names.get(name)))
        return found

    def _loadable(self, value: Any) -> Any:
        encoded = self._encoded(value, 0)
        if not is_loadable(encoded):
            raise _NotKept
        return encoded

    def _encoded(self, value: Any, depth: int) -> Any:
        """Return the encoding of a value, of one and the same always the same: names may stand for one object."""
        if type(value) in SCALARS:
            return value
        if id(value) not in self._encodings:
            self._encodings[id(value)] = value, self._encode(value, depth)
        return self._encodings[id(value)][1]

    def _encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._of_tensor(value, depth)
        if isinstance(value, np.ndarray | np.generic):
            return {_KIND: kind.__name__, "value": self._of_array(np.asarray(value))}
        if isinstance(value, (FunctionType, MethodType, Optimizer, nn.Module, *READERS)) or hasattr(kind, "__next__"):
            raise _NotKept if depth else _PassesBy
        if (kind is not list and kind.__name__ not in _MADE) or kind.__module__ not in ("builtins", "collections"):
            raise _NotKept
        if depth == _DEPTH or (len(value) > _MOST_ELEMENTS and not _are_scalars(value)):
            raise _NotKept
        if kind is defaultdict and depth:
            raise _NotKept  # its function would be lost
        items = [*value.items()] if isinstance(value, dict) else [*value]
        each = items if _are_scalars(items) else [self._encoded(one, depth + 1) for one in items]
        if kind is list:
            return each
        bound = {"maxlen": value.maxlen} if kind is deque else {}
        return {_KIND: kind.__name__, "value": each, **bound}

    def _of_tensor(self, value: Tensor, depth: int) -> Any:
        if depth and id(value) in self._weights:
            return {_KIND: _WEIGHT, "value": self._weights[id(value)]}
        if id(value) in self._weights:
            raise _PassesBy
        if storage_of(value) in self._storages:
            raise _NotKept if depth else _SharesWeights
        if type(value) is nn.Parameter:  # of no module
            encoded = self._of_tensor(value.detach(), depth)
            return {_KIND: _PARAMETER, "value": [encoded, value.requires_grad]}
        is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
        if not is_plain or (value.requires_grad and value.grad_fn is None):
            raise _NotKept
        if value.nbytes > min(self._left, _MOST_BYTES // 4) and value.grad_fn is not None:
            raise _NotKept if depth else _PassesBy  # a result that is kept for its graph, or to be looked at
        self._take(value.nbytes)
        return self._copy(value.detach(), value.detach().clone())

    def _of_array(self, value: np.ndarray[Any, Any]) -> Tensor:
        self._take(value.nbytes)
        copy = torch.from_numpy(value.copy(order="K"))  # raises for text, objects, and numbers of other byte orders
        is_simple = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return self._copy(torch.from_numpy(value), copy) if is_simple else copy

    def _copy(self, value: Tensor, copy: Tensor) -> Tensor:
        self._copied.append((value, copy))
        return copy

    def share(self) -> None:
        """Let the copies share memory where what they are copies of does."""
        begin, end, group = 0, 0, list[tuple[Tensor, Tensor]]()
        for value, copy in sorted(self._copied, key=lambda pair: (str(pair[0].device), pair[0].data_ptr())):
            if value.numel() == 0:
                continue
            start, stop = value.data_ptr(), value.data_ptr() + len(_bytes_of(value))
            if group and group[0][0].device == value.device and begin <= start < end:
                group, end = [*group, (value, copy)], max(end, stop)
                continue
            _share(group, begin, end)
            group, begin, end = [(value, copy)], start, stop
        _share(group, begin, end)

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
            if isinstance(value, bytearray | array):
                return zlib.crc32(value)
            if isinstance(value, GENERATORS):
                return zlib.crc32(state_of(value))
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
        return repr(value) if type(value) in SCALARS else self._number_of(value, depth)

    def _number_of_tensor(self, value: Tensor) -> Any:
        if storage_of(value) in self._storages:  # a weight, or what its code makes of one
            return storage_of(value), value.storage_offset(), value.shape
        if value.nbytes <= _MOST_BYTES_COMPARED and value.layout is torch.strided and value.device.type == "cpu":
            return zlib.crc32(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return id(value), None if value.is_inference() else value._version


def _bytes_of(value: Tensor) -> Tensor:
    """Return the memory from the first element of a tensor to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    begin, number = value.storage_offset() * value.element_size(), (last + 1) * value.element_size()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage(), begin, (number,), (1,))


def _share(group: Sequence[tuple[Tensor, Tensor]], begin: int, end: int) -> None:
    """Let copies be in one memory, at the places that the others have between two addresses."""
    is_aligned = all((value.data_ptr() - begin) % value.element_size() == 0 for value, _ in group)
    if len(group) < 2 or end - begin > _MOST_BYTES // 4 or not is_aligned:
        return
    memory = torch.zeros(end - begin, dtype=torch.uint8, device=group[0][0].device)
    for value, copy in group:
        place, content = value.data_ptr() - begin, _bytes_of(value)
        memory[place : place + len(content)] = content
        copy.set_(memory.untyped_storage(), place // value.element_size(), value.shape, value.stride())


def shared_in(encoding: Any) -> set[int]:
    """Return what an encoding may share with others: where the memory of its tensors begins, ids of its containers."""
    if isinstance(encoding, Tensor):
        return {storage_of(encoding)} - {0}
    if not isinstance(encoding, list | dict) or encoding is GONE:
        return set()
    items = encoding.values() if isinstance(encoding, dict) else encoding
    return {id(encoding)}.union(*(() if _are_scalars(items) else map(shared_in, items)))


def has_tensors(encoding: Any) -> bool:
    """Whether there are tensors or arrays in an encoding."""
    if not isinstance(encoding, list | tuple | dict) or is_unkept(encoding):
        return isinstance(encoding, Tensor)
    items = encoding.values() if isinstance(encoding, dict) else encoding
    return not _are_scalars(items) and any(map(has_tensors, items))


def _are_scalars(values: Any) -> bool:
    return all(kind in SCALARS for kind in set(map(type, values)))


def same(one: Any, other: Any) -> bool:
    """Whether two encoded values are equal, NaN to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return is_like and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if is_unkept(one):
        return bool(one == other)
    if isinstance(one, list | tuple):
        is_quick = len(one) == len(other) and _are_scalars(one) and _are_scalars(other) and one == other
        return is_quick or (len(one) == len(other) and all(map(same, one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[name]) for name, each in one.items())
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


class Decoder:
    """Makes values of their encodings.

    Args:
        device: Where tensors belong; None for that of the encoding.
        weights: As for `Encoder`.
    """

    def __init__(self, device: torch.device | None, weights: Sequence[Tensor]) -> None:
        self._device, self._weights = device, weights
        self._memory: dict[int, UntypedStorage] = {}  # by the address of the one that it is a copy of
        self._made: dict[int, tuple[Any, Any]] = {}  # by the id of an encoding: that, and the value

    def value(self, encoding: Any) -> Any:
        """Return the value of an encoding, of one and the same always the same."""
        if not isinstance(encoding, list | tuple | dict | Tensor):
            return encoding
        if id(encoding) not in self._made:
            self._made[id(encoding)] = encoding, self._make(encoding)
        return self._made[id(encoding)][1]

    def _make(self, encoding: Any) -> Any:
        if isinstance(encoding, Tensor):
            return self._copy(encoding, self._device or encoding.device)
        if isinstance(encoding, list | tuple):
            return type(encoding)(map(self.value, encoding))
        kind, content = encoding[_KIND], encoding["value"]
        if isinstance(content, Tensor):
            array = self._copy(content, content.device).numpy()
            return array if kind == "ndarray" else array[()]
        if kind == _WEIGHT:
            return self._weights[content]
        if kind == _PARAMETER:
            tensor, requires_grad = content
            return nn.Parameter(self.value(tensor), bool(requires_grad))
        made, items = _MADE[kind], self.value(content)
        if made is deque:
            return deque(items, encoding.get("maxlen"))
        if made is defaultdict:
            return defaultdict(None, items)
        return made(dict(items)) if issubclass(made, dict) else made(items)  # type: ignore[arg-type]

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy a tensor, with the memory that others share with it."""
        place, memory = tensor.storage_offset(), tensor.untyped_storage()
        if memory.nbytes() == 0:
            return tensor.to(device, copy=True)
        if memory.data_ptr() not in self._memory:
            self._memory[memory.data_ptr()] = memory.clone().to(device=device)
        like = torch.empty(0, dtype=tensor.dtype, device=device)
        return like.set_(self._memory[memory.data_ptr()], place, tensor.shape, tensor.stride())
