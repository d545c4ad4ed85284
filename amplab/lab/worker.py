"""A daemon thread that runs queued commands in order, and between them repeats a step as long as steps are wanted.

Between two steps it waits until the next one is due. A command ends this wait: it does not wait for the step.

It computes with one intra-op thread; see `compute_threads`. Nothing outside the worker changes.
The thread ends after some idle seconds and starts again when there is work, so a forgotten worker leaks no thread.

Ctrl-C in a call of the worker leaves the lock free and the queue whole: the next call goes on from there. The one
exception is a tracer written in Python, such as pdb: with one, CPython may interrupt between the end of a `with` block
and the release of its lock, in amplab as in the queues of Python.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from amplab.lab.compute_threads import compute_with
from amplab.lab.drawing_turns import leaving_turn
from amplab.lab.fork_locks import LockOrder, hold_over_forks

__all__ = ["Worker"]

Answer = TypeVar("Answer")

_IDLE_SECONDS = 5.0
_LONGEST_REST = 60.0  # seconds; a lock refuses to wait for a time that its clock cannot hold
_LOOK_SECONDS = 0.005


class Worker:
    """A thread for one owner.

    Args:
        step: Called repeatedly while `is_wanted()`.
        is_wanted: Whether to step; called under `lock`.
        seconds_left: Seconds until the next step is due, 0 or less if it is; called under `lock`.
        on_error: Called with the traceback if a command, a step, `is_wanted` or `seconds_left` raises, whatever it
            raises; the thread continues.
        on_rest: Called in the thread before it ends, because nothing has come for some seconds or Python ends.

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
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.RLock()  # `with` of a Condition is Python code, in which Ctrl-C leaves the lock taken
        hold_over_forks(self.lock, LockOrder.WORKER)
        self._news = threading.Condition(self.lock)
        self._step = step
        self._is_wanted = is_wanted
        self._seconds_left = seconds_left
        self._on_error = on_error
        self._on_rest = on_rest
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = self._has_ended = False
        self._has_rested = False  # and nothing has come since
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._claim = threading.Lock()  # taken by the one thread that works

    def post(self, command: Callable[[], None]) -> None:
        """Queue `command` for the next step boundary, which is now if nothing runs; callable from any thread.

        Raises:
            RuntimeError: In a forked process.
        """
        self._refuse_in_fork()
        with self.lock:
            if not self._has_ended:
                self._queue.append(command)
                self.wake()

    @property
    def queued(self) -> tuple[Callable[[], None], ...]:
        """The commands that wait; the holder of `lock` may put back those of before."""
        return tuple(self._queue)

    @queued.setter
    def queued(self, commands: tuple[Callable[[], None], ...]) -> None:
        self._queue = deque(commands)

    def wake(self) -> None:
        """Check again whether a step is wanted, and when it is due."""
        with self.lock:
            if not self._has_thread() and not self._has_ended:
                _start(self._run)
            self._news.notify_all()

    @leaving_turn
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is wanted or queued; return whether that happened within `timeout` seconds.

        Raises:
            RuntimeError: Called in the worker's own thread.
        """
        self.refuse_in_own_thread("wait()")
        end = math.inf if timeout is None else time.monotonic() + timeout
        if self._is_at_work():
            self.wake()  # an interrupted call may have left work without a thread
        while self._is_at_work():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK_SECONDS))  # Ctrl-C in the wait of a Condition may leave its lock free
        return True

    def refuse_in_own_thread(self, call: str) -> None:
        """Raise a RuntimeError in the worker's own thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"{call} in a callback, or in code of one's own that the trainer calls, would wait for itself; call "
                "wait() or run() in another thread."
            )

    def end(self, timeout: float) -> None:
        """Accept no more commands, and end the thread: one still inside torch when Python exits crashes the process."""
        with self.lock:
            self._has_ended = True
            self._news.notify_all()
        self.wait(timeout)

    def refuse_at_end(self) -> None:
        """Raise a RuntimeError if the worker has ended, or in a forked process."""
        self._refuse_in_fork()
        if self._has_ended:
            raise RuntimeError("Python ends, and the trainer has ended: train and ask before the end of the program.")

    def _refuse_in_fork(self) -> None:
        if self._is_forked():
            raise RuntimeError(
                "this process was forked from the one that the trainer trains in, and has none of its threads: make a "
                "Trainer in this process. The history can be read."
            )

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_at_work(self) -> bool:
        if self._is_forked():
            return False
        with self.lock:
            is_ending = self._has_ended and self._has_thread()
            return is_ending or self._busy or bool(self._queue) or self._wants_step()

    def _wants_step(self) -> bool:
        return not self._has_ended and self._is_wanted()

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Call `question` at the next step boundary and return its answer, or raise what it raises.

        Raises:
            RuntimeError: The worker has ended; in a forked process.
        """
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[Answer] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                answer.set_exception(error)

        with self.lock:
            self.refuse_at_end()
            self.post(reply)
        return leaving_turn(answer.result)()

    def _run(self, unset: threading.Lock) -> None:
        """Be the thread: compute with one intra-op thread, tell the starting one, work."""
        if not self._claim.acquire(blocking=False):  # Ctrl-C in `_start`: the thread that it started works already
            unset.release()
            return
        self._thread = threading.current_thread()
        try:
            try:
                compute_with(1)
            finally:
                unset.release()  # also where the system starts no more threads
            self._work()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Let the next thread work."""
        with self.lock:
            self._thread = None
            self._claim.release()

    def _work(self) -> None:
        is_idle = False
        while not is_idle:
            try:
                is_idle = not self._work_once()
            except BaseException as error:  # noqa: BLE001  also sys.exit() in a callback: the thread must survive for a reset
                if self._is_forked():
                    _end_fork(error)
                self._report(traceback.format_exc())
            if self._is_forked():
                _end_fork(None)

    def _work_once(self) -> bool:
        """Call one command or step when there is one; return False if none came, and the thread ends."""
        with self.lock:
            self._busy = False
            if (command := self._next()) is None:
                self._leave()
                return False
            self._busy = True
        command()
        return True

    def _next(self) -> Callable[[], None] | None:
        """Wait for what to call next, under `lock`; if nothing comes, it is `on_rest`, then None."""
        if self._has_work() or (not self._has_rested and self._rest()):
            self._has_rested = False
            return self._queue.popleft() if self._queue else self._step
        self._has_rested = not self._has_rested
        return self._on_rest if self._has_rested else None

    def _report(self, text: str) -> None:
        try:
            self._on_error(text)
        except BaseException:  # noqa: BLE001 - nobody is left to tell
            traceback.print_exc()

    def _has_work(self) -> bool:
        return bool(self._queue) or (self._wants_step() and self._seconds_left() <= 0)

    def _rest(self) -> bool:
        """Wait for work, under `lock`; return whether there is some."""
        end = time.monotonic() + _IDLE_SECONDS
        while not self._has_work():
            left = self._seconds_left() if self._wants_step() else end - time.monotonic()
            if self._has_ended or (left <= 0 and not self._wants_step()):
                return False
            self._news.wait(min(max(left, 0.0), _LONGEST_REST))
        return True


def _end_fork(error: BaseException | None) -> None:
    """End a process that code of the step has forked: it has nothing to train, and no thread but this one.

    Python would end the thread, which aborts the process.
    """
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _start(run: Callable[[threading.Lock], None]) -> None:
    """Start a daemon thread, and wait until it has set its number of threads."""
    unset = threading.Lock()  # Ctrl-C in the wait of an Event may keep the other thread from setting it
    unset.acquire()
    threading.Thread(target=run, args=(unset,), name="amplab trainer", daemon=True).start()
    unset.acquire()
