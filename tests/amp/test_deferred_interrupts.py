"""SIGINT waits for the end of a call, and its handler is the one from before afterwards."""

import signal
import threading

import pytest

from amplab.amp.deferred_interrupts import DeferredInterrupts


@pytest.fixture
def handled():
    """The numbers of the signals that a handler of the user's has got."""
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_at_the_end():
    interrupts = DeferredInterrupts()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_has_come_is_admitted():
    interrupts = DeferredInterrupts()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.admit_one()
    interrupts.end()


def test_those_after_the_admitted_one_wait():
    interrupts = DeferredInterrupts()
    interrupts.admit_one()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


def test_a_handler_of_the_users_that_raises_nothing_is_called_for_each_that_is_admitted(handled):
    interrupts = DeferredInterrupts()
    interrupts.admit_one()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert len(handled) == 2
    interrupts.waits = True
    signal.raise_signal(signal.SIGINT)
    assert len(handled) == 2
    interrupts.end()
    assert len(handled) == 3


def test_the_outer_one_holds_inside(handled):
    outer = DeferredInterrupts()
    inner = DeferredInterrupts()
    inner.admit_one()
    signal.raise_signal(signal.SIGINT)
    inner.end()
    assert handled == []
    outer.end()
    assert handled == [signal.SIGINT]


def test_one_inside_lets_interrupts_wait_where_the_outer_one_admits_them(handled):
    outer = DeferredInterrupts()
    outer.admit_one()
    inner = DeferredInterrupts()
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
    interrupts = DeferredInterrupts()
    interrupts.admit_one()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] += 2.0
    interrupts.waits = True
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


class Ended(Exception):
    """What the handler of another signal raises."""


def left_behind():
    """Let another signal come where the end of the block has not begun."""

    def no_end(_self):
        raise Ended

    def wait():
        with DeferredInterrupts():
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredInterrupts, "end", no_end)
        with pytest.raises(Ended):
            wait()
    assert isinstance(signal.getsignal(signal.SIGINT), DeferredInterrupts)


def test_one_that_another_signal_has_left_behind_has_no_effect():
    left_behind()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_next_one_takes_the_place_of_one_that_is_left_behind():
    left_behind()
    left_behind()
    interrupts = DeferredInterrupts()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts = DeferredInterrupts()
        signal.raise_signal(signal.SIGINT)
        interrupts.end()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing(handled):
    seen = []

    def look():
        interrupts = DeferredInterrupts()
        seen.append(signal.getsignal(signal.SIGINT))
        interrupts.end()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
    assert handled == []


def test_a_handler_that_the_call_has_set_stays(handled):
    interrupts = DeferredInterrupts()
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGINT, own)
    interrupts.end()
    assert signal.getsignal(signal.SIGINT) is own
