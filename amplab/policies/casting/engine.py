"""CastingEngine: applies a PrecisionPolicy to the ops of a thread.

    with CastingEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)      # linear in float16, mse_loss in float32

An engine pushes a torch function mode, which torch.compile traces without a graph break. All state is per thread: an
engine that is active in one thread casts nothing in another. `thread_scopes` tracks what is active in a thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.compiler import is_dynamo_compiling

from amplab.policies.casting.function_modes import (
    CastingMode,
    function_modes,
    insert_above_device,
    push_below_devices,
    push_below_others,
)
from amplab.policies.casting.half_on_cpu import HalfMode
from amplab.policies.casting.plan import ByName, KeptPlan, Plan, build_plan, on_device, torch_nesting
from amplab.policies.casting.steps import CastCache, NoCastCache
from amplab.policies.casting.thread_scopes import THREAD, Scope, cpu_half_mode
from amplab.policies.casting.torch_regions import meet_torch_region
from amplab.policies.policy.precision_policy import PrecisionPolicy
from amplab.policies.signals import DeferredSignals

if TYPE_CHECKING:
    from amplab.policies.casting.compiled_engine import CompiledMode

__all__ = ["CastingEngine"]


class CastingEngine:
    """Casts the arguments of ops as `policy` says, while active or installed in the calling thread.

    Intercepted: every op called from Python on plain tensors and Parameters (operators, methods, torch.*,
    torch.nn.functional.*), the ops inside opened composites, and recomputation inside backward.
    Not intercepted: ops that C++ calls inside an op, `torch.ops.*`, other threads. Tensor subclasses are not cast.

    float64 is never narrowed: an op with a float64 argument runs as in the float32 model. Its 16-bit arguments are
    cast to float32, and torch then promotes the arguments or raises an error. Ops with `out=` run as they are called.
    If two engines are active, the inner one casts; both cast if they have different device types.

    Casts of Parameters are cached until the outermost `active()` block of the thread ends, and edits are detected
    (see `CastCache`). With `install` there is no such block: call `clear_cache` after each optimizer step and at each
    forward.

    Args:
        policy: the policy to apply; None for apex's lists in float16. With `table=None` and no rules nothing is cast;
            only products of CPU halves are computed as `cpu_half_mode()` says. Module rules need a model, to which
            `apply_policy` applies them; the engine alone casts only the ops that follow a ruled module
            (`mixed_arguments`).
        device_type: cast only ops with a tensor on such a device, e.g. "cuda"; None for every device.
        cache_enabled: whether casts of Parameters are cached.

    Attributes:
        ends_casts: whether it stands for a disabled region of torch.autocast.
    """

    ends_casts = False

    def __init__(
        self, policy: PrecisionPolicy | None = None, *, device_type: str | None = None, cache_enabled: bool = True
    ) -> None:
        """Build the plan that is needed first."""
        if not isinstance(policy, PrecisionPolicy | None):
            raise TypeError(
                f"policy={policy!r}: expected a PrecisionPolicy, or None for apex's; pass PrecisionPolicy({policy!r})."
                if isinstance(policy, str)
                else f"policy={policy!r}: expected a PrecisionPolicy, or None for apex's; pass PrecisionPolicy()."
            )
        self.policy = PrecisionPolicy() if policy is None else policy
        self.device_type = device_type
        self.cache_enabled = cache_enabled
        self._cache = CastCache() if cache_enabled else NoCastCache()
        self._plans: dict[tuple[HalfMode, bool, bool], KeptPlan] = {}
        self._name = f"engine_{next(_NUMBERS)}"
        _BY_NAME[self._name] = self
        self._build_first_plan()

    def __repr__(self) -> str:
        """Show the policy in its string form."""
        return f"CastingEngine({str(self.policy)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CastingEngine:
        """Return itself: the copy of a model whose hook refers to an engine uses the same engine."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the arguments only; active scopes and the cache belong to the process."""
        return _rebuilt, (self.policy, self.device_type, self.cache_enabled)

    def active(self) -> Scope:
        """Return a context manager under which the calling thread casts.

        It is re-entrant, and blocks of two engines may end in any order. The outermost block of this engine in the
        thread clears the cache at its end. Sync: none.
        """
        return Scope(self)

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; does nothing if it is installed already.

        The mode is inserted at the bottom of the thread's stack, so that other modes that are open now can close in
        their own order. Signal handlers run after it, as after `uninstall`. Sync: none.
        """
        with DeferredSignals():
            THREAD.own.drop_ended()
            if not self.installed:
                mode = CastingMode(self)
                THREAD.own.installed.append(mode)
                insert_above_device(mode)
                THREAD.own.refresh()

    def uninstall(self) -> None:
        """Undo `install` in the calling thread and clear the cache; does nothing if it is not installed.

        Signal handlers run after it: a mode that is half removed would still count as installed, and cast nothing.
        """
        with DeferredSignals():
            THREAD.own.drop_ended()
            for mode in [mode for mode in THREAD.own.installed if mode.engine is self]:
                self.withdraw(mode)
                THREAD.own.installed.remove(mode)
            THREAD.own.refresh()
            self.clear_cache()

    @property
    def installed(self) -> bool:
        """Whether this engine is installed in the calling thread."""
        return self in [mode.engine for mode in THREAD.own.installed]

    def clear_cache(self) -> None:
        """Drop the cached casts of Parameters, e.g. after an optimizer step. Sync: none."""
        self._cache.clear()

    @property
    def cache(self) -> CastCache:
        """The cached casts of Parameters, for code that casts without this engine's modes."""
        return self._cache

    @property
    def cache_size(self) -> int:
        """The number of cached casts of Parameters."""
        return len(self._cache)

    def require_reasons(self) -> None:
        """Raise RuntimeError if this kind of engine cannot explain its casts. This one can."""

    def is_live(self) -> bool:
        """Whether the topmost mode of the calling thread belongs to this engine and intercepts the next op."""
        modes = THREAD.own.modes
        top = modes[-1] if modes else None
        if top is None or top.engine is not self or not _is_pushed(top):
            return False
        return top.torch_nesting == torch_nesting()  # not so in a disabled region that torch.compile traces

    def new_mode(self) -> CastingMode | CompiledMode:
        """Return a mode of this engine that casts nothing yet."""
        return CastingMode(self)

    def push(self, mode: CastingMode | CompiledMode, *, below_others: bool) -> None:
        """Put a mode of this engine on the calling thread's stack; `CastingThread.give_plans` sets its plan.

        Args:
            mode: from `new_mode`.
            below_others: whether below the modes that others have entered; else it meets ops before those do, but for
                blocks of `torch.device`.
        """
        if isinstance(mode, CastingMode):
            if below_others:
                push_below_others(mode)
            else:
                push_below_devices(mode)

    def withdraw(self, mode: CastingMode | CompiledMode) -> None:
        """Remove a mode of this engine; a second call does nothing."""
        mode.rest()
        if isinstance(mode, CastingMode):
            THREAD.own.withdraw(mode)

    @staticmethod
    def drop_ended_scopes() -> None:
        """Before an op: leave the scopes of the calling thread that have ended, and update the plans of its modes."""
        THREAD.own.drop_ended(before_op=True)

    @staticmethod
    def meet_torch_region(mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Follow a region of torch.autocast that is entered or left inside `mode`; see `torch_regions`."""
        return meet_torch_region(mode, func, args, _uncast_engine)

    def give_plan(self, mode: CastingMode | CompiledMode, half_mode: HalfMode, casts: bool, explained: bool) -> None:
        """Set the plan of `mode` for this combination of switches."""
        if not isinstance(mode, CastingMode):
            return
        if is_dynamo_compiling():
            mode.plan = getattr(self, _plan_attribute(self._name, half_mode, casts, explained))
        else:
            mode.plan = self._plans.get((half_mode, casts, explained)) or self.plan(half_mode, casts, explained)

    def _build_first_plan(self) -> None:
        self.plan(cpu_half_mode(), casts=True, explained=False)

    def plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> KeptPlan:
        """The plan for this combination of switches, built on first use."""
        key = (half_mode, casts, explained)
        if key not in self._plans:
            casts_nothing = not casts or (self.policy.table is None and not self.policy.by_function)
            uncast = None if casts_nothing else functools.partial(self.plan, half_mode, False, explained)
            self._plans[key] = KeptPlan(self.new_plan(half_mode, casts, explained), uncast)
        return self._plans[key]

    def new_plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
        """Build the plan for this combination of switches; `plan` keeps it."""
        plan = build_plan(self.policy, self._cache, half_mode, casts, explained)
        return plan if self.device_type is None else on_device(plan, self.device_type)


@functools.cache
def _uncast_engine(device_type: str) -> CastingEngine:
    engine = CastingEngine(PrecisionPolicy(table=None), device_type=device_type)
    engine.ends_casts = True
    return engine


_NUMBERS = itertools.count()
_BY_NAME: ByName[CastingEngine] = ByName()


def _plan_attribute(engine: str, half_mode: HalfMode, casts: bool, explained: bool) -> str:
    """Make the plan for these switches an attribute of the engine of this name, and return the attribute's name."""
    named = _BY_NAME[engine]
    plan = named.plan(half_mode, casts, explained)
    setattr(named, plan.name, plan)
    return plan.name


# torch.compile calls this instead of tracing it: see `KeptPlan`.
_plan_attribute._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_pushed(mode: object) -> bool:
    depth = _len_torch_function_stack()
    return depth > 0 and (_get_function_stack_at(depth - 1) is mode or mode in function_modes())


def _rebuilt(policy: PrecisionPolicy, device_type: str | None, cache_enabled: bool) -> CastingEngine:
    return CastingEngine(policy, device_type=device_type, cache_enabled=cache_enabled)
