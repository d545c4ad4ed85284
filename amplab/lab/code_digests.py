"""Digests of code of one's own: a run that continues in another process tells which parts of it are others there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amplab.policies.nested_tensors import tensors_in
from amplab.trace.reached_values import reached_from

__all__ = ["WEIGHTS", "code_digests"]

WEIGHTS = "weights"
"""The digest of the names and shapes of the weights: only with the same ones a run can continue."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LIBRARIES = "torch", "amplab", "numpy"


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
    classes = {type(each) for each in model.modules()}
    parts = {
        WEIGHTS: [(name, tuple(value.shape)) for name, value in model.state_dict().items() if torch.is_tensor(value)],
        "model": [_written(model), *sorted(_of_class(each) for each in classes)],
        "data": [(tuple(each.shape), str(each.dtype), _bytes(each)) for each in tensors_in(batch)],
    }
    given = {
        name: [*map(_of, values)] for name, values in functions.items() if any(each is not None for each in values)
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in (parts | given).items()}


def _of(value: Any) -> Any:
    """What a function, a class, an optimizer or a module is, apart from where it is in memory."""
    if value is None or isinstance(value, nn.Module | Optimizer | type) or not callable(value):
        return _written(value)
    own = (each for each in reached_from(value) if isinstance(each, FunctionType) and not _is_librarys(each))
    return sorted((each.__qualname__, *_of_code(each.__code__)) for each in own) or _written(value)


def _of_class(kind: type[nn.Module]) -> str:
    forward: Callable[..., Any] = kind.forward
    code = () if _is_librarys(kind) or not isinstance(forward, FunctionType) else _of_code(forward.__code__)
    return repr((kind.__qualname__, *code))


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


def _bytes(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return _written(tensor)
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
