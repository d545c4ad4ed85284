"""CastingEngine: carries out a PrecisionPolicy on the ops of a thread; and the scoped switches beside it.

    with CastingEngine(PrecisionPolicy()).active():
        loss = F.mse_loss(model(x), y)      # linear in float16, mse_loss in float32

An engine pushes a torch function mode, which torch.compile traces without a graph break. All
state is per thread: an engine active in one thread casts nothing in another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from amplab.policies.cast_cache import CastCache, NoCastCache
from amplab.policies.casting_mode import THREAD, CastingMode, insert_above_device, is_pushed, remove
from amplab.policies.casting_plan import Plan, build_plan, on_device
from amplab.policies.decision import Explanation
from amplab.policies.half_on_cpu import DEFAULT_HALF_MODE, HalfMode
from amplab.policies.precision_policy import PrecisionPolicy

__all__ = [
    "CastingEngine",
    "casting_engine",
    "casts_enabled",
    "cpu_half",
    "cpu_half_mode",
    "disable_casts",
    "explaining",
    "thread_engines",
]


class CastingEngine:
    """Casts the arguments of ops as `policy` says, while active or installed in the calling thread.

    Seen: every op called from Python on plain tensors and Parameters: operators, methods, torch.*,
    torch.nn.functional.*, and the ops inside opened composites and inside backward's recomputation.
    Not seen: what C++ calls inside an op, `torch.ops.*`, other threads. Tensor subclasses are left alone.

    float64 is never narrowed: an op with a float64 argument runs as in the float32 model, i.e. its
    16-bit arguments are cast to float32 and torch's own promotion, or refusal, does the rest.
    Ops with `out=` run as they are called. Where two engines are active the inner one casts, unless each
    minds a device type of its own.

    Casts of Parameters are kept until the outermost `active()` block of the thread ends, and checked
    against edits (see `cast_cache`); with `install` there is no such block, so call `clear_cache` after each
    optimizer step and at each forward.

    Args:
        policy: what to carry out; None for apex's lists in float16. With `table=None` nothing is cast, and
            only products of CPU halves are computed as `cpu_half_mode()` says.
        device_type: mind only ops with a tensor on such a device, e.g. "cuda"; None for ops on any.
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
        self.plan(cpu_half_mode(), casts=True, explained=False)  # torch.compile can trace `active`, not this

    def __repr__(self) -> str:
        """Show the policy in its string form."""
        return f"CastingEngine({str(self.policy)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CastingEngine:
        """Return itself: an engine belongs to threads, not to the copied model whose hook holds it."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the arguments alone; what is active or cached stays with the process."""
        return _rebuilt, (self.policy, self.device_type, self.cache_enabled)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Cast in the calling thread inside the block. Re-entrant; ends with the block, exceptions included.

        The outermost block of this engine in the thread clears the cache as it ends. Sync: none.
        """
        mode = self.enter()
        try:
            yield
        finally:
            self.leave(mode)

    def enter(self) -> CastingMode | None:
        """Begin what `active` does in its block; give `leave` what this returns, in the same thread."""
        THREAD.entered.append(self)
        return None if self._is_live() else self._push()

    def leave(self, mode: CastingMode | None) -> None:
        """End what `enter` began. Blocks of two engines may end in any order."""
        if mode is not None:
            self._withdraw(mode)
        THREAD.entered.remove(self)
        if self not in THREAD.entered:
            self.clear_cache()

    def install(self) -> None:
        """Cast in the calling thread until `uninstall`; does nothing where installed already.

        The mode goes to the bottom of the thread's stack, so contexts of other modes that are open
        now can close in their own order. Sync: none.
        """
        if self.installed:
            return
        mode = CastingMode(self)
        insert_above_device(mode)
        THREAD.modes.insert(len(THREAD.installed), mode)  # under the modes of open `active()` blocks
        THREAD.installed.append(mode)
        THREAD.refresh()

    def uninstall(self) -> None:
        """Undo `install` in the calling thread and clear the cache; does nothing where not installed."""
        for mode in [mode for mode in THREAD.installed if mode.plans is self]:
            THREAD.installed.remove(mode)
            self._withdraw(mode)
        self.clear_cache()

    @property
    def installed(self) -> bool:
        """Whether this engine is installed in the calling thread."""
        return any(mode.plans is self for mode in THREAD.installed)

    def clear_cache(self) -> None:
        """Drop the kept casts of Parameters, e.g. after an optimizer step. Sync: none."""
        self._cache.clear()

    @property
    def cache(self) -> CastCache:
        """Where the casts of Parameters are kept, for those who cast beside this engine's modes."""
        return self._cache

    @property
    def cache_size(self) -> int:
        """How many casts of Parameters are kept."""
        return len(self._cache)

    def plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
        """The plan that this engine's modes run, built on first use."""
        key = (half_mode, casts, explained)
        if key not in self._plans:
            plan = build_plan(self.policy, self._cache, half_mode, casts, explained)
            self._plans[key] = plan if self.device_type is None else on_device(plan, self.device_type)
        return self._plans[key]

    def require_reasons(self) -> None:
        """Raise RuntimeError where an engine gives no reasons; this one does."""

    def _is_live(self) -> bool:
        return bool(THREAD.modes) and THREAD.modes[-1].plans is self and is_pushed(THREAD.modes[-1])

    def _push(self) -> CastingMode:
        mode = CastingMode(self)
        mode.__enter__()
        THREAD.modes.append(mode)
        THREAD.refresh()
        return mode

    def _withdraw(self, mode: CastingMode) -> None:
        remove(mode)
        THREAD.modes.remove(mode)
        THREAD.refresh()


