"""The loops over an op's arguments: lower, raise, promote, match.

All of them walk lists and tuples and return new lists. Tensor subclasses are left alone, whoever
wrote the subclass decides about its dtype: a loop that meets one returns None, and the op runs as
it was called. These are on the hot path of every cast, hence the exact type checks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.cast_cache import CastCache

__all__ = ["cast_to", "floating_tensors", "is_wide", "lies_on", "lowered", "raised", "widest"]

_CASTABLE = LOW_PRECISION_DTYPES | {torch.float32}
_float64 = torch.float64
_PLAIN = frozenset([type(None), bool, int, float, str])


def lowered(values: Iterable[Any], dtype: torch.dtype, cache: CastCache) -> list[Any] | None:
    """`values` with float32 and 16-bit tensors in `dtype`, Parameters through `cache`.

    None where there is a tensor subclass or a float64 tensor.
    """
    result: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            own = value.dtype
            if own is dtype or own not in _CASTABLE:
                if own is _float64:
                    return None
                result.append(value)
            else:
                result.append(value.to(dtype) if kind is Tensor else cache.cast(value, dtype))
        elif kind is tuple or kind is list:
            inner = lowered(value, dtype, cache)
            if inner is None:
                return None
            result.append(kind(inner))
        elif isinstance(value, Tensor):
            return None
        else:
            result.append(value)
    return result


def is_wide(values: Iterable[Any]) -> bool:
    """Whether `raised` would change nothing: no 16-bit tensor, no container, no tensor subclass."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.dtype in LOW_PRECISION_DTYPES:
                return False
        elif kind not in _PLAIN:
            return False
    return True


def raised(values: Iterable[Any]) -> list[Any] | None:
    """`values` with 16-bit tensors in float32; None where there is a tensor subclass."""
    result: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            result.append(value.to(torch.float32) if value.dtype in LOW_PRECISION_DTYPES else value)
        elif kind is tuple or kind is list:
            inner = raised(value)
            if inner is None:
                return None
            result.append(kind(inner))
        elif isinstance(value, Tensor):
            return None
        else:
            result.append(value)
    return result


def floating_tensors(values: Iterable[Any]) -> list[Tensor] | None:
    """The floating tensors among `values`; None where there is a tensor subclass."""
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.is_floating_point():
                found.append(value)
        elif kind is tuple or kind is list:
            inner = floating_tensors(value)
            if inner is None:
                return None
            found += inner
        elif isinstance(value, Tensor):
            return None
    return found


def lies_on(values: Iterable[Any], device_type: str) -> bool:
    """Whether one of the tensors in `values` is on a device of this type.

    >>> lies_on([1, (torch.zeros(1),)], "cpu"), lies_on([torch.zeros(1, device="meta")], "cpu")
    (True, False)
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == device_type:
                return True
        elif isinstance(value, (tuple, list)) and lies_on(value, device_type):
            return True
    return False


def widest(tensors: list[Tensor]) -> torch.dtype | None:
    """The widest dtype among `tensors`; None where they agree.

    float16 with bfloat16 is float32. A 0-dim tensor counts as any other up to float32; a 0-dim
    float64 tensor, like a Python number, does not widen tensors that have dimensions.

    >>> widest([torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)])
    torch.float64
    >>> widest([torch.zeros(2, dtype=torch.float16), torch.zeros(2), torch.zeros((), dtype=torch.float64)])
    torch.float32
    """
    if len({tensor.dtype for tensor in tensors}) < 2:
        return None
    voting = [tensor.dtype for tensor in tensors if tensor.dim() or tensor.dtype is not _float64]
    if not any(tensor.dim() for tensor in tensors):
        voting = [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, voting)


def cast_to(values: Iterable[Any], dtype: torch.dtype) -> list[Any]:
    """`values`, in which there is no tensor subclass, with 16-bit and float32 tensors in `dtype`."""
    result: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            result.append(value.to(dtype) if value.dtype in _CASTABLE else value)
        elif kind is tuple or kind is list:
            result.append(kind(cast_to(value, dtype)))
        else:
            result.append(value)
    return result
