"""The op of torch that a program calls by a function of its own, which it has put in the op's place.

    plain = F.cross_entropy

    def with_z_loss(logits, labels):
        return plain(logits, labels) + 1e-4 * logits.logsumexp(1).square().mean()

    F.cross_entropy = with_z_loss

torch finds the function that it gives to a function mode by its name, as ``with_z_loss`` here. A mode that calls it
would run it a second time, inside of itself. `called_op` returns the function that was called, and `original_of` the
one behind such a function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor
from torch._ops import OperatorBase, OpOverload, OpOverloadPacket
from torch.overrides import handle_torch_function

__all__ = ["OF_TORCH", "called_op", "original_of"]

Op = Callable[..., Any]

_FOLDER = f"{Path(str(torch.__file__)).parent}/"
_HANDLES = handle_torch_function.__code__
_GETTERS = type(torch.finfo.bits.__get__)  # type: ignore[attr-defined]  # of a property that is written in C
OF_TORCH = frozenset(
    (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, OpOverload, OpOverloadPacket, _GETTERS)
)
"""Classes of what only torch gives to a function mode."""

_DEPTH = 4
_OPS: dict[CodeType, Op] = {}  # those written in Python that stand behind functions of a program, or are in a table


def called_op(func: Op, caller: FrameType | None) -> Op:
    """Return the op that was called where a function mode gets `func`.

    Args:
        func: what `__torch_function__` gets.
        caller: the frame that has called `__torch_function__`.

    Sync: none.
    """
    if type(func) in OF_TORCH or _is_torchs(func) or caller is None:
        return func
    if caller.f_code is not _HANDLES:  # the op is written in C
        return next((_of_tensor(name) for name, each in vars(Tensor).items() if each is func), func)
    op = caller.f_back
    if op is None or not op.f_code.co_filename.startswith(_FOLDER):  # a function that calls modes itself
        return func
    if op.f_code not in _OPS:
        _OPS[op.f_code] = FunctionType(op.f_code, op.f_globals)  # torch passes all its arguments
    return _OPS[op.f_code]


def original_of(value: Any, name: str) -> Any:
    """Return the op of torch with a name that a function in its place calls; `value` itself if it is torch's.

    Args:
        value: what is found at ``torch.nn.functional.cross_entropy``, for example.
        name: the last part of that path.
    """
    if not callable(value) or type(value) in OF_TORCH:
        return value
    found = value if _is_torchs(value) else next((each for each in _behind(value) if _is_named(each, name)), value)
    if isinstance(found, FunctionType):
        _OPS[found.__code__] = found
    return found


def _is_torchs(func: Any) -> bool:
    if isinstance(func, FunctionType):
        return func.__code__.co_filename.startswith(_FOLDER)
    return isinstance(func, (type, OperatorBase))


def _is_named(value: Any, name: str) -> bool:
    is_op = type(value) in OF_TORCH or (isinstance(value, FunctionType) and _is_torchs(value))
    return is_op and getattr(value, "__name__", "") == name


def _of_tensor(name: str) -> Any:
    return getattr(torch._C.TensorBase, name, getattr(Tensor, name))


def _behind(value: Any) -> Iterator[Any]:
    """Yield what a function or an object leads to by its variables, nearest first."""
    waiting, seen = [(value, 0)], set[int]()
    for each, depth in waiting:  # which grows
        if id(each) not in seen and depth < _DEPTH:
            seen.add(id(each))
            inner = [*_named_by(each)]
            yield from inner
            waiting += [(part, depth + 1) for part in inner if callable(part) and not isinstance(part, type)]


def _named_by(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield value.func
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        yield from inspect.getclosurevars(value).nonlocals.values()
        yield from value.__defaults__ or ()
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif callable(value):
        yield type(value).__call__
    yield from getattr(value, "__dict__", {}).values()
