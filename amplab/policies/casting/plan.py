"""The plan of a policy: what the casting mode does for each function, built once and looked up for each op.

A plan is a plain dict, function -> step; a function without a step runs unchanged. The plan of a mode depends on the
policy, on how CPU halves are multiplied, on whether casts are disabled, and on whether explanations are requested; an
engine builds each combination once. The steps are in `steps`. This module has the functions that run an op after its
arguments were cast.

A function mode intercepts a function that is written in Python, such as F.multi_head_attention_forward, as one call.
The mode is off while it handles that call, so it would not intercept the linear and the softmax inside. Such functions
are called composites. `opened` returns a composite's own code without torch's check for overrides, and the plan runs
that code with the mode on. Tensor.backward is a composite, so that what a checkpoint or a user's autograd.Function
computes in it is cast as in the forward.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from amplab.policies.casting.explanation import ExplainedPlan, reporting_run, reporting_step
from amplab.policies.casting.half_on_cpu import PRODUCTS, WITHOUT_KERNEL, HalfMode, accumulated
from amplab.policies.casting.mixed_arguments import mixed_rules, mixed_step
from amplab.policies.casting.steps import (
    CastCache,
    Run,
    Step,
    StepParts,
    floating_tensors,
    lies_on,
    make_step,
    restoring_step,
)
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.tables.apex_table import APEX
from amplab.policies.tables.op_table import CastPolicy, OpRule, OpTable, resolve
from amplab.policies.tables.torch_cpu_table import ON_THE_CPU

if TYPE_CHECKING:
    from amplab.policies.casting.thread_scopes import CastingMode

__all__ = [
    "COMPOSITES",
    "KeptPlan",
    "NO_PLAN",
    "Plan",
    "build_plan",
    "composites_of",
    "on_device",
    "opened",
    "_step_name",
]

Plan = dict[Callable[..., Any], Step]


class KeptPlan:
    """A plan with a name that no other plan of the process has.

    torch.compile guards every item of a dict that it reads. Here it guards the name, and the steps that it reads, which
    `_step_name` makes attributes.

    Attributes:
        get: function -> step, or None for a function that runs as it is.
        name: what torch.compile guards.
    """

    def __init__(self, steps: Plan) -> None:
        self.get: Callable[[Callable[..., Any]], Step | None] = steps.get
        self.name = f"plan_{next(_NUMBERS)}"
        _BY_NAME[self.name] = self

    def traced_step(self, func: Callable[..., Any]) -> Step | None:
        """As `get`, for torch.compile."""
        name = _step_name(self.name, func)
        step: Step | None = None if name is None else getattr(self, name)
        return step


_NUMBERS = itertools.count()
_BY_NAME: weakref.WeakValueDictionary[str, KeptPlan] = weakref.WeakValueDictionary()
NO_PLAN = KeptPlan({})
"""The plan of a mode that casts nothing."""


def _step_name(plan: str, func: Callable[..., Any]) -> str | None:
    """The attribute of the plan of this name that is the step of `func`; None where it has none."""
    kept = _BY_NAME[plan]
    step = kept.get(func)
    if step is None:
        return None
    name = f"step_{id(step)}"
    setattr(kept, name, step)
    return name


# torch.compile calls this instead of tracing it. The attribute is the one that torch.compiler.assume_constant_result
# sets; calling that function would import the compiler.
_step_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


_EXPOSING = (
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]  # torch declares a Tensor: it is a descriptor
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__dlpack__,
)
"""Functions that give access to a tensor's memory without its version counter."""


