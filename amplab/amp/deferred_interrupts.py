"""`deferred_interrupts`: Ctrl-C waits for the end of a block, such as one that restores a model.

Python runs handlers of signals in the main thread only, so there is nothing to defer in another one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_interrupts"]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let SIGINT wait for the end of the block, however the block ends; then its handler is called once.

    No effect where SIGINT does not call a handler that is written in Python, such as the one that raises
    KeyboardInterrupt. An interrupt that comes before the block begins is raised there.

    >>> with deferred_interrupts():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("restored")
    Traceback (most recent call last):
    KeyboardInterrupt
    """
    handler = signal.getsignal(signal.SIGINT)
    is_deferred = isinstance(handler, _Recorder)  # by a block around this one
    if is_deferred or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    recorder = _Recorder()
    try:
        signal.signal(signal.SIGINT, recorder)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if recorder.has_come:
            signal.raise_signal(signal.SIGINT)


class _Recorder:
    """A handler that records that the signal has come."""

    has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True
