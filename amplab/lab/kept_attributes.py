"""What a model, losses and functions of one's own keep, as it was before a look at a step, or a step that has raised.

A forward may count its calls, or append to a list. A look runs the forward that a later step runs again, and leaves no
trace in them; nor does a step that is taken back. After a step that runs again in a watch, that holds for all to which
the names in its code lead, such as a class of one's own; see `own_code`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from amplab.lab.own_objects import Names, holders
from amplab.lab.own_values import storage_of
from amplab.trace.random_states import GENERATORS, restorers, state_of
from amplab.trace.tensor_copies import TensorCopy

__all__ = ["KeptAttributes"]

_MOST_BYTES, _MOST_BYTES_OF_STEP = 2**28, 2**20  # of tensors and arrays
_MOST_ELEMENTS, _MOST_ELEMENTS_OF_STEP = 4_000_000, 20_000  # of containers; of longer lists, appends are taken back
_OF_A_TENSOR = 20  # elements, by the time that it takes
_DEPTH = 16
_CPU = torch.device("cpu")
_BOUND = BuiltinMethodType, MethodType


class KeptAttributes:
    """Names, the contents of lists, dicts, sets and deques, tensors, arrays and random generators, as they are now.

    Args:
        roots: Objects and functions by name; see `own_objects.holders`.
        weights: Returns tensors that are kept in another way, as is what shares memory with them.
        followed: More of them; see `own_objects.holders`.
        is_of_step: Whether it is made before each step, and may take little time: up to 1 MiB of tensors and arrays and
            20,000 elements are kept, otherwise 256 MiB and four million.

    Attributes:
        changed: The objects in which `look` or `restore` has found a change, by id and kind.
        unkept: What is not kept and may change unseen, in words; "" if there is nothing.

    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.calls, self.log, self.peak = 0, [], torch.zeros(2)
    >>> model = Model()
    >>> kept = KeptAttributes({"model": model})
    >>> model.calls += 1
    >>> model.log.append(0.5)
    >>> _ = model.peak.add_(1)
    >>> kept.restore(), model.calls, model.log, model.peak.tolist()
    (True, 0, [], [0.0, 0.0])
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        weights: Callable[[], Iterable[Tensor]] = tuple,
        *,
        followed: Mapping[str, Any] | None = None,
        is_of_step: bool = False,
    ) -> None:
        self._weights = weights
        self._storages: set[int] | None = None
        self._bytes_left = _MOST_BYTES_OF_STEP if is_of_step else _MOST_BYTES
        self._elements_left = _MOST_ELEMENTS_OF_STEP if is_of_step else _MOST_ELEMENTS
        self.unkept = ""
        self._seen: set[int] = set()
        self._parts: list[_Part] = []
        self.changed: dict[tuple[int, type[Names]], Names] = {}
        self._keep_all(names for _, names in holders(roots, followed))

    @classmethod
    def of(cls, owners: Iterable[Names], weights: Callable[[], Iterable[Tensor]] = tuple) -> KeptAttributes:
        """Return what some objects keep now, as `changed` has them, before a step."""
        kept = cls({}, weights, is_of_step=True)
        kept._keep_all(each.again() for each in owners)
        return kept

    def _keep_all(self, owners: Iterable[Names]) -> None:
        for names in owners:
            self._keep_names(names)

    def _is_weights(self, value: Tensor) -> bool:
        if self._storages is None:
            self._storages = {*map(storage_of, self._weights())}
        return storage_of(value) in self._storages

    @property
    def has_drawn(self) -> bool:
        """Whether code has drawn from a random generator of its own since then."""
        return any(part.is_of_generator and not part.is_same() for part in self._parts)

    @property
    def has_lost(self) -> bool:
        """Whether something has changed that was seen and not kept, as a large tensor."""
        return any(part.restore is None and not part.is_same() for part in self._parts)

    def look(self) -> None:
        """Note in `changed` what is not as it was."""
        for part in self._parts:
            self._is_same(part)

    def restore(self) -> bool:
        """Let everything be as it was; return False if something was not kept, and may have changed.

        Contents that are unchanged are not written.
        """
        is_all = not self.unkept
        for part in self._parts:
            is_same = self._is_same(part)
            if part.restore is None:
                is_all = is_all and is_same
            elif not is_same or part.is_of_names:  # whether a module is in training is none of the names
                is_all = part.restore() is not False and is_all
        return is_all

    def _is_same(self, part: _Part) -> bool:
        if is_same := part.is_same():
            return is_same
        self.changed[id(part.owner.owner), type(part.owner)] = part.owner
        return False

    def _keep_names(self, names: Names) -> None:
        before = dict(names)
        self._parts.append(_Part(names, partial(_has_names, names, before), names.restorer(), is_of_names=True))
        try:
            for value in before.values():
                if type(value) not in _PLAIN:
                    self._keep_contents(names, value)
        except RuntimeError:  # a thread of one's own changes one meanwhile, or a strange tensor has no copy
            self.unkept = self.unkept or f"an object of class {type(names.owner).__name__} that cannot be copied"

    def _keep_contents(self, names: Names, value: Any, depth: int = 0) -> None:
        kind = type(value)
        if kind in _BOUND and isinstance(value.__self__, GENERATORS):  # `draw = generator.random`
            value, kind = value.__self__, type(value.__self__)
        if id(value) in self._seen:
            return
        if kind is np.ndarray and value.dtype == object:
            self._seen.add(id(value))
            self._keep_objects(names, value, depth)
        elif issubclass(kind, np.ndarray) or _is_plain(kind):
            self._seen.add(id(value))
            self._keep_elements(names, value)
        elif issubclass(kind, GENERATORS):
            self._seen.add(id(value))
            if getattr(value, "device", _CPU) == _CPU:  # else it would wait for the device
                for restore in restorers((value,)):
                    is_same = partial(_has_state, value, state_of(value))
                    self._parts.append(_Part(names, is_same, restore, is_of_generator=True))
        elif (base := _base_of(kind)) is not None:
            self._seen.add(id(value))
            self._keep_container(names, value, base, depth)

    def _keep_container(self, names: Names, value: Any, base: Any, depth: int) -> None:
        number = base.__len__(value)
        is_kept = number <= self._elements_left and depth < _DEPTH
        if not is_kept:
            self.unkept = self.unkept or f"a {type(value).__name__} of {number:,} elements, {depth} levels deep"
            if base is list:
                self._parts.append(_Part(names, partial(_is_no_longer, value, number), partial(_cut, value, number)))
            return
        self._elements_left -= number
        before = _contents(base, value)
        if base is not tuple:
            is_same = partial(_has_contents, base, value, before)
            self._parts.append(_Part(names, is_same, partial(_restore_contents, base, value, before)))
        for each in [each for _, each in before] if issubclass(base, dict) else before:
            if type(each) not in _PLAIN:
                self._keep_contents(names, each, depth + 1)

    def _keep_objects(self, names: Names, value: Any, depth: int) -> None:
        if value.size > self._elements_left or depth == _DEPTH:
            self.unkept = self.unkept or f"an array of {value.size:,} objects, {depth} levels deep"
            return
        self._elements_left -= value.size
        before = value.copy()
        self._parts.append(_Part(names, partial(_has_objects, value, before), partial(_write_array, value, before)))
        for each in before.flat:
            if type(each) not in _PLAIN:
                self._keep_contents(names, each, depth + 1)

    def _keep_elements(self, names: Names, value: Any) -> None:
        is_array = isinstance(value, np.ndarray)
        if is_array and (value.dtype.hasobject or not value.flags.writeable):
            return
        if not is_array and (value.layout not in _LAYOUTS or value.is_meta or self._is_weights(value)):
            return
        nbytes, version = _nbytes(value), None if is_array else _version_of(value)
        if nbytes > self._bytes_left or self._elements_left < _OF_A_TENSOR:
            if version is None:
                self.unkept = self.unkept or f"{'an array' if is_array else 'a tensor'} of {nbytes / 2**20:.0f} MiB"
            else:
                self._parts.append(_Part(names, partial(_has_version, value, version), None))
            return
        self._bytes_left -= nbytes
        self._elements_left -= _OF_A_TENSOR
        if is_array:
            before = np.array(value, subok=False)
            self._parts.append(_Part(names, partial(_has_bytes, value, before), partial(_write_array, value, before)))
        else:
            with DisableTorchFunctionSubclass():
                copy = TensorCopy.of(value)
            self._parts.append(_Part(names, partial(_has_elements, copy, version), partial(_write_tensor, copy)))


