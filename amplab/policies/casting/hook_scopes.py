"""HookScopes: what the hook before a call enters and the hook after it leaves. How torch.compile traces such hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from sys import _getframe
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch._C._dynamo import eval_frame
from torch.compiler import is_dynamo_compiling

from amplab.policies.casting.thread_scopes import Scope, is_running

__all__ = ["HookScopes", "no_graph_of_its_own"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def no_graph_of_its_own(hook: _Hook) -> _Hook:
    """Let torch.compile trace `hook` as a part of a graph, and nowhere else; returns `hook`.

    torch calls the hooks of a compiled module outside of the module's graph. There the compiler would trace each hook
    alone, and what a traced hook enters is not bound to the frame of the call: an interrupt would leave it on.

    Reference: torch._dynamo.skip, here for all that `hook` calls, too (importing torch._dynamo would take seconds).
    torch.compiler.disable would break graphs.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(hook.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return hook


class _OpenCall(NamedTuple):
    frame: FrameType | None
    scopes: list[AbstractContextManager[Any] | Scope]


class HookScopes(threading.local):
    """The scopes that the hook before a call enters and the hook after it leaves, separately for each thread."""

    def __init__(self) -> None:
        self._calls: list[_OpenCall] = []

    def enter(self, *scopes: AbstractContextManager[Any] | Scope) -> None:
        """Enter `scopes` until the end of the call that the calling hook belongs to."""
        frame = None if is_dynamo_compiling() else _getframe(2)
        while self._calls and (last := self._calls[-1].frame) is not None and not is_running(last):
            self._leave_last()
        entered: list[AbstractContextManager[Any] | Scope] = []
        self._calls.append(_OpenCall(frame, entered))
        for scope in scopes:
            if isinstance(scope, Scope):
                entered.append(scope)
                scope.enter(frame, by_hook=True)
            else:
                self.add(scope)

    def add(self, scope: AbstractContextManager[Any]) -> None:
        """Enter one more context manager for the innermost call."""
        scope.__enter__()
        self._calls[-1].scopes.append(scope)

    def leave(self) -> None:
        """Leave the scopes of the call that the calling hook belongs to; does nothing if they have ended."""
        frame = None if is_dynamo_compiling() else _getframe(2)
        for place in reversed(range(len(self._calls))):
            own = self._calls[place].frame
            if own is None or frame is None or own is frame or own.f_back is frame:  # the caller's, after an exception
                while len(self._calls) > place:
                    self._leave_last()
                return

    def leave_all(self) -> None:
        """Leave all scopes of this thread."""
        while self._calls:
            self._leave_last()

    def _leave_last(self) -> None:
        scopes = self._calls[-1].scopes
        while scopes:
            scopes.pop().__exit__(None, None, None)
        self._calls.pop()
