"""Signals wait for the end of a call, and their handlers are those from before afterwards."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from functools import partial

import pytest

from amplab.policies import signals
from amplab.policies.signals import DeferredSignals, is_interrupt

needs_usr1 = pytest.mark.skipif(os.name != "posix", reason="sends SIGUSR1")


@pytest.fixture
def handled():
    """The numbers of the signals that a handler of the user's has got."""
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_at_the_end():
    signals = DeferredSignals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_has_come_is_admitted():
    signals = DeferredSignals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.admit()
    signals.end()


def test_those_after_the_admitted_one_wait():
    signals = DeferredSignals()
    signals.admit()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.end()


def test_a_handler_of_the_users_that_raises_nothing_is_called_for_each_that_is_admitted(handled):
    signals = DeferredSignals()
    signals.admit()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert len(handled) == 2
    signals.waits = True
    signal.raise_signal(signal.SIGINT)
    assert len(handled) == 2
    signals.end()
    assert len(handled) == 3


def test_the_outer_one_holds_inside(handled):
    outer = DeferredSignals()
    inner = DeferredSignals()
    inner.admit()
    signal.raise_signal(signal.SIGINT)
    inner.end()
    assert handled == []
    outer.end()
    assert handled == [signal.SIGINT]


def test_one_inside_lets_interrupts_wait_where_the_outer_one_admits_them(handled):
    outer = DeferredSignals()
    outer.admit()
    inner = DeferredSignals()
    signal.raise_signal(signal.SIGINT)
    assert handled == []
    inner.end()
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT] * 2
    outer.end()


