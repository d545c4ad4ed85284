"""From a policy to steps: what the casting mode does for each function, decided once and looked up.

A plan is a plain dict, function -> step; a step is called as step(mode, func, args, kwargs), casts the
arguments and runs the op. A function without a step runs as it is. Which plan a mode holds
depends on the policy, on how CPU halves are multiplied, on whether casts are disabled, and on
whether somebody wants explanations; an engine builds each combination once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from amplab.policies.argument_casts import HALVES, cast_to, floating_tensors, lowered, raised, widest
from amplab.policies.cast_cache import CastCache
from amplab.policies.cast_policy import CastPolicy
from amplab.policies.composites import COMPOSITES, opened
from amplab.policies.explained_plan import ExplainedPlan, reporting_run, reporting_step
from amplab.policies.half_on_cpu import PRODUCTS, HalfMode, accumulated
from amplab.policies.op_table import OpRule
from amplab.policies.precision_policy import PrecisionPolicy

if TYPE_CHECKING:
    from amplab.policies.casting_mode import CastingMode

__all__ = ["Plan", "Run", "Step", "build_plan"]

Run = Callable[["CastingMode", Callable[..., Any], Any, dict[str, Any]], Any]
Step = Callable[["CastingMode", Callable[..., Any], tuple, dict[str, Any]], Any]
Plan = dict[Callable[..., Any], Step]

_EXPOSING = (
    torch.Tensor.data.__get__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__dlpack__,
)
"""What hands out a tensor's memory without its version counter."""


def build_plan(policy: PrecisionPolicy, cache: CastCache, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
    """The plan of `policy`; without `casts`, only how CPU halves are multiplied and composites opened.

    Args:
        policy: what to carry out.
        cache: where casts of Parameters are kept.
        half_mode: how CPU halves are multiplied.
        casts: whether arguments are cast at all.
        explained: whether steps report to the mode's explanation.
    """
    runs: Plan = {func: _opening_run(func) for func in COMPOSITES}
    if half_mode == "fp32_accumulate":
        runs.update(dict.fromkeys(PRODUCTS, _run_accumulated))
    rules = policy.table.by_function if policy.table is not None and casts else {}
    plan: Plan = ExplainedPlan(policy) if explained else {}
    for func in (*runs, *rules):
        rule = rules.get(func)
        run = runs.get(func) or _runner(func, rule)
        if explained:
            run = reporting_run(run, rule or policy.unlisted(func))
        step = run if rule is None else _STEPS[rule.cast](rule, policy.compute_dtype, cache, run)
        plan[func] = reporting_step(step, rule, policy) if explained and rule is not None else step
    plan.update(dict.fromkeys(_EXPOSING, _exposing_step(cache)) if rules else {})
    return plan


def _runner(func: Callable[..., Any], rule: OpRule) -> Run:
    # 1 / x is promote on apex's list, and the reciprocal inside it is fp32: both rows are to act.
    opens = rule.cast is CastPolicy.PROMOTE and isinstance(func, types.FunctionType)
    return _opening_run(func) if opens else _run_plain


def _run_plain(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _run_accumulated(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return accumulated(func, args, kwargs)


def _opening_run(composite: Callable[..., Any]) -> Run:
    inside = opened(composite)

    def run(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if floating_tensors((*args, *kwargs.values())) is None:  # a tensor subclass may have its own version
            return func(*args, **kwargs)
        with mode:
            return inside(*args, **kwargs)

    return run


def _exposing_step(cache: CastCache) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        cache.expose(args[0])
        return func(*args, **kwargs)

    return step


def _lower_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    raise_step = _fp32_step(rule, dtype, cache, run)

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        cast_args = lowered(args, dtype, cache)
        if cast_args is None:
            return raise_step(mode, func, args, kwargs)
        if kwargs:
            values = lowered(kwargs.values(), dtype, cache)
            if values is None:
                return raise_step(mode, func, args, kwargs)
            if kwargs.get("out") is not None:  # the caller chose where to write, and so the dtype
                return run(mode, func, args, kwargs)
            kwargs = dict(zip(kwargs, values))
        return run(mode, func, cast_args, kwargs)

    return step


def _fp32_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        cast_args = raised(args)
        values = raised(kwargs.values()) if kwargs else ()
        if cast_args is None or values is None or kwargs.get("out") is not None:
            return run(mode, func, args, kwargs)
        return run(mode, func, cast_args, dict(zip(kwargs, values)))

    return step


def _set_dtype_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        first = floating_tensors(args[:1])
        chosen = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
        if first and first[0].dtype in HALVES and not chosen:
            kwargs = {**kwargs, "dtype": torch.float32}
        return run(mode, func, args, kwargs)

    return step


def _promote_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = floating_tensors((*args, *kwargs.values()) if kwargs else args)
        if tensors is None or len(tensors) < 2 or kwargs.get("out") is not None:
            return run(mode, func, args, kwargs)
        wide = widest(tensors)
        if wide is None:
            return run(mode, func, args, kwargs)
        return run(mode, func, cast_to(args, wide), dict(zip(kwargs, cast_to(kwargs.values(), wide))))

    return step


def _match_self_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = floating_tensors((*args, *kwargs.values()) if kwargs else args)
        if not tensors or tensors[0] is not args[0]:
            return run(mode, func, args, kwargs)
        own = tensors[0].dtype
        if all(tensor.dtype is own for tensor in tensors):
            return run(mode, func, args, kwargs)
        others = cast_to(args[1:], own)
        return run(mode, func, (args[0], *others), dict(zip(kwargs, cast_to(kwargs.values(), own))))

    return step


def _banned_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    in_place = rule.op.endswith("_")
    match_self = _match_self_step(rule, dtype, cache, run)

    def step(mode: CastingMode, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        looked_at = args[:1] if in_place else (*args, *kwargs.values())
        for tensor in floating_tensors(looked_at) or ():
            if tensor.dtype in HALVES:
                raise NotImplementedError(_refusal(rule, tensor.dtype))
        return match_self(mode, func, args, kwargs) if in_place else run(mode, func, args, kwargs)

    return step


def _fall_through_step(rule: OpRule, dtype: torch.dtype, cache: CastCache, run: Run) -> Step:
    return run


def _refusal(rule: OpRule, dtype: torch.dtype) -> str:
    given = str(dtype).removeprefix("torch.")
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


_STEPS: dict[CastPolicy, Callable[[OpRule, torch.dtype, CastCache, Run], Step]] = {
    CastPolicy.LOWER_PRECISION_FP: _lower_step,
    CastPolicy.FP32: _fp32_step,
    CastPolicy.FP32_SET_OPT_DTYPE: _set_dtype_step,
    CastPolicy.PROMOTE: _promote_step,
    CastPolicy.SEQUENCE_PROMOTE: _promote_step,
    CastPolicy.MATCH_SELF: _match_self_step,
    CastPolicy.BANNED: _banned_step,
    CastPolicy.FALL_THROUGH: _fall_through_step,
}
