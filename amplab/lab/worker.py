"""A daemon thread that runs queued commands in order, and between them repeats a step as long as steps are wanted.

Between two steps it waits until the next one is due. A command ends this wait: it does not wait for the step.

It computes with one intra-op thread. `torch.set_num_threads` sets the number of the calling thread and the number that
later threads start with; the starting thread therefore restores the latter, so that nothing outside the worker changes.
The thread ends after some idle seconds and starts again when there is work, so a forgotten worker leaks no thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

__all__ = ["Worker"]

Answer = TypeVar("Answer")

_IDLE_SECONDS = 5.0
_WAIT_SECONDS = 0.5  # an endless wait cannot be interrupted on every system


class Worker:
    """A thread for one owner.

    Args:
        step: Called repeatedly while `is_wanted()`.
        is_wanted: Whether to step; called under `lock`.
        seconds_left: Seconds until the next step is due, 0 or less if it is; called under `lock`.
        on_error: Called with the traceback if a command or a step raises; the thread continues.

    Attributes:
        lock: The re-entrant lock that guards the queue and the owner's own state; held for moments only.
    """

    def __init__(
        self,
        *,
        step: Callable[[], None],
        is_wanted: Callable[[], bool],
        on_error: Callable[[str], None],
        seconds_left: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.lock = threading.Condition()
        self._step = step
        self._is_wanted = is_wanted
        self._seconds_left = seconds_left
        self._on_error = on_error
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = self._has_ended = False
        self._thread: threading.Thread | None = None

    def post(self, command: Callable[[], None]) -> None:
        """Queue `command` for the next step boundary, which is now if nothing runs; callable from any thread."""
        with self.lock:
            if not self._has_ended:
                self._queue.append(command)
                self.wake()

    def wake(self) -> None:
        """Check again whether a step is wanted, and when it is due."""
        with self.lock:
            if self._thread is None:
                self._thread = _started(self._work)
            self.lock.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is wanted or queued; return whether that happened within `timeout` seconds.

        Raises:
            RuntimeError: Called in the worker's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("wait() in a callback would wait for itself; call wait() or run() in another thread.")
        end = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            while self._busy or self._queue or self._is_wanted():
                left = _WAIT_SECONDS if end is None else min(end - time.monotonic(), _WAIT_SECONDS)
                if left <= 0:
                    return False
                self.lock.wait(left)
        return True

    def end(self, timeout: float) -> None:
        """Wait, then accept no more commands: a thread still inside torch when Python exits crashes the process."""
        with self.lock:
            self.wait(timeout)
            self._has_ended = True

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Call `question` at the next step boundary and return its answer, or raise what it raises."""
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[Answer] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised again in the calling thread
                answer.set_exception(error)

        self.post(reply)
        return answer.result()

    def _work(self) -> None:
        while True:
            with self.lock:
                self._busy = False
                if not self._has_work() and not self._rest():
                    self._thread = None
                    return
                self._busy = True
                command = self._queue.popleft() if self._queue else self._step
            try:
                command()
            except Exception:  # noqa: BLE001 - the owner reports it; the thread must survive for a reset
                self._on_error(traceback.format_exc())

    def _has_work(self) -> bool:
        return bool(self._queue) or (self._is_wanted() and self._seconds_left() <= 0)

    def _rest(self) -> bool:
        """Wait for work, under `lock`; return whether there is some."""
        self.lock.notify_all()
        end = time.monotonic() + _IDLE_SECONDS
        while not self._has_work():
            left = self._seconds_left() if self._is_wanted() else end - time.monotonic()
            if left <= 0 and not self._is_wanted():
                return False
            self.lock.wait(max(left, 0.0))
        return True


def _started(work: Callable[[], None]) -> threading.Thread:
    """Return a running daemon thread that computes with one intra-op thread; other threads keep their number."""
    is_set = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # takes the process's number now; otherwise the first op would
        torch.set_num_threads(1)
        is_set.set()
        work()

    own = torch.get_num_threads()
    thread = threading.Thread(target=run, name="amplab trainer", daemon=True)
    thread.start()
    is_set.wait()
    torch.set_num_threads(own)
    return thread