class _Part(NamedTuple):
    """What is kept of a value, by the object that has it.

    Attributes:
        owner: The names of that object.
        is_same: Whether the value is as it was.
        restore: Lets it be, or returns False; None if that is not possible.
        is_of_names: Whether these are the names themselves.
        is_of_generator: Whether it is a random generator.
    """

    owner: Names
    is_same: Callable[[], bool]
    restore: Callable[[], object] | None
    is_of_names: bool = False
    is_of_generator: bool = False


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
# OrderedDict is first: dict's methods do not keep its order.
_BASES = OrderedDict, dict, list, set, deque, bytearray, array, tuple
_OF_BYTES = bytearray, array
_LAYOUTS = torch.strided, torch.sparse_coo


def _base_of(kind: type) -> Any:
    """Return the kind of container that a class is, also one of one's own, whose methods may do more; else None."""
    return next((base for base in _BASES if issubclass(kind, base)), None)


def _contents(base: Any, value: Any) -> list[Any]:
    if base is OrderedDict:  # whose `items` calls `__getitem__` of a class of one's own, which may move an entry
        return [(key, dict.__getitem__(value, key)) for key in base.__iter__(value)]
    return [*(base.items(value) if issubclass(base, dict) else base.__iter__(value))]


def _has_names(names: Names, before: dict[str, Any]) -> bool:
    now = dict(names.again())
    return now.keys() == before.keys() and all(now[name] is value for name, value in before.items())


