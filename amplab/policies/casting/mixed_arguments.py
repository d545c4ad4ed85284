"""Ops whose arguments have different dtypes, where the lists of a table cast nothing.

A module or an op that a user's rule keeps in float32 returns float32. With 16-bit weights around it, the next op may
get float32 and 16-bit tensors, which torch refuses for most ops. Such an op follows the row of its op in APEX:

    lower_precision_fp                  the dtype of its weight (the first Parameter); else the compute dtype
    fp32                                float32
    promote, sequence_promote           the widest dtype of the arguments
    match_self                          the dtype of the tensor written to
    batch_norm, instance_norm           the input is cast to the dtype of 16-bit statistics and weights

Ops whose arguments have one dtype run as they are, and so do ops with a float64 argument or a tensor subclass. A 0-dim
tensor does not count: torch lets it adapt to the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting.steps import CastCache, NoCastCache, Run, Step, StepParts, cast_to, make_step
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpRule

if TYPE_CHECKING:
    from amplab.policies.casting.function_modes import CastingMode

__all__ = ["mixed_rules", "mixed_step"]

_RULED = frozenset(
    (
        *(CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32),
        *(CastPolicy.PROMOTE, CastPolicy.SEQUENCE_PROMOTE, CastPolicy.MATCH_SELF),
    )
)
_KEEPS_STATISTICS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
_float64 = torch.float64
_NO_CACHE: CastCache = NoCastCache()


def mixed_rules() -> Iterator[tuple[Callable[..., Any], OpRule]]:
    """Yield the functions that `mixed_step` takes, each with the row for arguments of different dtypes."""
    for func, row in APEX.by_function.items():
        if row.cast in _RULED:
            yield func, dataclasses.replace(row, reason=f"{row.op}: its arguments came in different dtypes")
    for func in _KEEPS_STATISTICS:
        name = func.__name__
        reason = f"{name}: its statistics are 16-bit"
        yield func, OpRule(name, CastPolicy.LOWER_PRECISION_FP, reason, (f"torch.nn.functional.{name}",))


def mixed_step(rule: OpRule, func: Callable[..., Any], compute_dtype: torch.dtype, run: Run, cast_run: Run) -> Step:
    """Return the step that casts the arguments of an op by `rule` where their dtypes differ.

    Args:
        rule: what `mixed_rules` yields for `func`.
        func: the op.
        compute_dtype: the dtype of lower-precision ops without a Parameter.
        run: runs the op with arguments of one dtype.
        cast_run: runs it after a cast.
    """
    if func in _KEEPS_STATISTICS:
        casting = _input_step(cast_run)
    elif rule.cast is CastPolicy.LOWER_PRECISION_FP:
        casting = _weight_step(compute_dtype, cast_run)
    else:
        casting = make_step(StepParts(rule, compute_dtype, _NO_CACHE, cast_run))

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes: set[torch.dtype] = set()
        if not (_collect(args, dtypes) and (not kwargs or _collect(kwargs.values(), dtypes))):
            return run(mode, func, args, kwargs)
        if len(dtypes) < 2 or _float64 in dtypes or kwargs.get("out") is not None:
            return run(mode, func, args, kwargs)
        return casting(mode, func, args, kwargs)

    return step


def _collect(values: Iterable[Any], dtypes: set[torch.dtype]) -> bool:
    """Add the dtypes of the floating tensors with dimensions; return False at a tensor subclass."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.is_floating_point() and value.dim():
                dtypes.add(value.dtype)
        elif kind is tuple or kind is list:
            if not _collect(value, dtypes):
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def _weight_step(compute_dtype: torch.dtype, run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = _weight_dtype((*args, *kwargs.values())) or compute_dtype
        return run(mode, func, cast_to(args, dtype), _cast_kwargs(kwargs, dtype))

    return step


def _weight_dtype(values: Iterable[Any]) -> torch.dtype | None:
    for value in values:
        if type(value) is Parameter:
            return value.dtype
        if type(value) is tuple or type(value) is list:
            inner = _weight_dtype(value)
            if inner is not None:
                return inner
    return None


def _input_step(run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["input"]
        others: set[torch.dtype] = set()
        _collect((*args[1:], *(value for name, value in kwargs.items() if name != "input")), others)
        if len(others) == 1 and others <= LOW_PRECISION_DTYPES:  # torch itself takes float32 statistics
            given = given.to(*others)
            args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "input": given})
        return run(mode, func, args, kwargs)

    return step


def _cast_kwargs(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(kwargs, cast_to(kwargs.values(), dtype), strict=True)) if kwargs else kwargs