def test_each_that_comes_long_after_the_admitted_one_is_admitted(monkeypatch):
    """Code in between may have caught the first one: no loop in it goes on for ever."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    signals = DeferredSignals()
    signals.admit()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] += 2.0
    signals.waits = True
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.end()


class Ended(Exception):
    """What the handler of another signal raises."""


def left_behind():
    """Let another signal come where the end of the block has not begun."""

    def no_end(_self):
        raise Ended

    def wait():
        with DeferredSignals():
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredSignals, "end", no_end)
        with pytest.raises(Ended):
            wait()
    assert isinstance(signal.getsignal(signal.SIGINT), DeferredSignals)


def test_one_that_another_signal_has_left_behind_has_no_effect():
    left_behind()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_next_one_takes_the_place_of_one_that_is_left_behind():
    left_behind()
    left_behind()
    signals = DeferredSignals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signals = DeferredSignals()
        signal.raise_signal(signal.SIGINT)
        signals.end()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing(handled):
    seen = []

    def look():
        signals = DeferredSignals()
        seen.append(signal.getsignal(signal.SIGINT))
        signals.end()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
    assert handled == []


def test_a_handler_that_the_call_has_set_stays(handled):
    signals = DeferredSignals()
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGINT, own)
    signals.end()
    assert signal.getsignal(signal.SIGINT) is own


@pytest.fixture
def limited():
    """The handler of a time limit."""

    def limit(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, limit)
    yield limit
    signal.signal(signal.SIGUSR1, before)


@needs_usr1
def test_a_time_limit_waits_as_an_interrupt_does(limited):
    deferred = DeferredSignals()
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(TimeoutError):
        deferred.admit()
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(TimeoutError):
        deferred.end()
    assert signal.getsignal(signal.SIGUSR1) is limited


def test_one_inside_does_not_admit_an_interrupt_that_comes_soon_after_another():
    outer = DeferredSignals()
    outer.admit()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    inner = DeferredSignals()
    signal.raise_signal(signal.SIGINT)
    inner.end()
    outer.waits = True
    with pytest.raises(KeyboardInterrupt):
        outer.end()


@needs_usr1
def test_of_two_signals_that_wait_none_is_lost(limited):
    deferred = DeferredSignals()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as raised:
        deferred.end()
    assert isinstance(raised.value.__context__, TimeoutError)


@needs_usr1
def test_a_signal_while_the_handlers_are_set_leaves_those_from_before(limited, monkeypatch):
    set_handler = signals._set_handler

    def interrupted_signal(number, handler):
        if number == signal.SIGUSR1 and isinstance(handler, DeferredSignals):
            signal.raise_signal(signal.SIGUSR1)
        return set_handler(number, handler)

    with monkeypatch.context() as patch:
        patch.setattr(signals, "_set_handler", interrupted_signal)
        with pytest.raises(TimeoutError):
            DeferredSignals()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGUSR1) is limited


@needs_usr1
def test_an_interrupt_while_a_handler_runs_that_raises_nothing_is_admitted():
    before = signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        deferred = DeferredSignals()
        deferred.admit()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
        deferred.end()
    finally:
        signal.signal(signal.SIGUSR1, before)


@needs_usr1
def test_an_interrupt_soon_after_one_that_was_caught_comes_a_second_later(limited):
    deferred = DeferredSignals()
    try:
        deferred.admit()
        with pytest.raises(TimeoutError):
            signal.raise_signal(signal.SIGUSR1)
        began = time.monotonic()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
        assert time.monotonic() - began < 10
    finally:
        deferred.waits = True
        deferred.end()


@needs_usr1
def test_one_inside_removes_itself_from_a_handler_that_was_set_in_between(handled, limited):
    outer = DeferredSignals()
    outer.admit()
    signal.signal(signal.SIGINT, own := handled.append)
    inner = DeferredSignals()
    inner.admit()
    inner.end()
    assert signal.getsignal(signal.SIGINT) == own
    outer.end()
    assert signal.getsignal(signal.SIGINT) == own
    assert signal.getsignal(signal.SIGUSR1) is limited


@pytest.mark.skipif(sys.platform != "linux", reason="reads sigaction as Linux has it")
def test_a_handler_of_an_event_loop_still_restarts_system_calls():
    def restarts():
        action = ctypes.create_string_buffer(256)
        ctypes.CDLL(None).sigaction(signal.SIGUSR1, None, action)
        return bool(int.from_bytes(action.raw[136:140], "little") & 0x10000000)

    async def defer():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        before = restarts()
        with DeferredSignals():
            pass
        return before, restarts()

    assert asyncio.run(defer()) == (True, True)


@needs_usr1
def test_a_handler_that_a_call_has_copied_to_another_signal_still_works():
    """SIGUSR1 acts as Ctrl-C."""
    with DeferredSignals():
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGINT))
    try:
        with DeferredSignals():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
        deferred = DeferredSignals()
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            deferred.end()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="has no real-time signals")
def test_every_signal_with_a_handler_waits():
    def limit(*_):
        signal.signal(signal.SIGRTMIN, signal.SIG_DFL)
        raise TimeoutError

    before = signal.signal(signal.SIGRTMIN, limit)
    try:
        deferred = DeferredSignals()
        signal.raise_signal(signal.SIGRTMIN)
        with pytest.raises(TimeoutError) as raised:
            deferred.admit()
        assert is_interrupt(raised.value)
        deferred.end()
    finally:
        signal.signal(signal.SIGRTMIN, before or signal.SIG_DFL)


def raised_by(function):
    with pytest.raises(BaseException) as raised:  # noqa: PT011  SystemExit, too
        function()
    return raised.value


def fails():
    raise TimeoutError


def raises_itself():
    error = TimeoutError()
    raise error from error


def wraps(function):
    try:
        function()
    except TimeoutError as error:
        raise ValueError from error


@needs_usr1
def test_an_exception_of_a_handler_is_an_interrupt_and_the_same_of_a_step_is_none(limited):
    send = partial(signal.raise_signal, signal.SIGUSR1)
    assert is_interrupt(raised_by(send))
    assert is_interrupt(raised_by(partial(wraps, send)))
    assert is_interrupt(raised_by(partial(sys.exit, 1)))
    assert not is_interrupt(raised_by(fails))
    assert not is_interrupt(raised_by(partial(wraps, fails)))
    assert not is_interrupt(raised_by(raises_itself))
    earlier = raised_by(send)
    with DeferredSignals():
        assert is_interrupt(earlier)
    signal.signal(signal.SIGUSR1, partial(limited, 1))
    assert is_interrupt(raised_by(send))
