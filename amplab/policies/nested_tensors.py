"""Nested tensors: find, replace and cast the tensors in batches, outputs and the arguments of ops.

    tensors_in, floating_tensors_in     the tensors of a structure, in order
    named_tensors_in                    the same, each with a name such as batch['x'][0]
    map_tensors                         the structure with every tensor replaced
    cast_tree                           the structure with every floating tensor cast

A structure is any nesting of lists, tuples, namedtuples, sets, mappings and dataclass instances. `map_tensors` and
`cast_tree` keep the type of each container. They return a container in which nothing changes as the same object, so
that the caller sees what a model writes into it.

`casting.steps` has its own loops over the arguments of one op, which are faster and stop at a tensor subclass.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cast_tree", "floating_tensors_in", "map_tensors", "named_tensors_in", "tensors_in"]

_LEAVES = (
    *(int, float, complex, str, bytes, bytearray, memoryview, range, type(None), type),
    *(torch.dtype, torch.device, torch.nn.Module),  # the `to` of a module would cast in place
)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a structure, in order.

    >>> [tensor.shape[0] for tensor in tensors_in({"x": torch.zeros(2), "rest": (torch.zeros(3), "text")})]
    [2, 3]
    """
    if isinstance(value, Tensor):
        return [value]
    return [tensor for child in _children(value) for tensor in tensors_in(child)]


def floating_tensors_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a structure, in order."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch, None if it is unknown.

    >>> samples_in((torch.ones(4, 3), torch.tensor([0, 1, 1, 0])))
    4
    """
    return next((len(each) for each in floating_tensors_in(batch) if each.dim()), None)


def named_tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a structure with the expression that leads to it.

    >>> [path for path, _ in named_tensors_in({"x": [torch.zeros(1), torch.zeros(1)]}, "batch")]
    ["batch['x'][0]", "batch['x'][1]"]
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    children = _children(value)
    for label, child in zip(_labels(value, len(children)), children, strict=True):
        yield from named_tensors_in(child, name + label)


def map_tensors(value: Any, change: Callable[[Tensor], Any], *, custom: Callable[[Any], Any] | None = None) -> Any:
    """Return the structure with `change(tensor)` in place of every tensor.

    Args:
        value: any object. Read-only mappings and sequences other than lists and tuples are returned as they are.
        change: called on each tensor; returns the tensor itself to leave it unchanged.
        custom: called on each object with a method `to`, such as a batch class; None leaves these unchanged.

    >>> map_tensors([torch.tensor(1), 2], lambda tensor: tensor + 1)
    [tensor(2), 2]
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if not isinstance(value, PackedSequence) and callable(getattr(value, "to", None)):
        return value if custom is None else custom(value)

    def mapped(child: Any) -> Any:
        return map_tensors(child, change, custom=custom)

    if isinstance(value, MutableMapping):
        return _mapping_with(value, _changes(value.items(), mapped))
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence_with(value, list(value), list(map(mapped, value)))
    if dataclasses.is_dataclass(value):
        return _instance_with(value, _changes(_fields(value).items(), mapped))
    return value


def cast_tree(value: Any, dtype: torch.dtype | Callable[[Tensor], torch.dtype]) -> Any:
    """Return `value` with every floating tensor in it cast to `dtype`.

    Integer and complex tensors, numbers, strings, arrays and modules are returned unchanged.

    Args:
        value: any object.
        dtype: the dtype to cast to, or a function that returns it for each floating tensor. A batch class with a
            method `to` is cast by `to(dtype)`; if `dtype` is a function, it is returned unchanged.

    Returns:
        The structure, or `value` itself if nothing had to be cast. Sync: none.

    >>> cast_tree({"x": torch.zeros(1), "n": torch.tensor(3)}, torch.float16)
    {'x': tensor([0.], dtype=torch.float16), 'n': tensor(3)}
    """
    if isinstance(dtype, torch.dtype):
        return map_tensors(value, lambda tensor: _cast(tensor, dtype), custom=lambda batch: batch.to(dtype))
    return map_tensors(value, lambda tensor: _cast(tensor, dtype(tensor)) if tensor.is_floating_point() else tensor)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    needless = tensor.dtype is dtype or not tensor.is_floating_point()
    return tensor if needless else tensor.to(dtype)  # a tracer must not see a cast that changes nothing


def _children(value: Any) -> Any:
    """The values in a container, in order; nothing for anything else."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, _LEAVES):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, Sequence | Set):
        return value
    return list(_fields(value).values()) if dataclasses.is_dataclass(value) else ()


def _labels(value: Any, count: int) -> Iterable[str]:
    if isinstance(value, Mapping):
        return (f"[{key!r}]" for key in value)
    if isinstance(value, tuple) and (names := getattr(type(value), "_fields", None)) is not None:  # a namedtuple
        return (f".{name}" for name in names)
    if dataclasses.is_dataclass(value):
        return (f".{name}" for name in _fields(value))
    return (f"[{place}]" for place in range(count))


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name, None) for field in dataclasses.fields(instance)}


def _changes(pairs: Iterable[tuple[Any, Any]], mapped: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    triples = [(key, old, mapped(old)) for key, old in pairs]  # torch.compile traces no := in a comprehension
    return [(key, new) for key, old, new in triples if new is not old]


def _mapping_with(mapping: MutableMapping[Any, Any], changes: list[tuple[Any, Any]]) -> MutableMapping[Any, Any]:
    if not changes:
        return mapping
    result = copy.copy(mapping)
    for key, value in changes:
        result[key] = value
    return result


def _sequence_with(sequence: Any, old: list[Any], new: list[Any]) -> Any:
    if all(after is before for after, before in zip(new, old, strict=True)):
        return sequence
    make = getattr(type(sequence), "_make", None)
    if make is not None:  # namedtuple, by its public protocol
        return make(new)
    if isinstance(sequence, list):
        result = copy.copy(sequence)
        result[:] = new
        return result
    return type(sequence)(new)


def _instance_with(instance: Any, changes: list[tuple[str, Any]]) -> Any:
    if not changes:
        return instance
    result = copy.copy(instance)
    for name, value in changes:
        object.__setattr__(result, name, value)  # frozen dataclasses too: nobody else holds `result`
    return result
