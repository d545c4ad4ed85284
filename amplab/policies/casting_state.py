"""CastingState: which engines cast in a thread just now, to be brought back later, in that thread or in another.

What runs a second time (the recomputation of a checkpoint, the backward of an autograd function) must cast as it did
the first time, whatever is active around it by then. The stack of function modes is handed from the thread that calls
backward to the threads of the autograd engine, what amplab notes per thread is not: there the stack itself is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from torch.overrides import _get_current_function_mode_stack

from amplab.policies.casting_mode import THREAD, CastingMode, pop_stack, push_stack
from amplab.policies.engine import CastingEngine
from amplab.policies.half_on_cpu import HalfMode

__all__ = ["CastingState", "casting_state"]


@dataclasses.dataclass(frozen=True)
class CastingState:
    """What decides about the casts of a thread.

    Attributes:
        engines: the engines at work, outermost first.
        disabled: how many `disable_casts` blocks are open, and calls run for which casts are suspended.
        half_mode: the word of the innermost `cpu_half`; None outside.
    """

    engines: tuple[CastingEngine, ...]
    disabled: int
    half_mode: HalfMode | None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Cast in the calling thread as in this state, and in no other way, inside the block. Sync: none."""
        outer = THREAD.modes, THREAD.disabled, THREAD.half_mode, THREAD.suspended
        stack = pop_stack()
        entered: list[CastingEngine] = []
        try:
            push_stack([mode for mode in reversed(stack) if not isinstance(mode, CastingMode)])
            _rest_all()
            THREAD.modes, THREAD.disabled, THREAD.half_mode, THREAD.suspended = [], self.disabled, self.half_mode, []
            for engine in self.engines:
                engine.enter()
                entered.append(engine)
            yield
        finally:
            _rest_all()
            pop_stack()
            push_stack(list(reversed(stack)))
            THREAD.modes, THREAD.disabled, THREAD.half_mode, THREAD.suspended = outer
            THREAD.refresh()
            _left(entered)


def _rest_all() -> None:
    """Take the plans from this thread's modes: some engines cast without being on the stack."""
    for mode in THREAD.modes:
        mode.plan = {}


def _left(engines: list[CastingEngine]) -> None:
    for engine in engines:
        THREAD.entered.remove(engine)
        if engine not in THREAD.entered and not any(mode.plans is engine for mode in THREAD.modes):
            engine.clear_cache()


def casting_state() -> CastingState:
    """The state of the calling thread. Sync: none."""
    stack = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, CastingMode)]
    THREAD.drop_ended_calls()
    disabled = THREAD.disabled + len(THREAD.suspended)
    return CastingState(tuple(mode.plans for mode in THREAD.modes or stack), disabled, THREAD.half_mode)