def build_plan(policy: PrecisionPolicy, cache: CastCache, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
    """Return the plan of `policy`.

    Args:
        policy: the policy to apply.
        cache: the cache for casts of Parameters.
        half_mode: how CPU halves are multiplied.
        casts: whether arguments are cast; if False, the plan only multiplies CPU halves and opens composites.
        explained: whether steps report to the mode's explanation.
    """
    composites = composites_of(policy.table if casts else None)
    returns_rule_dtype = casts and policy.table is None and not policy.cast_outputs_back
    runs: dict[Callable[..., Any], Run] = {func: _opening_run(func) for func in composites}
    runs[torch.Tensor.unflatten] = _run_unflatten
    if half_mode == "fp32_accumulate":
        runs.update(dict.fromkeys(PRODUCTS, _run_accumulated))
    runs = dict.fromkeys(WITHOUT_KERNEL, _run_without_kernel) | runs
    rules = policy.by_function if casts else {}
    plan: Plan = ExplainedPlan(policy) if explained else {}
    if rules:
        plan.update(dict.fromkeys(_EXPOSING, _exposing_step(cache)))
    for func in (*runs, *rules):
        rule = policy.explain(func) if func in rules else policy.unlisted(func)
        whole = rule.by_user and rule.cast is not CastPolicy.FALL_THROUGH  # the user rules over all that is inside
        run = _run_plain if whole and func in composites else runs.get(func) or _runner(func, rule)
        reports = explained and (whole or func not in composites)  # the ops inside a composite report for themselves
        parts = StepParts(rule, policy.precision(func), cache, reporting_run(run, rule) if reports else run)
        restores = rule.by_user and policy.table is None and not returns_rule_dtype
        step = restoring_step(make_step(parts)) if restores else make_step(parts)
        plan[func] = reporting_step(step, rule, parts.precision, restores) if reports else step
    if returns_rule_dtype and (policy.op_rules or policy.module_rules):
        _add_mixed_steps(plan, policy, runs, explained)
    if casts and policy.table is not None:
        _add_cpu_steps(plan, policy, cache, runs, explained)
    return plan


def _add_cpu_steps(
    plan: Plan, policy: PrecisionPolicy, cache: CastCache, runs: dict[Callable[..., Any], Run], explained: bool
) -> None:
    """Add the steps of ops that `ON_THE_CPU` names and the policy does not; they are for tensors on the CPU."""
    for func, rule in ON_THE_CPU.by_function.items():
        if func in policy.by_function:
            continue
        run = runs.get(func, _run_plain)
        parts = StepParts(rule, policy.precision(func), cache, reporting_run(run, rule) if explained else run)
        step = make_step(parts)
        step = reporting_step(step, rule, parts.precision, restores=False) if explained else step
        plan[func] = _bound_step(step, "cpu", plan.get(func))


def _add_mixed_steps(plan: Plan, policy: PrecisionPolicy, runs: dict[Callable[..., Any], Run], explained: bool) -> None:
    """Add the steps of ops that may get what a rule returns together with tensors of the other dtype."""
    for func, rule in mixed_rules():
        if func in policy.by_function:
            continue
        run = cast_run = runs.get(func, _run_plain)
        if explained:
            run, cast_run = reporting_run(run, policy.unlisted(func)), reporting_run(cast_run, rule)
        step = mixed_step(rule, func, policy.tensor_dtype, run, cast_run)
        plan[func] = reporting_step(step, rule, policy.compute_dtype, restores=False) if explained else step


def on_device(plan: Plan, device_type: str) -> Plan:
    """Return `plan` for ops with a tensor on `device_type`; other ops run unchanged."""
    bound = copy.copy(plan)  # a copy keeps the steps that an `ExplainedPlan` makes for other functions
    bound.update({func: _bound_step(step, device_type) for func, step in plan.items()})
    return bound


def _bound_step(step: Step, device_type: str, elsewhere: Step | None = None) -> Step:
    def bound(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if lies_on(args, device_type) or (kwargs and lies_on(kwargs.values(), device_type)):
            return step(mode, func, args, kwargs)
        return func(*args, **kwargs) if elsewhere is None else elsewhere(mode, func, args, kwargs)

    return bound


def _runner(func: Callable[..., Any], rule: OpRule) -> Run:
    # 1 / x is promote on apex's list, and the reciprocal inside it is fp32: both rows apply.
    opens = rule.cast is CastPolicy.PROMOTE and isinstance(func, types.FunctionType)
    return _opening_run(func) if opens else _run_plain


def _run_plain(_mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _run_accumulated(_mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return accumulated(func, args, kwargs)


def _run_without_kernel(_mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = floating_tensors((*args, *kwargs.values()))
    if tensors and tensors[0].dtype is torch.bfloat16:
        return accumulated(func, args, kwargs, torch.bfloat16)
    return accumulated(func, args, kwargs)


def _run_unflatten(_mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    # Under any function mode torch.compile fails on the super() call in the method; attention calls it.
    return (torch.unflatten if torch.compiler.is_compiling() else func)(*args, **kwargs)


def _opening_run(composite: Callable[..., Any]) -> Run:
    inside = opened(composite)

    def run(mode: CastingMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if floating_tensors((*args, *kwargs.values())) is None:  # a tensor subclass may have its own version
            return func(*args, **kwargs)
        with mode:
            return inside(*args, **kwargs)

    return run


def _exposing_step(cache: CastCache) -> Step:
    def step(_mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache.expose(args[0])
        return func(*args, **kwargs)

    return step


def _fall_through(table: OpTable) -> frozenset[Callable[..., Any]]:
    found = (resolve(spelling) for row in table.rows_of(CastPolicy.FALL_THROUGH) for spelling in row.spellings)
    return frozenset(func for func in found if func is not None)


COMPOSITES = _fall_through(APEX)
"""Functions written in Python whose inner ops have their own rows, in every table."""


def composites_of(table: OpTable | None) -> frozenset[Callable[..., Any]]:
    """Return COMPOSITES and the functions that fall through in `table`, whose lists may name only the ops inside."""
    return COMPOSITES if table is None else COMPOSITES | _fall_through(table)


def _no_override(*_args: Any) -> bool:
    return False


@functools.cache
def opened(func: types.FunctionType) -> types.FunctionType:
    """Return `func` without its check for `__torch_function__`; built-in functions are returned unchanged.

    >>> from torch.nn import functional as F
    >>> opened(F.multi_head_attention_forward).__code__ is F.multi_head_attention_forward.__code__
    True
    """
    inner = getattr(func, "__wrapped__", func)
    if not isinstance(inner, types.FunctionType):
        return func
    scope = {name: value for name, value in inner.__globals__.items() if name != "__name__"}
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope.update(dict.fromkeys(checks, _no_override))
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
