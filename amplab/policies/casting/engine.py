"""CastingEngine: carries out a PrecisionPolicy on the ops of a thread.

    with CastingEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)      # linear in float16, mse_loss in float32

An engine pushes a torch function mode, which torch.compile traces without a graph break. All state is per thread: an
engine that is active in one thread casts nothing in another. What is active in a thread is in `thread_scopes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C import _get_function_stack_at, _len_torch_function_stack, _push_on_torch_function_stack

from amplab.policies.casting.half_on_cpu import HalfMode
from amplab.policies.casting.plan import Plan, build_plan, on_device
from amplab.policies.casting.steps import CastCache, NoCastCache
from amplab.policies.casting.thread_scopes import (
    THREAD,
    CastingMode,
    Scope,
    cpu_half_mode,
    function_modes,
    insert_above_device,
    remove,
)
from amplab.policies.policy.precision_policy import PrecisionPolicy

if TYPE_CHECKING:
    from amplab.policies.casting.compiled_engine import CompiledMode

__all__ = ["CastingEngine"]


class CastingEngine:
    """Casts the arguments of ops as `policy` says, while active or installed in the calling thread.

    Seen: every op called from Python on plain tensors and Parameters: operators, methods, torch.*,
    torch.nn.functional.*, and the ops inside opened composites and inside backward's recomputation.
    Not seen: what C++ calls inside an op, `torch.ops.*`, other threads. Tensor subclasses are left alone.

    float64 is never narrowed: an op with a float64 argument runs as in the float32 model, i.e. its
    16-bit arguments are cast to float32 and torch's own promotion, or refusal, does the rest.
    Ops with `out=` run as they are called. Where two engines are active the inner one casts, unless each
    has a device type of its own.

    Casts of Parameters are kept until the outermost `active()` block of the thread ends, and checked
    against edits (see `CastCache`); with `install` there is no such block, so call `clear_cache` after each
    optimizer step and at each forward.

    Args:
        policy: what to carry out; None for apex's lists in float16. With `table=None` nothing is cast, and
            only products of CPU halves are computed as `cpu_half_mode()` says.
        device_type: cast only ops with a tensor on such a device, e.g. "cuda"; None for ops on any.
        cache_enabled: whether casts of Parameters are kept.
    """

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
        self._plans: dict[tuple[HalfMode, bool, bool], Plan] = {}
        self._build_first_plan()

    def __repr__(self) -> str:
        """Show the policy in its string form."""
        return f"CastingEngine({str(self.policy)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CastingEngine:
        """Return itself: an engine belongs to threads, not to the copied model whose hook holds it."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the arguments alone; what is active or cached stays with the process."""
        return _rebuilt, (self.policy, self.device_type, self.cache_enabled)

    def active(self) -> Scope:
        """Return a block in which the calling thread casts. Re-entrant; blocks of two engines may end in any order.

        The outermost block of this engine in the thread clears the cache as it ends. Sync: none.
        """
        return Scope(self)

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; does nothing where installed already.

        The mode goes to the bottom of the thread's stack, so contexts of other modes that are open
        now can close in their own order. Sync: none.
        """
        THREAD.own.drop_ended()
        if not self.installed:
            mode = CastingMode(self)
            THREAD.own.installed.append(mode)
            insert_above_device(mode)
            THREAD.own.refresh()

    def uninstall(self) -> None:
        """Undo `install` in the calling thread and clear the cache; does nothing where not installed."""
        THREAD.own.drop_ended()
        for mode in [mode for mode in THREAD.own.installed if mode.engine is self]:
            THREAD.own.installed.remove(mode)
            self.withdraw(mode)
        THREAD.own.refresh()
        self.clear_cache()

    @property
    def installed(self) -> bool:
        """Whether this engine is installed in the calling thread."""
        return self in [mode.engine for mode in THREAD.own.installed]

    def clear_cache(self) -> None:
        """Drop the kept casts of Parameters, e.g. after an optimizer step. Sync: none."""
        self._cache.clear()

    @property
    def cache(self) -> CastCache:
        """The kept casts of Parameters, for code that casts without this engine's modes."""
        return self._cache

    @property
    def cache_size(self) -> int:
        """How many casts of Parameters are kept."""
        return len(self._cache)

    def require_reasons(self) -> None:
        """Raise RuntimeError where an engine gives no reasons; this one does."""

    def is_live(self) -> bool:
        """Whether the topmost mode of the calling thread is one of this engine, and sees the next op."""
        modes = THREAD.own.modes
        return bool(modes) and modes[-1].engine is self and _is_pushed(modes[-1])

    def new_mode(self) -> CastingMode | CompiledMode:
        """Return a mode of this engine that casts nothing yet."""
        return CastingMode(self)

    def push(self, mode: CastingMode | CompiledMode) -> None:
        """Let a mode of this engine see the ops of the calling thread; `CastingThread.give_plans` gives it its plan."""
        if isinstance(mode, CastingMode):
            _push_on_torch_function_stack(mode)

    def withdraw(self, mode: CastingMode | CompiledMode) -> None:
        """Take a mode of this engine off again; does nothing the second time."""
        mode.rest()
        mode.entered_by = None
        if isinstance(mode, CastingMode):
            mode.withdrawn = True
            if not remove(mode):  # perhaps it handles a call, after which torch pushes it again
                THREAD.own.may_be_pushed_again = True

    @staticmethod
    def drop_ended_scopes() -> None:
        """Leave the scopes of the calling thread that have ended; its modes get their plans anew."""
        THREAD.own.drop_ended()

    def give_plan(self, mode: CastingMode | CompiledMode, half_mode: HalfMode, casts: bool, explained: bool) -> None:
        """Give `mode` the plan for this combination of switches."""
        if isinstance(mode, CastingMode):
            mode.plan = self._plans.get((half_mode, casts, explained)) or self.plan(half_mode, casts, explained)

    def _build_first_plan(self) -> None:
        self.plan(cpu_half_mode(), casts=True, explained=False)  # torch.compile can trace `active`, not this

    def plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
        """The plan for this combination of switches, built on first use."""
        key = (half_mode, casts, explained)
        if key not in self._plans:
            self._plans[key] = self.new_plan(half_mode, casts, explained)
        return self._plans[key]

    def new_plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
        """Build the plan for this combination of switches; `plan` keeps it."""
        plan = build_plan(self.policy, self._cache, half_mode, casts, explained)
        return plan if self.device_type is None else on_device(plan, self.device_type)


def _is_pushed(mode: object) -> bool:
    depth = _len_torch_function_stack()
    return depth > 0 and (_get_function_stack_at(depth - 1) is mode or mode in function_modes())


def _rebuilt(policy: PrecisionPolicy, device_type: str | None, cache_enabled: bool) -> CastingEngine:
    return CastingEngine(policy, device_type=device_type, cache_enabled=cache_enabled)
