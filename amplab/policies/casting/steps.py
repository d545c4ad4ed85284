"""One step per cast policy: cast the arguments of a call, then run the op.

A step is called as step(mode, func, args, kwargs). `run`, called the same way with the cast arguments, runs the op
(unchanged, with fp32 accumulation, or opened; see `plan`). The arguments of a call with `out=` are not cast: the caller
chose the tensor to write to, and thereby the dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amplab.formats import LOW_PRECISION_DTYPES, FloatFormat
from amplab.policies.casting.simulated_rounding import rounded_operands, rounded_results
from amplab.policies.nested_tensors import cast_tree
from amplab.policies.policy.precisions import Precision, tensor_dtype
from amplab.policies.tables.op_table import CastPolicy, OpRule

if TYPE_CHECKING:
    from amplab.policies.casting.function_modes import CastingMode

__all__ = [
    "CastCache",
    "NoCastCache",
    "Run",
    "Step",
    "StepParts",
    "cast_to",
    "floating_tensors",
    "is_wide",
    "lies_on",
    "lowered",
    "make_step",
    "raised",
    "refuse_export",
    "restoring_step",
    "widest",
]

_CASTABLE = LOW_PRECISION_DTYPES | {torch.float32}
_float64 = torch.float64
_PLAIN = frozenset([type(None), bool, int, float, str])
Run = Callable[["CastingMode", Callable[..., Any], Any, dict[str, Any]], Any]
Step = Callable[["CastingMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of a step: the row, the precision of lower-precision ops, the cache for Parameters, and the runner."""

    rule: OpRule
    precision: Precision
    cache: CastCache
    run: Run


def make_step(parts: StepParts) -> Step:
    """Return the step for `parts.rule`."""
    if parts.rule.cast is CastPolicy.LOWER_PRECISION_FP and isinstance(parts.precision, FloatFormat):
        return _simulated_step(parts, parts.precision)
    return _MAKERS[parts.rule.cast](parts)


