"""SIGINT waits for the end of a block, and its handler is the one from before afterwards."""

import signal
import threading

import pytest

from amplab.amp.deferred_interrupts import deferred_interrupts


@pytest.fixture
def handled():
    """The numbers of the signals that a handler of the user's has got."""
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_where_the_block_ends():
    done = []

    @deferred_interrupts()
    def restore():
        signal.raise_signal(signal.SIGINT)
        done.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        restore()
    assert done == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_error_of_the_block_is_the_context_of_the_interrupt():
    @deferred_interrupts()
    def fail():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as info:
        fail()
    assert isinstance(info.value.__context__, ValueError)


def test_a_handler_of_the_users_is_called_once_at_the_end_of_the_outermost_block(handled):
    with deferred_interrupts():
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert handled == []
    assert handled == [signal.SIGINT]


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing(handled):
    seen = []

    def look():
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
    assert handled == []
