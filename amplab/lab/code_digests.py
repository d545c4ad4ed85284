"""Digests of code of one's own: a run that continues in another process tells which parts of it are others there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amplab.policies.nested_tensors import tensors_in
from amplab.trace.reached_values import cell_contents, reached_from

__all__ = ["WEIGHTS", "code_digests"]

WEIGHTS = "weights"
"""The digest of the names and shapes of the weights: only with the same ones a run can continue."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LIBRARIES = "torch", "amplab", "numpy", "builtins"
_MOST, _MOST_ELEMENTS = 64, 2**24
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def code_digests(model: nn.Module, batch: Any, functions: Mapping[str, list[Any]]) -> dict[str, str]:
    """Return a digest of each part; of `functions` those that are given.

    Args:
        model: A fresh one.
        batch: The first batch.
        functions: By the name of the argument, such as "loss".

    >>> parts = code_digests(nn.Linear(2, 1), torch.ones(1), {"loss": [lambda out: out.sum()], "step": [None]})
    >>> sorted(parts)
    ['data', 'loss', 'model', 'weights']
    """
    parts = {
        WEIGHTS: [(name, tuple(value.shape)) for name, value in model.state_dict().items() if torch.is_tensor(value)],
        "model": _of_module(model),
        "data": [_of_tensor(each) for each in tensors_in(batch)],
    }
    given = {
        name: [*map(_of, values)] for name, values in functions.items() if any(each is not None for each in values)
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in (parts | given).items()}


def _of(value: Any) -> Any:
    """What a function, a class, an optimizer or a module is, apart from where it is in memory."""
    if isinstance(value, nn.Module):
        return _of_module(value), [_of_tensor(each) for each in value.state_dict().values() if torch.is_tensor(each)]
    if value is None or isinstance(value, Optimizer | type) or not callable(value):
        return _written(value)
    found = [each for each in reached_from(value) if not _is_librarys(each)]
    return sorted(map(repr, filter(None, map(_of_part, found)))) or _written(value)


def _of_part(value: Any) -> Any:
    """What a function, or an object of a class of one's own, says by itself; None for others."""
    if isinstance(value, FunctionType):
        values = [value.__globals__.get(name) for name in value.__code__.co_names]
        values += cell_contents(value)
        values += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return value.__qualname__, *_of_code(value.__code__), [*map(_plain, values)]
    if isinstance(value, partial):
        return [*map(_plain, (*value.args, *value.keywords.values()))]
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type | ModuleType | nn.Module):
        return _of_class(type(value)), [(name, _plain(each)) for name, each in vars(value).items()]
    return None


def _of_module(module: nn.Module) -> Any:
    classes = sorted({_of_class(type(each)) for each in module.modules()})
    attributes = [
        (path, name, _plain(value, of_tensor=lambda _: None))  # which may be weights
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if name not in _OF_EVERY_MODULE
    ]
    return _written(module), classes, attributes


def _of_class(kind: type) -> str:
    """The code of all methods of a class, of those of its bases that are no library's, too."""
    own = [base for base in kind.__mro__ if base is not object and not _is_librarys(base)]
    methods = [each for base in own for each in vars(base).values() if isinstance(each, FunctionType)]
    return repr((kind.__qualname__, [(each.__qualname__, *_of_code(each.__code__)) for each in methods]))


def _plain(value: Any, of_tensor: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """What a number, a word, a tensor, or a few of them are; None for other values."""
    if isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return (of_tensor or _of_tensor)(value)
    if isinstance(value, list | tuple) and len(value) <= _MOST:
        return [_plain(each, of_tensor) for each in value]
    if isinstance(value, dict) and len(value) <= _MOST:
        return [(str(name), _plain(each, of_tensor)) for name, each in value.items()]
    return None


def _of_code(code: CodeType) -> Iterator[Any]:
    yield code.co_code
    yield code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _of_code(each)
        else:
            yield sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each)


def _is_librarys(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES


def _written(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _of_tensor(tensor: torch.Tensor) -> Any:
    what = tuple(tensor.shape), str(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() > _MOST_ELEMENTS:
        return what
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return *what, hashlib.sha256(values.numpy().tobytes()).hexdigest()
