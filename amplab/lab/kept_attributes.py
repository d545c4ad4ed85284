"""What a model, losses and functions of one's own keep, as it was before a look at a step, or a step that has raised.

A forward may count its calls, or append to a list. A look runs the forward that a later step runs again, and leaves no
trace in them; nor does a step that is taken back. After a step that runs again in a watch, that holds for all to which
the names in its code lead, such as a class of one's own; see `own_code`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amplab.lab.own_objects import Names, holders
from amplab.lab.own_values import storage_of
from amplab.trace.tensor_copies import write_value

__all__ = ["KeptAttributes"]

_MOST_BYTES, _MOST_BYTES_OF_STEP = 2**26, 2**20  # of tensors and arrays
_MOST_ELEMENTS, _MOST_ELEMENTS_OF_STEP = 1_000_000, 20_000  # of containers; of longer lists, appends are taken back
_OF_A_TENSOR = 20  # elements, by the time that it takes
_MOST_BYTES_COMPARED = 2**20  # of a tensor that no op has written to: it may have been by `.data`
_DEPTH = 16


class KeptAttributes:
    """Names, the contents of lists, dicts, sets and deques, and the elements of tensors and arrays, as they are now.

    Args:
        roots: Objects and functions by name; see `own_objects.holders`.
        weights: Returns tensors that are kept in another way, as is what shares memory with them.
        followed: More of them; see `own_objects.holders`.
        is_of_step: Whether it is made before each step, and may take little time: up to 1 MiB of tensors and arrays and
            20,000 elements are kept, otherwise 64 MiB and a million.

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
        self._is_complete = True
        self._seen: set[int] = set()
        self._restorers: list[Callable[[], bool | None]] = []
        for _, names in holders(roots, followed):
            self._keep_names(names)

    def _is_weights(self, value: Tensor) -> bool:
        if self._storages is None:
            self._storages = {*map(storage_of, self._weights())}
        return storage_of(value) in self._storages

    def restore(self) -> bool:
        """Let everything be as it was; return False if something was not kept, and may have changed.

        What is unchanged is not written.
        """
        is_all = self._is_complete
        for restore in self._restorers:
            is_all = restore() is not False and is_all
        return is_all

    def _keep_names(self, names: Names) -> None:
        self._restorers.append(names.restorer())
        try:
            for name in names:
                if type(value := names[name]) not in _PLAIN:
                    self._keep_contents(value)
        except RuntimeError:  # a thread of one's own changes one meanwhile, or a strange tensor has no copy
            self._is_complete = False

    def _keep_contents(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        if id(value) in self._seen:
            return
        if kind is np.ndarray and value.dtype == object:
            self._seen.add(id(value))
            self._keep_objects(value, depth)
        elif kind in (Tensor, nn.Parameter, np.ndarray):
            self._seen.add(id(value))
            self._restorers.append(self._elements_of(value))
        elif (base := _base_of(kind)) is not None:
            self._seen.add(id(value))
            self._keep_container(value, base, depth)

    def _keep_container(self, value: Any, base: Any, depth: int) -> None:
        number = base.__len__(value)
        is_kept = number <= self._elements_left and depth < _DEPTH
        if not is_kept:
            self._is_complete = False
            if base is list:
                self._restorers.append(partial(_cut, value, number))
            return
        self._elements_left -= number
        before = _contents(base, value)
        if base is not tuple:
            self._restorers.append(partial(_restore_contents, base, value, before))
        for each in [each for _, each in before] if issubclass(base, dict) else before:
            if type(each) not in _PLAIN:
                self._keep_contents(each, depth + 1)

    def _keep_objects(self, value: Any, depth: int) -> None:
        if value.size > self._elements_left or depth == _DEPTH:
            self._is_complete = False
            return
        self._elements_left -= value.size
        before = value.copy()
        self._restorers.append(partial(_restore_objects, value, before))
        for each in before.flat:
            if type(each) not in _PLAIN:
                self._keep_contents(each, depth + 1)

    def _elements_of(self, value: Any) -> Callable[[], bool | None]:
        is_array = isinstance(value, np.ndarray)
        if is_array and (value.dtype.hasobject or not value.flags.writeable):
            return _nothing
        if not is_array and (value.layout is not torch.strided or value.is_meta or self._is_weights(value)):
            return _nothing
        if value.nbytes > self._bytes_left or self._elements_left < _OF_A_TENSOR:
            if not is_array and not value.is_inference():
                return partial(_is_unwritten, value, value._version)
            self._is_complete = False
            return _nothing
        self._bytes_left -= value.nbytes
        self._elements_left -= _OF_A_TENSOR
        if is_array:
            return partial(_restore_array, value, value.copy())
        return partial(_restore_tensor, value, value.detach().clone(), None if value.is_inference() else value._version)


_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


def _nothing() -> None:
    """Nothing is kept of a value."""


def _base_of(kind: type) -> Any:
    """Return the kind of container that a class is, also one of one's own, whose methods may do more; else None."""
    if issubclass(kind, OrderedDict):  # dict's methods do not keep its order
        return OrderedDict if kind is OrderedDict else None
    return next((base for base in (dict, list, set, deque, bytearray, tuple) if issubclass(kind, base)), None)


def _contents(base: Any, value: Any) -> list[Any]:
    return [*(base.items(value) if issubclass(base, dict) else base.__iter__(value))]


def _restore_contents(base: Any, value: Any, before: list[Any]) -> None:
    if issubclass(base, dict):
        now = _contents(base, value)
        if len(now) != len(before) or any(
            key is not other or one is not each for (key, one), (other, each) in zip(now, before, strict=True)
        ):
            base.clear(value)
            for key, each in before:
                base.__setitem__(value, key, each)
    elif base is set:
        if base.__len__(value) != len(before) or not all(base.__contains__(value, each) for each in before):
            base.clear(value)
            base.update(value, before)
    elif base.__len__(value) != len(before) or any(
        one is not other for one, other in zip(base.__iter__(value), before, strict=True)
    ):
        base.clear(value)
        base.extend(value, before)


def _cut(value: list[Any], length: int) -> None:
    list.__delitem__(value, slice(length, None))


def _is_unwritten(value: Tensor, version: int) -> bool:
    return value._version == version


def _restore_tensor(value: Tensor, before: Tensor, version: int | None) -> None:
    is_written = version is None or value._version != version or value.shape != before.shape
    with torch.no_grad(), suppress(RuntimeError):  # as of a dtype that cannot be compared
        if is_written or (value.nbytes <= _MOST_BYTES_COMPARED and not torch.equal(value, before)):
            write_value(value, before)


def _restore_array(value: Any, before: Any) -> None:
    if value.shape == before.shape and value.tobytes() != before.tobytes():
        value[...] = before


def _restore_objects(value: Any, before: Any) -> None:
    if value.shape == before.shape and any(one is not each for one, each in zip(value.flat, before.flat, strict=True)):
        value[...] = before
