"""Whether a page that says nothing could have been heard: the kernel may receive no message while a cell runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

__all__ = ["Hearing"]


class Hearing:
    """Counts the turns at which the kernel's loop was free to receive messages of pages.

    A cell keeps the loop from turning, or messages from being received if it awaits; such turns do not count. The
    kernel may receive messages in the thread of a subshell instead, also while a cell runs, but it need not.

    The loop is the one that runs when this is made, as in a cell. Without one nothing is counted.

    Args:
        on_turn: Called after each turn with the number of turns, in the loop.

    Attributes:
        turns: How many were counted.
    """

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        self.turns = self._asks = 0
        self._on_turn = on_turn
        self._is_asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        _cells.follow(self)

    def end(self) -> None:
        """Count no more turns."""
        self._loop = None
        _cells.leave(self)

    def ask(self) -> int:
        """Count the next turn; return how many were asked for, 0 if the last one is still to come or no loop turns."""
        if self._is_asked or self._loop is None:
            return 0
        self._is_asked = True
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:  # the loop is closed
            self._loop = None
            return 0
        self._asks += 1
        return self._asks

    def _turn(self) -> None:
        self._is_asked = False
        if not _cells.are_running:
            self.turns += 1
            self._on_turn(self.turns)


class _Cells:
    """Whether IPython runs a cell; False without IPython."""

    def __init__(self) -> None:
        self.are_running = False
        self._shell: Any = None
        self._followers = WeakSet[Hearing]()

    def follow(self, follower: Hearing) -> None:
        """Hear of the cells from now on, beginning in one, until the last follower has left."""
        self._followers.add(follower)
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if shell is not None and shell is not self._shell:
            self._shell, self.are_running = shell, True
            shell.events.register("pre_execute", self._begin)
            shell.events.register("post_execute", self._end)

    def leave(self, follower: Hearing) -> None:
        """Leave nothing in IPython after the last one."""
        self._followers.discard(follower)
        if self._shell is None or self._followers:
            return
        shell, self._shell, self.are_running = self._shell, None, False
        for event, callback in (("pre_execute", self._begin), ("post_execute", self._end)):
            with suppress(ValueError):  # a notebook has removed it
                shell.events.unregister(event, callback)

    def _begin(self) -> None:
        self.are_running = True

    def _end(self) -> None:
        self.are_running = False


_cells = _Cells()
