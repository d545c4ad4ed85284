"""Infer the dtype that a tensor would have if its ops ran under another policy.

A module that a rule keeps in float32 returns float32 tensors, but the ops around it expect the dtype that the policy
would give. The mode here follows the ops inside by the rows of that policy: the result of a lower-precision op has
the compute dtype, that of an fp32 op is float32, and that of any other op has the promoted dtype of its arguments.
Nothing is computed twice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.function_modes import ScopeMode
from amplab.policies.casting.plan import composites_of, opened
from amplab.policies.nested_tensors import floating_tensors_in
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.policy.precisions import tensor_dtype
from amplab.policies.tables.called_op import called_op
from amplab.policies.tables.op_table import CastPolicy

__all__ = ["WouldBeDtypes"]

_FP32 = (CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE)
_REQUESTS_DTYPE = frozenset(("to", "half", "bfloat16", "float", "double", "type", "type_as"))
_BY_NAME = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_FOLLOWS_FIRST = frozenset(("batch_norm", "instance_norm", "embedding", "embedding_bag"))


class WouldBeDtypes(ScopeMode):
    """Track which float32 tensors in a block would be 16-bit under the policy `around`.

    Push it below the mode that casts in the block, so that it sees the ops inside of opened composites.

    Attributes:
        around: the policy outside of the block.

    >>> x = torch.ones(2, 2)
    >>> with WouldBeDtypes(PrecisionPolicy()) as would_be:
    ...     product, loss = x @ x, (x @ x).exp()
    >>> would_be.of(product), would_be.of(loss)
    (torch.float16, torch.float32)
    """

    def __init__(self, around: PrecisionPolicy) -> None:
        super().__init__()
        self.around = around
        self._dtypes: Any = _TracedDtypes()
        self._composites: frozenset[Callable[..., Any]] = frozenset()
        if not is_dynamo_compiling():
            self._dtypes, self._composites = WeakIdKeyDictionary(), composites_of(around.table)

    def note(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Record that `tensor`, float32 here, would be `dtype`."""
        if tensor.dtype is torch.float32 and dtype in LOW_PRECISION_DTYPES:
            self._dtypes[tensor] = dtype

    def of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that `tensor` would have; its actual dtype if none is recorded."""
        dtype: torch.dtype = self._dtypes.get(tensor, tensor.dtype)
        return dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and record the dtypes that its results would have."""
        kwargs = kwargs or {}
        traced = is_dynamo_compiling()
        func = func if traced else called_op(func, sys._getframe(1))
        votes = _traced_votes(self.around, func) if traced else _votes(self.around, func, self._composites)
        if votes == "opened":
            return self.run_inside(opened(func), args, kwargs)  # engines open these: the ops inside have own rows
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in floating_tensors_in(result) if tensor.dtype is torch.float32]
        if not outputs:
            return result
        if votes == "requested" or kwargs.get("dtype") is not None:
            for output in outputs:
                self._dtypes.pop(output, None)
            return result
        dtype = self._result_dtype(votes, floating_tensors_in((*args, *kwargs.values())))
        for output in outputs:
            if dtype is not None and not any(
                output is arg for arg in args
            ):  # the result of an in-place op keeps its dtype
                self.note(output, dtype)
        return result

    def _result_dtype(self, votes: str, tensors: list[Tensor]) -> torch.dtype | None:
        if not tensors or any(tensor.dtype is torch.float64 for tensor in tensors):
            return None
        if votes in _BY_NAME:
            return _BY_NAME[votes]
        if votes == "first":
            return self.of(tensors[0])
        wide = [tensor for tensor in tensors if tensor.dim()]
        voting = tensors if votes == "all" or not wide else wide
        return functools.reduce(torch.promote_types, [self.of(tensor) for tensor in voting])


def _votes(around: PrecisionPolicy, func: Callable[..., Any], composites: frozenset[Callable[..., Any]]) -> str:
    """What decides about the dtype of the result of `func`: a dtype by its name, or one of

    opened: the ops inside; requested: an argument; first: the first tensor; all: all tensors; wide: those with
    dimensions.
    """
    row = around.by_function.get(func)
    cast = CastPolicy.FALL_THROUGH if row is None else row.cast
    if (cast is CastPolicy.PROMOTE and isinstance(func, FunctionType)) or func in composites:
        return "opened"
    name = getattr(func, "__name__", "")
    if name in _REQUESTS_DTYPE:
        return "requested"
    if cast is CastPolicy.LOWER_PRECISION_FP:
        return str(tensor_dtype(around.precision(func)))
    if cast in _FP32:
        return str(torch.float32)
    if cast is CastPolicy.FALL_THROUGH and name in _FOLLOWS_FIRST:
        return "first"
    return "all" if cast is CastPolicy.PROMOTE else "wide"


def _traced_votes(around: PrecisionPolicy, func: Callable[..., Any]) -> str:
    return _votes(around, func, composites_of(around.table))


# torch.compile calls this instead of tracing it: see `amplab.policies.casting.plan.KeptPlan`.
_traced_votes._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _TracedDtypes:
    """As WeakIdKeyDictionary, for torch.compile, which traces no weak references."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, torch.dtype | None]] = []

    def __setitem__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._pairs.append((tensor, dtype))

    def get(self, tensor: Tensor, default: torch.dtype) -> torch.dtype:
        for known, dtype in reversed(self._pairs):
            if known is tensor:
                return default if dtype is None else dtype
        return default

    def pop(self, tensor: Tensor, _default: None) -> None:
        self._pairs.append((tensor, None))
