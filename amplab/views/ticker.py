"""The one thread that touches the widgets: jobs in order as they come, and a tick at most ten times a second.

The trainer's thread says only that something changed (`wake`), the page's messages arrive in whatever thread the kernel
answers them in (`call`); both return at once. Nothing is polled: without jobs and changes the thread sleeps.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["PERIOD", "Ticker"]

PERIOD = 0.1
"""Seconds between two ticks."""

Job = Callable[[], None]


def _nothing() -> None:
    """The job that only wakes."""


class Ticker:
    """A daemon thread that calls `tick` after `wake`, not more often than every `period` seconds.

    Args:
        tick: Draws what changed.
        on_failure: Receives the traceback of a tick or a job that raised; the thread goes on.
        period: Seconds.
    """

    def __init__(self, tick: Job, *, on_failure: Callable[[str], None], period: float = PERIOD) -> None:
        self._tick, self._on_failure, self._period = tick, on_failure, period
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._awake = False
        self._thread = threading.Thread(target=self._loop, name="amplab-ticker", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Ask for a tick; cheap enough to be called at every step."""
        if not self._awake:
            self._awake = True
            self._jobs.put(_nothing)

    def call(self, job: Job) -> None:
        """Run `job` in the ticker's thread as soon as it is free."""
        self._jobs.put(job)

    def close(self, *, wait: float = 1.0) -> None:
        """End the thread after the jobs before this; waits for it unless called from it."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait)

    def _loop(self) -> None:
        due = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()) if self._awake else None)
            except Empty:
                # Before the tick: a change that comes while it draws must bring another.
                self._awake = False
                job = self._tick
                due = time.monotonic() + self._period
            if job is None:
                return
            self._guard(job)

    def _guard(self, job: Job) -> None:
        try:
            job()
        except Exception:  # noqa: BLE001 - whatever it was, it is shown, and the lab goes on
            self._on_failure(traceback.format_exc())
