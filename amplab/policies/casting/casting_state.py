"""CastingState: which engines cast in a thread, to be restored later, in that thread or in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from amplab.policies.casting.function_modes import CastingMode, function_modes, set_function_modes
from amplab.policies.casting.half_on_cpu import HalfMode
from amplab.policies.casting.thread_scopes import THREAD, CastingThread, Scope, thread_engines

if TYPE_CHECKING:
    from amplab.policies.casting.compiled_engine import CompiledMode
    from amplab.policies.casting.engine import CastingEngine

__all__ = ["CastingState", "casting_state"]


class CastingState(NamedTuple):
    """The state that determines the casts of a thread, to be restored later in that thread or in another.

    Code that runs a second time (the recomputation of a checkpoint, the backward of an autograd function) must cast
    as it did the first time, even if other engines are active then.

    Attributes:
        engines: the active engines, outermost first.
        disabled: whether casts are disabled.
        half_mode: the argument of the innermost `cpu_half`; None outside.
    """

    engines: tuple[CastingEngine, ...]
    disabled: bool
    half_mode: HalfMode | None

    def active(self) -> Scope:
        """Return a context manager under which the calling thread casts exactly as in this state. Sync: none."""
        return _StateScope(self)


class _StateScope(Scope):
    """A block that replaces all scopes of the thread by those of a state."""

    def __init__(self, state: CastingState) -> None:
        super().__init__()
        self._state = state
        self._replaced: _Outer | None = None

    def _begin(self, thread: CastingThread) -> None:
        outer = _Outer(thread.scopes, thread.installed, function_modes())
        self._replaced = outer
        for mode in thread.modes:
            mode.rest()  # modes of compiled engines cast even if they are not on the stack
        set_function_modes([mode for mode in outer.function_modes if not isinstance(mode, CastingMode)])
        thread.scopes, thread.installed = [self], []
        thread.refresh()
        Scope(disables=self._state.disabled, half_mode=self._state.half_mode).enter(None)
        for engine in self._state.engines:
            Scope(engine).enter(None)

    def _end(self, thread: CastingThread) -> None:
        if self._replaced is None:
            return
        if self in thread.scopes:
            for mode in thread.modes:
                mode.engine.withdraw(mode)
        thread.scopes, thread.installed = self._replaced.scopes, self._replaced.installed
        set_function_modes(self._replaced.function_modes)
        thread.refresh()
        self._replaced = None
        for engine in self._state.engines:
            if engine not in [scope.engine for scope in thread.scopes] and engine not in thread_engines():
                engine.clear_cache()


class _Outer(NamedTuple):
    scopes: list[Scope]
    installed: list[CastingMode | CompiledMode]
    function_modes: list[Any]


def casting_state() -> CastingState:
    """The state of the calling thread. Sync: none."""
    THREAD.own.drop_ended()
    # autograd passes the stack of function modes to its threads, but not THREAD, so there the stack is read.
    modes = THREAD.own.modes or [mode for mode in function_modes() if isinstance(mode, CastingMode)]
    return CastingState(tuple(mode.engine for mode in modes), bool(THREAD.own.disabled), THREAD.own.half_mode)
