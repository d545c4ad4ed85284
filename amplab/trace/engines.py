"""What a trace needs of the casting engines of this thread and of the compiler.

A trace reads which op table decides, empties the weight caches, and runs compiled functions eagerly. Under a dispatch
mode the compiler would trace the mode itself, and its graph would order ops differently from autograd's numbers.
Compiled *modules* are refused (`step_checks`).
"""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from amplab.policies import CastingEngine, casts_enabled
from amplab.policies.casting_mode import THREAD

__all__ = [
    "ASKS_FOR_DTYPE",
    "NO_ENGINE",
    "NO_TABLE",
    "TORCH_AUTOCAST",
    "clear_cast_caches",
    "compiled_functions_eagerly",
    "table_at_work",
]

NO_ENGINE = None
NO_TABLE = ""
TORCH_AUTOCAST = "torch.autocast"

ASKS_FOR_DTYPE = frozenset(("to", "half", "bfloat16", "float", "double", "type", "type_as", "copy_", "setitem"))
"""Calls in which the code itself asks for another dtype."""


def table_at_work(autocast: bool) -> str | None:
    """Return the name of the op table that decides about this thread's ops just now.

    NO_TABLE where an engine is at work without one, or with casts disabled; where no engine is, TORCH_AUTOCAST or
    NO_ENGINE, as `autocast` says. Sync: none.
    """
    if not THREAD.modes:
        return TORCH_AUTOCAST if autocast else NO_ENGINE
    engine = THREAD.modes[-1].plans
    if not isinstance(engine, CastingEngine) or engine.policy.table is None or not casts_enabled():
        return NO_TABLE
    return engine.policy.table.name


def clear_cast_caches() -> None:
    """Drop the casts of Parameters that this thread's engines keep.

    A trace begins without them, so that it shows every cast of one step, and leaves none of its own. Sync: none.
    """
    for mode in THREAD.modes:
        if isinstance(mode.plans, CastingEngine):
            mode.plans.clear_cache()


def compiled_functions_eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run op by op; nothing is loaded where nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
