"""Recompute parts of modules with a rule under that rule, although they are called outside of the module's forward.

    class Block(nn.Module):
        def forward(self, x):
            return checkpoint(self.inner, x)      # backward calls self.inner: no hook of Block runs

Autograd numbers its nodes in the order in which a thread makes them. A `RuledForward` holds the numbers that one
forward of a module with a rule has taken. A recomputation runs while autograd runs the node that needs it, and that
node's number tells in which forward it was made. `recomputing_by_rules` looks this up for the ops of a backward.

Not covered: a checkpoint in a module with a rule that is itself inside another checkpoint. If the outer one is not
reentrant, torch raises `CheckpointError` where dtypes differ; if it is, a thread of autograd, which is that of a GPU,
numbers its nodes anew. Use `amplab.checkpoint` for the inner one.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.compiler import is_dynamo_compiling

from amplab.policies.casting.engine import CastingEngine
from amplab.policies.casting.function_modes import CastingMode, ScopeMode, function_modes, set_function_modes
from amplab.policies.casting.plan import opened
from amplab.policies.casting.thread_scopes import THREAD, ScopeOfMode
from amplab.policies.tables.called_op import called_op

__all__ = ["RuledForward", "ended_forward", "next_node", "recomputing_by_rules"]

_MOST = 2**16  # forwards that a thread remembers


class RuledForward(NamedTuple):
    """One forward of a module with a rule: it made the nodes with numbers from `begin` to before `end`."""

    begin: int
    end: int
    engine: CastingEngine


class _Forwards(threading.local):
    def __init__(self) -> None:
        self.ended: list[RuledForward] = []  # by their ends


_FORWARDS = _Forwards()


def next_node() -> int:
    """Return the number of the next node of autograd in the calling thread; -1 if none is to be looked up.

    None is made without gradients. Inside a checkpoint that is not reentrant, a node needs the recomputation of the
    whole checkpoint, which calls the module again.
    """
    if not torch.is_grad_enabled():
        return -1
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__:
        return -1
    return int(_get_sequence_nr())


def ended_forward(begin: int, engine: CastingEngine) -> None:
    """Remember a forward under `engine` that began at node `begin` and ends now, if it made a node."""
    end = int(_get_sequence_nr())
    if begin < 0 or end == begin:
        return
    ended = _FORWARDS.ended
    ended.append(RuledForward(begin, end, engine))
    if len(ended) > _MOST:
        del ended[: _MOST // 2]


def recomputing_by_rules() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager under which ops of each module with a rule are recomputed under its rule.

    It does nothing without such a forward. Sync: none.
    """
    if not _FORWARDS.ended or is_dynamo_compiling():
        return contextlib.nullcontext()
    return ScopeOfMode(_RecomputingMode(_FORWARDS.ended))


class _RecomputingMode(ScopeMode):
    """Casts the ops that a backward recomputes as the forwards did that made the nodes."""

    def __init__(self, ended: list[RuledForward]) -> None:
        self._ended = ended
        self._owner = threading.get_ident()
        self._found: dict[int, CastingEngine | None] = {}
        self._task: int | None = None  # the outermost backward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` under the rule of the node that needs it, if there is one."""
        if is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        func = called_op(func, sys._getframe(1))
        if func in _BACKWARDS:
            return self.run_inside(_BACKWARDS[func], args, kwargs or {})
        engine = self._engine()
        if engine is None:
            return func(*args, **(kwargs or {}))
        modes = function_modes()
        try:  # the casts around must not follow; in a thread of autograd THREAD does not know their modes
            set_function_modes([mode for mode in modes if not isinstance(mode, CastingMode)])
            with engine.active():
                return func(*args, **(kwargs or {}))
        finally:
            set_function_modes(modes)

    def _engine(self) -> CastingEngine | None:
        node = torch._C._current_autograd_node() if torch.is_grad_enabled() else None  # a backward itself has it off
        if node is None or any(scope.by_hook for scope in THREAD.own.scopes):  # a recomputed module enters its own rule
            return None
        task = torch._C._current_graph_task_id()
        if self._task is None or threading.get_ident() == self._owner:
            self._task = task
        elif task != self._task:
            return None
        number = int(node._sequence_nr())
        if number not in self._found:
            self._found[number] = self._around(number)
        return self._found[number]

    def _around(self, number: int) -> CastingEngine | None:
        """Return the engine of the innermost forward that made the node of this number."""
        ended = self._ended
        for place in range(bisect.bisect_right(ended, number, key=lambda forward: forward.end), len(ended)):
            if ended[place].begin <= number:
                return ended[place].engine
        return None


_BACKWARDS: dict[Callable[..., Any], Callable[..., Any]] = {
    func: opened(func) for func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
