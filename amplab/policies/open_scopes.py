"""Context managers that one hook enters and another leaves, each thread minding its own.

Hooks come in pairs, before and after, but an exception between them may keep the second from running. What was
entered stays noted here, to be left at the next chance, in the thread that entered it.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["OpenScopes"]


class OpenScopes(threading.local):
    """The scopes that this thread has entered and not left, innermost last."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[Any]] = []

    def enter(self, scope: AbstractContextManager[Any]) -> None:
        """Enter ``scope`` and note it."""
        scope.__enter__()
        self._open.append(scope)

    def leave(self) -> None:
        """Leave the innermost scope of this thread, if there is one."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def leave_all(self) -> None:
        """Leave every scope of this thread."""
        while self._open:
            self.leave()