def _has_contents(base: Any, value: Any, before: list[Any]) -> bool:
    if base.__len__(value) != len(before):
        return False
    if base is set:
        return all(base.__contains__(value, each) for each in before)
    pairs = zip(_contents(base, value), before, strict=True)
    if issubclass(base, dict):
        return all(key is other and one is each for (key, one), (other, each) in pairs)
    return all(one is other for one, other in pairs)


def _restore_contents(base: Any, value: Any, before: list[Any]) -> object:
    if base in _OF_BYTES:
        try:
            base.__setitem__(value, slice(None), base(value.typecode, before) if base is array else bytes(before))
        except BufferError:  # another size, of which something else has a view
            return False
        return None
    if base is list:
        list.__setitem__(value, slice(None), before)
    elif base is set:
        base.intersection_update(value, before)
        base.update(value, before)
    elif issubclass(base, dict):
        _restore_entries(base, value, before)
    elif base.__len__(value) == len(before):
        for place, each in enumerate(before):
            base.__setitem__(value, place, each)
    else:
        base.clear(value)
        base.extend(value, before)
    return None


def _restore_entries(base: Any, value: Any, before: list[Any]) -> None:
    """Write into the entries that are there, so that a loop over them goes on; those behind them are new."""
    now = [key for key, _ in _contents(base, value)]
    if all(key is other for key, (other, _) in zip(now, before, strict=False)) and len(now) >= len(before):
        for key in reversed(now[len(before) :]):
            base.__delitem__(value, key)
    else:
        base.clear(value)
    for key, each in before:
        base.__setitem__(value, key, each)


def _is_no_longer(value: list[Any], length: int) -> bool:
    return list.__len__(value) <= length


def _cut(value: list[Any], length: int) -> None:
    list.__delitem__(value, slice(length, None))


def _is_plain(kind: type) -> bool:
    """Whether a class is that of tensors, also one of one's own, whose ops are torch's and which have memory."""
    is_tensor = issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_tensor and not issubclass(kind, UninitializedBuffer | UninitializedParameter)


def _nbytes(value: Any) -> int:
    is_sparse = isinstance(value, Tensor) and value.layout is torch.sparse_coo
    return sum(each.nbytes for each in _within(value)) if is_sparse else int(value.nbytes)


def _within(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors that a sparse one consists of."""
    return value._indices(), value._values()


def _version_of(value: Tensor) -> int | None:
    """Return what counts the writes to a tensor; None if not all are counted, as to the values of a sparse one."""
    return None if value.layout is torch.sparse_coo or value.is_inference() else value._version


def _has_version(value: Tensor, version: int) -> bool:
    return value._version == version


def _has_elements(before: TensorCopy, version: int | None) -> bool:
    value = before.tensor
    if value.requires_grad != before.requires_grad or (version is not None and value._version != version):
        return False
    with torch.no_grad(), DisableTorchFunctionSubclass(), suppress(RuntimeError):  # as of a dtype that has no order
        if value.layout is torch.sparse_coo:
            return value.shape == before.value.shape and all(map(torch.equal, _within(value), _within(before.value)))
        return before.is_in_place and torch.equal(value, before.value)  # it may have been written to by `.data`
    return True


def _write_tensor(before: TensorCopy) -> None:
    with torch.no_grad(), DisableTorchFunctionSubclass(), suppress(RuntimeError):
        before.restore()


def _has_bytes(value: Any, before: Any) -> bool:
    return bool(value.shape == before.shape and np.asarray(value).tobytes() == before.tobytes())


def _has_objects(value: Any, before: Any) -> bool:
    return value.shape == before.shape and all(one is each for one, each in zip(value.flat, before.flat, strict=True))


def _write_array(value: Any, before: Any) -> object:
    if value.size != before.size:  # of a resized one others may have views, which a resize would not know
        return False
    if value.shape != before.shape:
        value.resize(before.shape, refcheck=False)  # of the same memory
    np.asarray(value)[...] = before
    return None


def _has_state(generator: Any, before: bytes) -> bool:
    return state_of(generator) == before
