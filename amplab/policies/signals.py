"""Exceptions that handlers of signals raise: Ctrl-C, a time limit (SIGALRM), a request to end (SIGTERM).

`DeferredSignals` lets them wait for the end of a call that removes or restores something, `deferring_signals` for that
of a function. `is_interrupt` tells them from the errors of the code that they stop. Python runs handlers of signals in
the main thread only.
"""

import _signal  # type: ignore[import-not-found]  # typeshed has none
import _thread
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

__all__ = ["DeferredSignals", "deferring_signals", "is_interrupt"]

P = ParamSpec("P")
R = TypeVar("R")

_QUIET_SECONDS = 1.0  # after a signal that is admitted: what it stops removes what it has begun

_NUMBERS = sorted(map(int, signal.valid_signals()))
_get_handler, _set_handler = _signal.getsignal, _signal.signal
"""Those of `signal` look up an enum, which takes microseconds for each of 60 signals."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether `error` is none of the code that it has stopped: what a handler of a signal has raised.

    Code that catches what a user's step raises must let it pass, or the user's time limit has no effect. So must it
    KeyboardInterrupt, SystemExit and GeneratorExit.

    Sync: none.

    >>> is_interrupt(KeyboardInterrupt()), is_interrupt(ValueError("a step's own"))
    (True, False)
    """
    if not isinstance(error, Exception):
        return True
    codes = {DeferredSignals.__call__.__code__}  # also of a handler that has replaced itself
    codes |= {code for number in _NUMBERS for code in _codes_of(number, _get_handler(number))}
    chain: list[BaseException] = []
    raised: BaseException | None = error
    while raised is not None and all(raised is not each for each in chain):  # `raise e from e` makes a ring
        chain.append(raised)
        raised = raised.__cause__
    return any(frame.f_code in codes for each in chain for frame, _ in traceback.walk_tb(each.__traceback__))


def _codes_of(number: int, handler: Any) -> Iterator[CodeType]:
    """Yield the code of a signal's handler that is written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if isinstance(handler, DeferredSignals):
        handler = handler._before(number)
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    code = getattr(handler, "__code__", None)
    if isinstance(code, CodeType):
        yield code


_Handler = Callable[[int, FrameType | None], object]


class DeferredSignals:
    """Lets signals wait until `end`, which then calls the handler of each that has come, once.

        signals = DeferredSignals()
        try:
            signals.admit()
            change()
        finally:
            signals.waits = True
            undo()
            signals.end()

    A handler that is admitted and raises lets the signals of the next second wait, so nothing stops `undo`. (CPython
    lets none come between an exception, or the end of a function written in Python, and `waits = True`.) After that
    second they are admitted, since the code in between may have caught the exception and gone on. Inside another one,
    `end` and `admit` return to what the outer one does. No effect on signals without a handler that is written in
    Python, such as the one of SIGINT that raises KeyboardInterrupt.

    A signal may come just before these handlers are set, or after they are removed, and its handler may raise there.
    What is left behind then has no effect: it passes signals on, and the next `DeferredSignals` takes its place.

    Attributes:
        waits: whether the next signal waits.
    """

    def __init__(self) -> None:
        self._root = self  # the outermost one, which knows what waits
        self._waits, self._quiet_until, self._is_waking = True, 0.0, False
        self._come: dict[int, None] = {}  # the signals that wait, in their order
        self._handlers: dict[int, _Handler] = {}  # those from before, of each signal
        self._waited = False  # where this one is inside another: what that one did
        if threading.current_thread() is not threading.main_thread():
            return
        self._block: FrameType | None = sys._getframe(1)
        try:
            self._install()
        except BaseException:
            self._remove()
            raise

    def _install(self) -> None:
        for number in _NUMBERS:
            handler: Any = _get_handler(number)
            if isinstance(handler, DeferredSignals) and not handler._is_inside(self._block):
                handler = handler._before(number)  # never another one that is left behind
            if isinstance(handler, DeferredSignals):
                self._root = handler._root
            elif callable(handler):
                self._handlers[number] = handler
                _set_handler(number, self)
        if self._root is not self:
            self._waited, self.waits = self.waits, True

    def __enter__(self) -> "DeferredSignals":
        """Let signals wait until the end of a `with` block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """As `end`."""
        self.end()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._is_inside(frame):
            self._root._handle(number, frame, self._before(number))
        else:
            self._remove()
            self._before(number)(number, frame)

    def _before(self, number: int) -> _Handler:
        """Return the handler from before; of a signal that has got this one as a copy of another's, the other's."""
        return self._handlers.get(number) or next(iter(self._handlers.values()))

    def _handle(self, number: int, frame: FrameType | None, handler: _Handler) -> None:
        if self._waits or time.monotonic() < self._quiet_until:
            self._come[number] = None
            self._wake_later()
        else:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            handler(number, frame)
            self._quiet_until = 0.0  # it has raised nothing
            self._raise()

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Return whether `frame` runs in the block of this handler."""
        while frame is not None and frame is not self._block:
            frame = frame.f_back
        return frame is not None

    @property
    def waits(self) -> bool:
        """Whether the next signal waits."""
        return self._root._waits

    @waits.setter
    def waits(self, waits: bool) -> None:
        self._root._waits = waits

    def admit(self) -> None:
        """Let a signal stop the code that follows, also one that has come already."""
        self.waits = self._waited
        self._root._raise()

    def end(self) -> None:
        """Set the handlers from before, and call those of the signals that have waited. Set `waits` first.

        A handler that the call has set stays.
        """
        self._remove()
        self._block = None
        self.admit()

    def _remove(self) -> None:
        for number, handler in self._handlers.items():
            installed: object = _get_handler(number)
            if installed is self:
                _set_handler(number, handler)
                if getattr(handler, "__module__", None) == "asyncio.unix_events":
                    signal.siginterrupt(number, False)  # as its event loop has done, and `signal.signal` undoes

    def _raise(self) -> None:
        if not self._waits:
            _raise_each([number for number in [*self._come] if self._takes(number)])

    def _takes(self, number: int) -> bool:
        """Return whether the caller is to raise a signal that waits: one thread of two, in one call without others."""
        return self._come.pop(number, False) is None

    def _wake_later(self) -> None:
        """Raise what waits after the quiet time, unless `end` does before."""
        if not self._waits and not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the system starts no more threads
                _thread.start_new_thread(self._wake, ())  # `threading` takes locks, which the main thread may hold

    def _wake(self) -> None:
        time.sleep(max(self._quiet_until - time.monotonic(), 0.0))
        self._is_waking = False
        for number in [*self._come]:
            if self._takes(number):
                _send_to_main_thread(number)


def deferring_signals(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with signals that wait for its end.

    For short functions about files that catch OSError, or call some of Python that do, as `os.path.islink` and
    `tempfile.TemporaryFile`: the TimeoutError of a time limit is an OSError, too. It would have no effect there, or be
    taken for an error of the disk.
    """

    @wraps(function)
    def finished(*args: P.args, **kwargs: P.kwargs) -> R:
        with DeferredSignals():
            return function(*args, **kwargs)

    return finished


def _send_to_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, number)  # which wakes it, for example in `time.sleep`
    else:
        signal.raise_signal(number)


def _raise_each(numbers: list[int]) -> None:
    """Raise each signal; of several handlers that raise, the last one's exception propagates."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_each(numbers[1:])
