"""Access of a trace to the casting engines of this thread and to the compiler.

A trace reads which op table decides, clears the weight caches, and runs compiled functions eagerly. Under a dispatch
mode the compiler would trace the mode itself, and its graph would order ops differently from autograd's sequence
numbers. Compiled *modules* are refused (`argument_checks`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

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


@contextmanager
def compiled_functions_eagerly() -> Iterator[None]:
    """Run functions given to `torch.compile` eagerly in the block. Imports no compiler.

    Reference: torch.compiler.set_stance.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    with Undo() as undo:
        if eval_frame is not None:
            undo.add(partial(eval_frame._set_stance, eval_frame._stance))
            torch.compiler.set_stance("force_eager")
        yield
