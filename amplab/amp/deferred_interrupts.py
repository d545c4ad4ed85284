"""`DeferredInterrupts`: Ctrl-C waits for the end of a call that removes or restores something.

Python runs handlers of signals in the main thread only, so there is nothing to defer in another one.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["DeferredInterrupts"]

_QUIET_SECONDS = 1.0  # after an interrupt that is admitted: what it stops removes what it has begun


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

    An interrupt that is admitted lets those of the next second wait, so nothing stops `undo`. (CPython lets none come
    between an exception, or the end of a function written in Python, and `waits = True`.) After that second the next
    one is admitted too, since the code in between may have caught the first and gone on. Inside another one, `end` and
    `admit_one` return to what the outer one does. No effect where SIGINT does not call a handler that is written in
    Python, such as the one that raises KeyboardInterrupt.

    An exception of the handler of another signal may come before `end` and leave this handler behind. It then has no
    effect: it passes SIGINT on, and the next `DeferredInterrupts` takes its place.

    Attributes:
        waits: whether the next interrupt waits.
    """

    def __init__(self) -> None:
        self._waits, self._has_come, self._quiet_until = True, False, 0.0
        self._block: FrameType | None = None  # in which this is the handler of SIGINT
        self._outer: DeferredInterrupts | None = None
        self._handler: Callable[[int, FrameType | None], object] = _no_handler
        if threading.current_thread() is not threading.main_thread():
            return
        block = sys._getframe(1)
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, DeferredInterrupts) and not handler._is_inside(block):
            handler = handler._handler  # never another one that is left behind
        if isinstance(handler, DeferredInterrupts):
            self._outer, self._outer_waits = handler, handler._waits
            handler._waits = True
        elif callable(handler):
            self._handler, self._block = handler, block
            signal.signal(signal.SIGINT, self)

    def __enter__(self) -> "DeferredInterrupts":
        """Let SIGINT wait until the end of a `with` block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """As `end`."""
        self.end()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        if not self._is_inside(frame):
            self._remove()
            self._handler(number, frame)
        elif self._waits or time.monotonic() < self._quiet_until:
            self._has_come = True
        else:
            self._quiet_until, self._has_come = time.monotonic() + _QUIET_SECONDS, False
            self._handler(number, frame)
            self._quiet_until = 0.0  # it has raised nothing

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Return whether `frame` runs in the block of this handler."""
        while frame is not None and frame is not self._block:
            frame = frame.f_back
        return frame is not None

    @property
    def waits(self) -> bool:
        """Whether the next interrupt waits."""
        return (self._outer or self)._waits

    @waits.setter
    def waits(self, waits: bool) -> None:
        (self._outer or self)._waits = waits

    def admit_one(self) -> None:
        """Let an interrupt stop the code that follows, also one that has come already."""
        self.waits = self._outer is not None and self._outer_waits
        self._raise()

    def end(self) -> None:
        """Set the handler from before, and call it if an interrupt has waited. Set `waits` first.

        A handler that the call has set stays.
        """
        if self._outer is not None:
            self.admit_one()
        elif self._block is not None:
            self._remove()
            self._block, self._waits = None, False
            self._raise()

    def _remove(self) -> None:
        installed: object = signal.getsignal(signal.SIGINT)
        if installed is self:
            signal.signal(signal.SIGINT, self._handler)

    def _raise(self) -> None:
        on = self._outer or self
        if on._has_come and not on._waits:
            on._has_come = False
            signal.raise_signal(signal.SIGINT)


def _no_handler(_number: int, _frame: FrameType | None) -> None:
    """Stand for the handler where SIGINT calls none."""
