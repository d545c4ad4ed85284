"""The thread that changes the widgets: it runs jobs in order, and a tick at most ten times a second.

The trainer's thread only reports that something changed (`wake`). The kernel's thread receives the page's messages and
queues them (`call`). Both calls return at once, and an interrupt of the kernel waits for them: else a thread that was
never started might count as this one. Without jobs and changes for a second the thread ends, and the next one
starts another: a cell that runs again leaves its widgets behind, which must not keep a thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from amplab.kernels.fork_renewal import renew_lock_in_forks
from amplab.policies.signals import DeferredSignals

__all__ = ["PERIOD", "Pace", "Ticker"]

PERIOD = 0.1
"""Seconds between two ticks."""

IDLE = 1.0
"""Seconds without a job after which the thread ends."""

_LOOK_SECONDS = 0.005

Job = Callable[[], None]


def _nothing() -> None:
    """Do nothing: the job that only wakes the thread."""


class Ticker:
    """A daemon thread that calls `tick` after `wake`, at most once every `period` seconds.

    Args:
        tick: Draws what changed.
        on_failure: Receives the traceback of a tick or a job that raised, whatever it raised; the thread continues.
        period: Seconds.
    """

    def __init__(self, tick: Job, *, on_failure: Callable[[str], None], period: float = PERIOD) -> None:
        self._tick, self._on_failure, self._period = tick, on_failure, period
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._latest: dict[str, Job] = {}  # the jobs of `call_latest` that wait
        self._awake = self._closed = False
        self._lock = threading.RLock()  # guards the thread
        renew_lock_in_forks(self, "_lock")
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Request a tick; cheap enough to be called at every step."""
        if not self._awake:
            with DeferredSignals():
                self._awake = True
                self.call(_nothing)
                if self._thread is None:
                    self._awake = False  # so that the next change tries again

    def call(self, job: Job) -> None:
        """Run `job` in the ticker's thread as soon as it is free."""
        with DeferredSignals(), self._lock:
            if not self._closed:
                self._put(job)

    def call_latest(self, name: str, job: Job) -> None:
        """Run `job` as `call` does; if one of this name waits, in its place."""
        with DeferredSignals():
            with self._lock:
                is_waiting, self._latest[name] = name in self._latest, job
            if not is_waiting:
                self.call(lambda: self._run_latest(name))

    def _run_latest(self, name: str) -> None:
        with self._lock:
            job = self._latest.pop(name)
        job()

    def wait(self) -> None:
        """Wait until the jobs queued so far are done, unless called from one; not if the system has no thread left."""
        done = threading.Event()
        self.call(done.set)
        while not done.is_set() and (thread := self._thread) is not None and thread.is_alive():
            if thread is threading.current_thread():
                return
            time.sleep(_LOOK_SECONDS)  # Ctrl-C in the wait of an Event may leave its lock free

    def close(self, *, wait: float = 1.0) -> None:
        """End the thread after the jobs queued so far; wait for it at most `wait` seconds, unless called from it."""
        with self._lock:
            thread, self._closed = self._thread, True
            self._jobs.put(None)
        if thread is not None and threading.current_thread() is not thread:
            thread.join(wait)

    def _put(self, job: Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="amplab-ticker", daemon=True)
            with suppress(RuntimeError):  # the system has no thread left: the next job tries again
                thread.start()
                self._thread = thread

    def _loop(self) -> None:
        due = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()) if self._awake else IDLE)
            except Empty:
                if not self._awake:
                    with self._lock:
                        if self._jobs.empty():
                            self._thread = None
                            return
                    continue
                # Before the tick: a change during the drawing must cause another tick.
                self._awake = False
                job = self._tick
                due = time.monotonic() + self._period
            if job is None:
                with self._lock:
                    self._thread = None
                return
            self._guard(job)

    def _guard(self, job: Job) -> None:
        try:
            job()
        except BaseException:  # noqa: BLE001 - also sys.exit() in the repr of a model: it is shown, the lab continues
            self._report(traceback.format_exc())

    def _report(self, text: str) -> None:
        try:
            self._on_failure(text)
        except BaseException:  # noqa: BLE001 - nobody is left to tell
            traceback.print_exc()


class Pace:
    """Decides when to draw again: what is shown has changed, and `period` seconds have passed since the last drawing.

    Args:
        period: Seconds between two drawings.
        wake: Requests a tick, called while a drawing is postponed.

    Attributes:
        period: Seconds; a new value holds from the next drawing on.
    """

    def __init__(self, period: float, wake: Job) -> None:
        self.period, self._wake = period, wake
        self._shown: object = None
        self._due = 0.0

    def is_due(self, present: object) -> bool:
        """Return whether to draw `present` now; it then counts as drawn."""
        now = time.monotonic()
        if present == self._shown:
            return False
        if now < self._due:
            self._wake()
            return False
        self._shown, self._due = present, now + self.period
        return True

    def forget(self) -> None:
        """Count nothing as drawn."""
        self._shown = None

    def hurry(self) -> None:
        """Count nothing as drawn, and draw at the next tick: a run that has paused shows one number everywhere."""
        self._shown, self._due = None, 0.0
