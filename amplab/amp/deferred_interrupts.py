"""`DeferredInterrupts`: Ctrl-C waits for the end of a call that removes or restores something.

Python runs handlers of signals in the main thread only, so there is nothing to defer in another one.
"""

import signal
import threading
from types import FrameType

__all__ = ["DeferredInterrupts"]


class DeferredInterrupts:
    """Lets SIGINT wait until `end`, which then calls its handler once.

        interrupts = DeferredInterrupts()
        try:
            interrupts.admit_one()
            change()
        finally:
            interrupts.waits = True
            undo()
            interrupts.end()

    An interrupt that is admitted lets those that follow wait, so nothing stops `undo`. (CPython lets none come between
    an exception, or the end of a function written in Python, and `waits = True`.) No effect inside another one, and
    where SIGINT does not call a handler that is written in Python, such as the one that raises KeyboardInterrupt.

    Attributes:
        waits: whether the next interrupt waits.
    """

    def __init__(self) -> None:
        self.waits, self._has_come = True, False
        self._handler = signal.getsignal(signal.SIGINT)
        self._is_on = (
            callable(self._handler)
            and not isinstance(self._handler, DeferredInterrupts)
            and threading.current_thread() is threading.main_thread()
        )
        if self._is_on:
            signal.signal(signal.SIGINT, self)

    def __enter__(self) -> "DeferredInterrupts":
        """Let SIGINT wait until the end of a `with` block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """As `end`."""
        self.end()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        if self.waits:
            self._has_come = True
        elif callable(self._handler):
            self.waits = True
            self._handler(number, frame)
            self.waits = False  # it has raised nothing

    def admit_one(self) -> None:
        """Let an interrupt stop the code that follows, also one that has come already."""
        self.waits = False
        self._raise()

    def end(self) -> None:
        """Set the handler from before, and call it if an interrupt has waited. Set `waits` first.

        A handler that the call has set stays.
        """
        if self._is_on:
            set_now: object = signal.getsignal(signal.SIGINT)
            if set_now is self:
                signal.signal(signal.SIGINT, self._handler)
            self._raise()

    def _raise(self) -> None:
        if self._has_come:
            self._has_come = False
            signal.raise_signal(signal.SIGINT)
