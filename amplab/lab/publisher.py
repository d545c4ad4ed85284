"""Subscribers and their failures: an event goes to every callback, and one that raises is told to all, once.

Callbacks run in the thread that publishes, between two steps: they should note the event and return.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable

from amplab.lab.events import Event, Failed

__all__ = ["Callback", "Publisher"]

Callback = Callable[[Event], object]

_FAILURES_KEPT = 20


class Publisher:
    """A list of callbacks that may change at any time from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callback] = {}
        self._next_token = 0
        self._told: dict[int, set[str]] = {}  # what each callback has raised
        self._failures: deque[Failed] = deque(maxlen=_FAILURES_KEPT)

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The last failures that were published, for whoever subscribes later."""
        return tuple(self._failures)

    def forget_run(self) -> None:
        """Forget the failures that a reset mends."""
        self._failures = deque((past for past in self._failures if not past.of_run), maxlen=_FAILURES_KEPT)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event from now on; return a function that ends this (again is harmless)."""
        with self._lock:
            token = self._next_token
            self._next_token += 1
            self._callbacks = {**self._callbacks, token: callback}
        return lambda: self._unsubscribe(token)

    def publish(self, event: Event) -> None:
        """Hand an event to every callback; one that raises is reported to all, the first time it raises so.

        Of each callback at most 20 failures are told, which also ends the circle of one that raises when told.
        """
        if isinstance(event, Failed):
            self._failures.append(event)
        for token, callback in self._callbacks.items():
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - whatever a subscriber raises, the run goes on
                self._report(token, callback, event, error)

    def _unsubscribe(self, token: int) -> None:
        with self._lock:
            self._callbacks = {other: callback for other, callback in self._callbacks.items() if other != token}

    def _report(self, token: int, callback: Callback, event: Event, error: Exception) -> None:
        told = self._told.setdefault(token, set())
        if repr(error) in told or len(told) == _FAILURES_KEPT:
            return
        told.add(repr(error))
        text = (
            f"callback {callback!r} raised {type(error).__name__} on {type(event).__name__}; the run goes on, and the "
            f"same failure is not told again.\n{''.join(traceback.format_exception(error))}"
        )
        self.publish(Failed(text))
