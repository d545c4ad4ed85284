"""cast_tree: cast the floating tensors in a structure, keeping the structure.

One rule serves model inputs and outputs: containers come back in their own type (namedtuples,
OrderedDict, dict subclasses, dataclasses included), and a container in which nothing had to be
cast comes back as the same object, so that what a model writes into it is seen by the caller.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_tree"]


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it cast to `dtype`.

    Walked: list, tuple, namedtuple, set, frozenset, dict and other mutable mappings (values, not
    keys), their subclasses, and dataclass instances. An object with a method `to` (a batch class, a
    PackedSequence) is given `to(dtype)`. Everything else is returned as it is: integer and complex
    tensors, numbers, strings, arrays, nn.Module (whose `to` would cast in place).

    Args:
        value: any object.
        dtype: the floating dtype to cast to.

    Returns:
        The structure, or `value` itself where nothing had to be cast. Sync: none.

    >>> cast_tree({"x": torch.zeros(1), "n": torch.tensor(3)}, torch.float16)
    {'x': tensor([0.], dtype=torch.float16), 'n': tensor(3)}
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (str, bytes, type, torch.nn.Module)):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(dtype)
    if isinstance(value, MutableMapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value):
        return _cast_fields(value, dtype)
    return value


def _cast_mapping(mapping: MutableMapping, dtype: torch.dtype) -> MutableMapping:
    changed = _changed(mapping.items(), dtype)
    if not changed:
        return mapping
    result = copy.copy(mapping)
    for key, value in changed:
        result[key] = value
    return result


def _cast_sequence(sequence: Any, dtype: torch.dtype) -> Any:
    items = list(sequence)
    cast = [cast_tree(item, dtype) for item in items]
    if all(new is old for new, old in zip(cast, items, strict=True)):
        return sequence
    if isinstance(sequence, tuple) and hasattr(type(sequence), "_make"):  # namedtuple, by its public protocol
        return type(sequence)._make(cast)
    if isinstance(sequence, list):
        result = copy.copy(sequence)
        result[:] = cast
        return result
    return type(sequence)(cast)


def _cast_fields(instance: Any, dtype: torch.dtype) -> Any:
    changed = _changed(((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance)), dtype)
    if not changed:
        return instance
    result = copy.copy(instance)
    for name, value in changed:
        object.__setattr__(result, name, value)  # frozen dataclasses too: `result` is ours alone
    return result


def _changed(pairs: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> list[tuple[Any, Any]]:
    cast = [(key, value, cast_tree(value, dtype)) for key, value in pairs]
    return [(key, new) for key, old, new in cast if new is not old]
