"""cast_tree: cast the floating tensors in a structure, keeping the structure.

One rule serves model inputs and outputs: containers come back in their own type (namedtuples,
OrderedDict, dict subclasses, dataclasses included), and a container in which nothing had to be
cast comes back as the same object, so that what a model writes into it is seen by the caller.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cast_tree"]

Target = torch.dtype | Callable[[Tensor], torch.dtype]


def cast_tree(value: Any, dtype: Target) -> Any:
    """`value` with every floating tensor in it cast to `dtype`.

    Walked: list, tuple, namedtuple, set, frozenset, dict and other mutable mappings (values, not
    keys), their subclasses, and dataclass instances. An object with a method `to` (a batch class, a
    PackedSequence) is given `to(dtype)`. Everything else is returned as it is: integer and complex
    tensors, numbers, strings, arrays, nn.Module (whose `to` would cast in place).

    Args:
        value: any object.
        dtype: the floating dtype to cast to; or a function that says it for each floating tensor. With a function
            an object with a method `to` is left as it is, except a PackedSequence, whose data is asked about.

    Returns:
        The structure, or `value` itself where nothing had to be cast. Sync: none.

    >>> cast_tree({"x": torch.zeros(1), "n": torch.tensor(3)}, torch.float16)
    {'x': tensor([0.], dtype=torch.float16), 'n': tensor(3)}
    """
    if isinstance(value, Tensor):
        wanted = _wanted(value, dtype) if value.is_floating_point() else value.dtype
        return value if wanted is value.dtype else value.to(wanted)  # whoever follows calls sees no needless one
    if isinstance(value, (str, bytes, type, torch.nn.Module)):
        return value
    if isinstance(value, PackedSequence):
        return value.to(_wanted(value.data, dtype)) if value.data.is_floating_point() else value
    if callable(getattr(value, "to", None)):
        return value.to(dtype) if isinstance(dtype, torch.dtype) else value
    if isinstance(value, MutableMapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value):
        return _cast_fields(value, dtype)
    return value


def _wanted(tensor: Tensor, dtype: Target) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else dtype(tensor)


def _cast_mapping(mapping: MutableMapping, dtype: Target) -> MutableMapping:
    changed = _changed(mapping.items(), dtype)
    if not changed:
        return mapping
    result = copy.copy(mapping)
    for key, value in changed:
        result[key] = value
    return result


def _cast_sequence(sequence: Any, dtype: Target) -> Any:
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


def _cast_fields(instance: Any, dtype: Target) -> Any:
    changed = _changed(((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance)), dtype)
    if not changed:
        return instance
    result = copy.copy(instance)
    for name, value in changed:
        object.__setattr__(result, name, value)  # frozen dataclasses too: `result` is ours alone
    return result


def _changed(pairs: Iterable[tuple[Any, Any]], dtype: Target) -> list[tuple[Any, Any]]:
    cast = [(key, value, cast_tree(value, dtype)) for key, value in pairs]
    return [(key, new) for key, old, new in cast if new is not old]