def restoring_step(step: Step) -> Step:
    """Return `step` with results in the widest dtype of the uncast arguments, since no list casts the ops after it."""

    def restoring(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = floating_tensors((*args, *kwargs.values()))
        result = step(mode, func, args, kwargs)
        if not tensors or kwargs.get("out") is not None:
            return result
        widest_of_all = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return cast_tree(result, lambda tensor: widest_of_all if tensor.dtype in _CASTABLE else tensor.dtype)

    return restoring


def _lower_step(parts: StepParts) -> Step:
    dtype, cache, run = tensor_dtype(parts.precision), parts.cache, parts.run
    as_float32_model = _fp32_step(parts)
    if dtype is torch.float32:
        return as_float32_model

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs and kwargs.get("out") is not None:  # generated code of torch.compile calls products so
            return run(mode, func, args, kwargs)
        cast_args = lowered(args, dtype, cache)
        if cast_args is None:
            return as_float32_model(mode, func, args, kwargs)
        if not kwargs:
            return run(mode, func, cast_args, kwargs)
        values = lowered(kwargs.values(), dtype, cache)
        if values is None:
            return as_float32_model(mode, func, args, kwargs)
        return run(mode, func, cast_args, dict(zip(kwargs, values, strict=True)))

    return step


def _simulated_step(parts: StepParts, format: FloatFormat) -> Step:
    run = parts.run
    as_float32_model = _fp32_step(parts)

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = rounded_operands((*args, *kwargs.values()), format)
        if operands is None or kwargs.get("out") is not None:
            return as_float32_model(mode, func, args, kwargs)
        keywords = dict(zip(kwargs, operands[len(args) :], strict=True))
        return rounded_results(run(mode, func, operands[: len(args)], keywords), format)

    return step


def _fp32_step(parts: StepParts) -> Step:
    run = parts.run

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_wide(args) and (not kwargs or is_wide(kwargs.values())):  # this check is faster than a new list
            return run(mode, func, args, kwargs)
        cast_args = raised(args)
        if cast_args is not None and not kwargs:
            return run(mode, func, cast_args, kwargs)
        values = raised(kwargs.values())
        if cast_args is None or values is None or kwargs.get("out") is not None:
            return run(mode, func, args, kwargs)
        return run(mode, func, cast_args, dict(zip(kwargs, values, strict=True)))

    return step


def _set_dtype_step(parts: StepParts) -> Step:
    run = parts.run

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = floating_tensors(args[:1] or (kwargs.get("input"),))
        chosen = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
        if first and first[0].dtype in LOW_PRECISION_DTYPES and not chosen and kwargs.get("out") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return run(mode, func, args, kwargs)

    return step


def _promote_step(parts: StepParts) -> Step:
    run = parts.run

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = floating_tensors((*args, *kwargs.values()) if kwargs else args)
        if tensors is None or len(tensors) < 2 or kwargs.get("out") is not None:
            return run(mode, func, args, kwargs)
        wide = widest(tensors)
        if wide is None:
            return run(mode, func, args, kwargs)
        return run(mode, func, cast_to(args, wide), _cast_kwargs(kwargs, wide))

    return step


def _match_self_step(parts: StepParts) -> Step:
    run = parts.run

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = floating_tensors((*args, *kwargs.values()) if kwargs else args)
        if not tensors or tensors[0] is not args[0]:
            return run(mode, func, args, kwargs)
        own = tensors[0].dtype
        if all(tensor.dtype is own for tensor in tensors):
            return run(mode, func, args, kwargs)
        return run(mode, func, (args[0], *cast_to(args[1:], own)), _cast_kwargs(kwargs, own))

    return step


def _banned_step(parts: StepParts) -> Step:
    rule, run = parts.rule, parts.run
    in_place = rule.op.endswith("_")
    match_self = _match_self_step(parts)

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looked_at = args[:1] if in_place else (*args, *kwargs.values())
        for tensor in floating_tensors(looked_at) or ():
            if tensor.dtype in LOW_PRECISION_DTYPES:
                raise NotImplementedError(_refusal(rule, tensor.dtype))
        return match_self(mode, func, args, kwargs) if in_place else run(mode, func, args, kwargs)

    return step


def _fall_through_step(parts: StepParts) -> Step:
    return parts.run


def _cast_kwargs(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(kwargs, cast_to(kwargs.values(), dtype), strict=True))


def _refusal(rule: OpRule, dtype: torch.dtype) -> str:
    given = str(dtype).removeprefix("torch.")
    if rule.by_user:
        return (
            f"{rule.op} is banned for 16-bit tensors ({rule.reason}): an argument is {given}, expected float32. "
            "Call .float() first, or remove the rule."
        )
    if rule.op.endswith("_"):
        return (
            f"Cannot call in-place method {rule.op} on fp16 Tensors: self is {given}, expected float32. "
            f"Use {rule.op.removesuffix('_')}, which returns float32, or call .float() first."
        )
    return (
        "amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss`: "
        f"an argument is {given}, expected float32 ({rule.reason}). "
        "Use torch.nn.BCEWithLogitsLoss on the logits, or call .float() before the sigmoid."
    )


_MAKERS: dict[CastPolicy, Callable[[StepParts], Step]] = {
    CastPolicy.LOWER_PRECISION_FP: _lower_step,
    CastPolicy.FP32: _fp32_step,
    CastPolicy.FP32_SET_OPT_DTYPE: _set_dtype_step,
    CastPolicy.PROMOTE: _promote_step,
    CastPolicy.SEQUENCE_PROMOTE: _promote_step,
    CastPolicy.MATCH_SELF: _match_self_step,
    CastPolicy.BANNED: _banned_step,
    CastPolicy.FALL_THROUGH: _fall_through_step,
}


# Loops over the arguments of one op. They walk lists and tuples and return new lists, or None if there is a tensor
# subclass: the op then runs as it was called, since the author of the subclass decides about its dtype. They run for
# every cast. Exact type checks make them faster than `map_tensors`, and separate loops faster than one with a callback.


def lowered(values: Iterable[Any], dtype: torch.dtype, cache: CastCache) -> list[Any] | None:
    """Return `values` with float32 and 16-bit tensors in `dtype`, Parameters through `cache`.

    Returns None if a value is a tensor subclass or a float64 tensor.
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
            refuse_export()
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
    """Return `values` with 16-bit tensors in float32; None if a value is a tensor subclass."""
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
            refuse_export()
            return None
        else:
            result.append(value)
    return result


def floating_tensors(values: Iterable[Any]) -> list[Tensor] | None:
    """Return the floating tensors among `values`; None if a value is a tensor subclass."""
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
            refuse_export()
            return None
    return found


def refuse_export() -> None:
    """Raise RuntimeError if torch.export traces: it calls ops with tensor subclasses, and would export float32."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export cannot export the casts of amplab.autocast, of a policy or of O1: expected a model that "
            "nothing casts. Export it outside the region and before initialize, or in torch.autocast; at O2 and O3 the "
            "casts are exported."
        )


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
    """Return the widest dtype among `tensors`; None if all have the same one.

    The widest of float16 and bfloat16 is float32. A 0-dim tensor counts like any other up to float32. A 0-dim float64
    tensor, like a Python number, does not widen tensors that have dimensions.

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
    """Return `values`, which contain no tensor subclass, with 16-bit and float32 tensors in `dtype`."""
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


_functorch_active = torch._C._are_functorch_transforms_active

_Entry = tuple[weakref.ref[Tensor], int, int, bool, Tensor]
"""Weak identity, version, data pointer and requires_grad of a Parameter, and its cast."""


class CastCache:
    """Lower-precision copies of Parameters: a Parameter used twice is cast once, and an edited one is cast again.

    An entry is used only while all of these are unchanged: the Parameter object, its version counter (in-place edits),
    its data pointer (`p.data = …`), its requires_grad, and the requested dtype. An edit through an alias without the
    same version counter (`p.data.clamp_()`, `p.detach().numpy()`) changes none of them. Therefore a Parameter for which
    such an alias was made is not cached until the next `clear`. An alias that was made before the casting region began,
    and is written to between two uses inside it, cannot be detected: call `clear` after such a write.

    The cast is made with grad enabled and outside inference mode, so that a later forward that needs gradients can use
    an entry made under no_grad.

    >>> cache, weight = CastCache(), torch.nn.Parameter(torch.ones(2))
    >>> cache.cast(weight, torch.float16) is cache.cast(weight, torch.float16), len(cache)
    (True, 1)
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._exposed: set[int] = set()

    def __len__(self) -> int:
        """The number of copies."""
        return len(self._entries)

    def clear(self) -> None:
        """Drop every copy. Sync: none."""
        self._entries.clear()
        self._exposed.clear()

    def expose(self, tensor: Tensor) -> None:
        """Record that edits of `tensor`'s memory can no longer be detected: it is not cached until `clear`."""
        if torch.compiler.is_compiling() or _functorch_active() or type(tensor) not in (Tensor, Parameter):
            return  # a FakeTensor of the compiler, which compiles a backward at its first call, has no memory
        if tensor.layout is torch.strided:
            self._exposed.add(tensor.untyped_storage().data_ptr())

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight.to(dtype)`, from the cache if it has a valid entry.

        Args:
            weight: a Parameter, any shape, any device.
            dtype: the dtype to cast to.

        Returns:
            A tensor of `weight`'s shape in `dtype`, linked to `weight` by autograd.
            Sync: none.
        """
        # Under torch.compile the graph itself is the cache; under functorch a cast belongs to one transform level.
        if torch.compiler.is_compiling() or _functorch_active():
            return weight.to(dtype)
        key = (id(weight), dtype)
        entry = self._entries.get(key)
        if entry is not None:
            identity, version, pointer, requires_grad, copy = entry
            if (
                identity() is weight
                and version == weight._version
                and pointer == weight.data_ptr()
                and requires_grad == weight.requires_grad
                and not self._is_exposed(weight)
            ):
                return copy
        return self._make(key, weight, dtype)

    def copies_of(self, weight: Tensor) -> list[Tensor]:
        """Return the copies of `weight` that are stored and still valid, without making one. Sync: none."""
        return [
            copy
            for identity, version, pointer, requires_grad, copy in self._entries.values()
            if identity() is weight
            and version == weight._version
            and pointer == weight.data_ptr()
            and requires_grad == weight.requires_grad
            and not self._is_exposed(weight)
        ]

    def _make(self, key: tuple[int, torch.dtype], weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.is_inference() or self._is_exposed(weight):
            self._entries.pop(key, None)
            return weight.to(dtype)
        # Also enables grad. torch.inference_mode, interrupted in its Python code, ends when the traceback is freed, and
        # restores all dispatch keys then, those of autocast and of dispatch modes included.
        with torch._C._InferenceMode(False):
            copy = weight.to(dtype)
        self._entries[key] = (weakref.ref(weight), weight._version, weight.data_ptr(), weight.requires_grad, copy)
        return copy

    def _is_exposed(self, weight: Tensor) -> bool:
        return bool(self._exposed) and weight.untyped_storage().data_ptr() in self._exposed


class NoCastCache(CastCache):
    """A cache that stores nothing: every use of a Parameter is a new cast."""

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight.to(dtype)`. Sync: none."""
        return weight.to(dtype)
