"""Access of a trace to the casting engines of this thread and to the compiler.

A trace reads which op table decides, clears the weight caches, and runs compiled functions eagerly. Under a dispatch
mode the compiler would trace the mode itself, and its graph would order ops differently from autograd's sequence
numbers. Compiled *modules* are refused (`argument_checks`).
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies import OpTable, thread_engines
from amplab.policies.casting.thread_scopes import engine_at_work
from amplab.trace.as_found import Undo

__all__ = [
    "REQUESTS_DTYPE",
    "NO_ENGINE",
    "NO_TABLE",
    "TORCH_AUTOCAST",
    "clear_cast_caches",
    "compiled_functions_eagerly",
    "current_table",
]

NO_ENGINE = None
NO_TABLE = ""
TORCH_AUTOCAST = "torch.autocast"

REQUESTS_DTYPE = frozenset(("to", "half", "bfloat16", "float", "double", "type", "type_as", "copy_", "setitem"))
"""Calls with which code requests another dtype."""


def current_table(autocast: bool) -> str | None:
    """Return the name of the op table that decides the dtypes of this thread's ops now.

    NO_TABLE if the innermost engine has none or casts are disabled. Without an engine, TORCH_AUTOCAST if `autocast` is
    set, else NO_ENGINE. Sync: none.
    """
    engine, may_cast = engine_at_work()
    if engine is None:
        return TORCH_AUTOCAST if autocast else NO_ENGINE
    table = engine.policy.table
    return table.name if isinstance(table, OpTable) and may_cast else NO_TABLE


def clear_cast_caches() -> None:
    """Clear the weight caches of this thread's engines, so that a trace shows every cast of one step. Sync: none."""
    for engine in thread_engines():
        engine.clear_cache()


class _Eager:
    """The blocks of `compiled_functions_eagerly` that run: torch has one stance for all threads.

    The first one sets it, and the last one restores it, whichever these are.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may begin a block in another one's first line
        self._blocks: set[object] = set()
        self._before: Any = None
        renew_lock_in_forks(self, "_lock")

    def enter(self, block: object) -> None:
        with self._lock:
            is_first = not self._blocks
            if is_first:
                self._before = sys.modules["torch._dynamo.eval_frame"]._stance
            self._blocks.add(block)  # first: an interrupt may follow
            if is_first:
                torch.compiler.set_stance("force_eager")

    def leave(self, block: object) -> None:
        """A second call for a block does nothing."""
        with self._lock:
            if self._blocks == {block}:
                sys.modules["torch._dynamo.eval_frame"]._set_stance(self._before)
            self._blocks.discard(block)


_EAGER = _Eager()


@contextmanager
def compiled_functions_eagerly() -> Iterator[None]:
    """Run functions given to `torch.compile` eagerly in the block. Imports no compiler.

    Reference: torch.compiler.set_stance.
    """
    with Undo() as undo:
        if "torch._dynamo.eval_frame" in sys.modules:
            block = object()
            undo.add(partial(_EAGER.leave, block))
            _EAGER.enter(block)
        yield
