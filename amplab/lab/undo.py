"""The changes of an experiment that can be taken back, the latest first.

A change is recorded when it takes effect, together with what takes it back; both happen in the trainer's thread. The
list is bounded, and holds changes alone: starting, pausing and single steps are not taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["KEPT_CHANGES", "Undoable", "UndoList"]

KEPT_CHANGES = 50
"""Changes that can be taken back; an older one is forgotten."""


@dataclass(frozen=True)
class Undoable:
    """One change.

    Attributes:
        text: What changed, as the controls show it: "Learning rate 0.1 → 1e9".
        take_back: Takes it back; returns False if that has failed.
        is_possible: Whether it can still be taken back.
        kind: Changes of one kind that follow each other are taken back together, as those of a slider; "" for none.
    """

    text: str
    take_back: Callable[[], object]
    is_possible: Callable[[], bool] = lambda: True
    kind: str = ""


class UndoList:
    """The latest changes.

    >>> changes, values = UndoList(), [1, 2]
    >>> changes.record("value 1 → 2", values.pop)
    >>> changes.last
    'value 1 → 2'
    >>> changes.take_back(), values, changes.last
    ('value 1 → 2', [1], None)
    """

    def __init__(self) -> None:
        self._changes: deque[Undoable] = deque(maxlen=KEPT_CHANGES)

    @property
    def last(self) -> str | None:
        """The text of the change that `take_back` would take back, None for none."""
        return next((each.text for each in reversed(tuple(self._changes)) if each.is_possible()), None)

    def record(
        self,
        text: str,
        take_back: Callable[[], object],
        is_possible: Callable[[], bool] = lambda: True,
        *,
        kind: str = "",
    ) -> None:
        """Add a change; see `Undoable`."""
        if kind and self._changes and self._changes[-1].kind == kind:
            take_back = self._changes.pop().take_back
        self._changes.append(Undoable(text, take_back, is_possible, kind))

    def take_back(self) -> str | None:
        """Take back the latest change that can be; return its text, None if there is none or that has failed."""
        while self._changes:
            change = self._changes.pop()
            if change.is_possible():
                return None if change.take_back() is False else change.text
        return None
