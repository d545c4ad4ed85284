"""A daemon thread that does queued commands in order and, between two of them, steps for as long as it is wanted.

It computes with one intra-op thread. `torch.set_num_threads` sets the calling thread's own number and the number that
threads started later begin with; the starting thread therefore puts the latter back, and nothing outside the worker
changes. The thread ends after some idle seconds and is started again when there is work, so that a forgotten worker is
no leak.
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
_WAIT_SECONDS = 0.5  # an endless wait could not be interrupted on every system


class Worker:
    """A thread for one owner.

    Args:
        step: Called again and again while `is_wanted()`.
        is_wanted: Whether to step; called under `turn`.
        on_error: Called with the traceback when a command or a step raises; the thread goes on.

    Attributes:
        turn: The lock (re-entrant) that guards the queue and the owner's own state; held for moments only.
    """

    def __init__(
        self, *, step: Callable[[], None], is_wanted: Callable[[], bool], on_error: Callable[[str], None]
    ) -> None:
        self.turn = threading.Condition()
        self._step = step
        self._is_wanted = is_wanted
        self._on_error = on_error
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = self._has_ended = False
        self._thread: threading.Thread | None = None

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` done at the next boundary, at once when nothing runs; from any thread."""
        with self.turn:
            if not self._has_ended:
                self._queue.append(command)
                self.wake()

    def wake(self) -> None:
        """Look again whether a step is wanted."""
        with self.turn:
            if self._thread is None:
                self._thread = _started(self._work)
            self.turn.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is wanted or queued; return whether that came within `timeout` seconds.

        Raises:
            RuntimeError: Called in the worker's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("wait() in a callback would wait for itself; call it, or run(), in another thread.")
        end = None if timeout is None else time.monotonic() + timeout
        with self.turn:
            while self._busy or self._queue or self._is_wanted():
                left = _WAIT_SECONDS if end is None else min(end - time.monotonic(), _WAIT_SECONDS)
                if left <= 0:
                    return False
                self.turn.wait(left)
        return True

    def end(self, timeout: float) -> None:
        """Wait, then take no more commands: a thread that Python's end meets inside torch brings the process down."""
        with self.turn:
            self.wait(timeout)
            self._has_ended = True

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Have `question` answered at the next boundary and return the answer; what it raises is raised here."""
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[Answer] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                answer.set_exception(error)

        self.post(reply)
        return answer.result()

    def _work(self) -> None:
        while True:
            with self.turn:
                self._busy = False
                if not self._has_work() and not self._rest():
                    self._thread = None
                    return
                self._busy = True
                command = self._queue.popleft() if self._queue else self._step
            try:
                command()
            except Exception:  # noqa: BLE001 - the owner tells it; the thread lives on for a reset
                self._on_error(traceback.format_exc())

    def _has_work(self) -> bool:
        return bool(self._queue) or self._is_wanted()

    def _rest(self) -> bool:
        """Wait for work, under `turn`; return whether some came."""
        self.turn.notify_all()
        return self.turn.wait_for(self._has_work, timeout=_IDLE_SECONDS)


def _started(work: Callable[[], None]) -> threading.Thread:
    """Return a running daemon thread that computes with one intra-op thread, all others left as they are."""
    is_set = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # takes over the process's number, which would otherwise happen in the first op
        torch.set_num_threads(1)
        is_set.set()
        work()

    own = torch.get_num_threads()
    thread = threading.Thread(target=run, name="amplab trainer", daemon=True)
    thread.start()
    is_set.wait()
    torch.set_num_threads(own)
    return thread
