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

from amplab.policies.casting.thread_scopes import Scope

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
    """A call that a hook has seen begin.

    Attributes:
        frames: The ids of the frame that runs it, and of its caller; None while torch.compile traces. A frame that is
            kept after an interrupt would keep what the callers have: a generator with a region would never end.
        scopes: What ends with it.
    """

    frames: tuple[int, int] | None
    scopes: list[AbstractContextManager[Any] | Scope]


def _ids(frame: FrameType) -> tuple[int, int]:
    return id(frame), id(frame.f_back)


def _is_in_stack(frame: int, callee: FrameType) -> bool:
    """Whether a frame runs that has called `callee`, by its id; one that has ended may have had the same."""
    caller = callee.f_back
    while caller is not None and id(caller) != frame:
        caller = caller.f_back
    return caller is not None


class HookScopes(threading.local):
    """The scopes that the hook before a call enters and the hook after it leaves, separately for each thread."""

    def __init__(self) -> None:
        self._calls: list[_OpenCall] = []

    def enter(self, *scopes: AbstractContextManager[Any] | Scope) -> None:
        """Enter `scopes` until the end of the call that the calling hook belongs to."""
        frame = None if is_dynamo_compiling() else _getframe(2)
        if frame is not None:
            while self._calls and (last := self._calls[-1].frames) and not _is_in_stack(last[0], frame):
                self._leave_last()
        entered: list[AbstractContextManager[Any] | Scope] = []
        self._calls.append(_OpenCall(None if frame is None else _ids(frame), entered))
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
            own = self._calls[place].frames
            if own is None or frame is None or id(frame) in own:  # that of the caller, after an exception
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