def _rebuilt(policy: PrecisionPolicy, device_type: str | None, cache_enabled: bool) -> CastingEngine:
    return CastingEngine(policy, device_type=device_type, cache_enabled=cache_enabled)


def casting_engine(device_type: str) -> CastingEngine | None:
    """The engine that decides about ops on `device_type` in the calling thread, e.g. "cpu"; None without one."""
    engine = THREAD.live(device_type)
    return engine if isinstance(engine, CastingEngine) else None


def thread_engines() -> tuple[CastingEngine, ...]:
    """The engines at work in the calling thread, outermost first; the last one is the one that casts."""
    return tuple(mode.plans for mode in THREAD.modes if isinstance(mode.plans, CastingEngine))


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No engine of this thread casts inside the block, not even one entered in it. Nests; exception-safe.

    Products of CPU halves are still computed as `cpu_half_mode()` says. Sync: none.
    """
    THREAD.disabled += 1
    THREAD.refresh()
    try:
        yield
    finally:
        THREAD.disabled -= 1
        THREAD.refresh()


def casts_enabled() -> bool:
    """Whether engines of this thread may cast: no `disable_casts` block is open, and no optimizer step is running."""
    return THREAD.casts()


@contextlib.contextmanager
def cpu_half(mode: HalfMode) -> Iterator[None]:
    """How engines of this thread multiply CPU halves inside the block.

    Args:
        mode: "fp32_accumulate" (float32 products and sums, one rounding) or "native" (the CPU's half kernel).

    Raises:
        ValueError: another word was given.
    """
    if mode not in ("fp32_accumulate", "native"):
        raise ValueError(
            f"cpu_half({mode!r}): expected 'fp32_accumulate' or 'native'; "
            "use 'fp32_accumulate' on a CPU without fp16 arithmetic."
        )
    outer, THREAD.half_mode = THREAD.half_mode, mode
    THREAD.refresh()
    try:
        yield
    finally:
        THREAD.half_mode = outer
        THREAD.refresh()


def cpu_half_mode() -> HalfMode:
    """How this thread multiplies CPU halves: the innermost `cpu_half`, else what suits the CPU."""
    return THREAD.half_mode or DEFAULT_HALF_MODE


@contextlib.contextmanager
def explaining() -> Iterator[Explanation]:
    """Yield an Explanation whose `.decision` follows the engines of this thread, op by op.

    A block inside another yields the same Explanation. Costs nothing outside the block.

    Raises:
        RuntimeError: an engine that gives no reasons is at work (`CompiledEngine`).
    """
    for engine in thread_engines():
        engine.require_reasons()
    outer = THREAD.explanation
    THREAD.explanation = explanation = outer or Explanation()
    THREAD.refresh()
    try:
        yield explanation
    finally:
        THREAD.explanation = outer
        THREAD.refresh()
