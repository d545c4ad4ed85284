"""The ticker: at most one tick a period, none missed after the last change, and errors do not end it."""

import sys
import threading
import time
from itertools import pairwise

import pytest
from interrupts import interrupted

from amplab.views.ticker import Pace, Ticker


def test_many_changes_make_few_ticks_and_the_last_is_seen(until) -> None:
    state, seen = [0], []
    ticker = Ticker(lambda: seen.append((time.monotonic(), state[0])), on_failure=seen.append, period=0.05)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        state[0] += 1
        ticker.wake()
        time.sleep(0.001)
    until(lambda: seen and seen[-1][1] == state[0])
    ticker.close()
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(seen)]
    assert 2 <= len(seen) <= 12
    assert min(gaps) > 0.04


def test_wait_is_for_the_jobs_queued_so_far_and_not_for_those_of_a_closed_ticker() -> None:
    done = []
    ticker = Ticker(lambda: None, on_failure=done.append)
    ticker.call(lambda: (time.sleep(0.2), ticker.wait(), done.append(1)))
    ticker.wait()
    assert done == [1]
    ticker.close()
    ticker.wait()


def test_it_sleeps_until_it_is_woken() -> None:
    ticks = []
    ticker = Ticker(lambda: ticks.append(1), on_failure=ticks.append, period=0.01)
    time.sleep(0.1)
    assert ticks == []
    ticker.close()


def test_jobs_run_in_order_in_the_one_thread(until) -> None:
    order, threads = [], set()
    ticker = Ticker(lambda: None, on_failure=order.append)
    for number in range(20):
        ticker.call(lambda number=number: (order.append(number), threads.add(threading.current_thread())))
    until(lambda: len(order) == 20)
    assert order == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.current_thread()}
    ticker.close()


def test_a_failing_job_is_reported_and_the_next_one_runs(until) -> None:
    told, done = [], []
    ticker = Ticker(lambda: None, on_failure=told.append)
    ticker.call(lambda: 1 / 0)
    ticker.call(lambda: done.append(True))
    until(lambda: done)
    assert "ZeroDivisionError" in told[0]
    ticker.close()


def test_closing_ends_the_thread_even_from_within(until) -> None:
    outside = Ticker(lambda: None, on_failure=print)
    outside.call(lambda: None)
    thread = outside._thread
    outside.close()
    assert not thread.is_alive()
    inside = Ticker(lambda: None, on_failure=print)
    inside.call(inside.close)
    until(lambda: inside._thread is None)


def test_a_pace_postpones_a_drawing_and_skips_what_is_drawn() -> None:
    woken: list[bool] = []
    pace = Pace(0.2, lambda: woken.append(True))
    assert pace.is_due("a")
    assert not pace.is_due("a")
    assert not woken, "nothing has changed"
    assert not pace.is_due("b")
    assert woken, "b must be drawn later"
    time.sleep(0.25)
    assert pace.is_due("b")
    pace.forget()
    time.sleep(0.25)
    assert pace.is_due("b")


def test_its_thread_ends_when_nothing_happens_and_starts_again(until, monkeypatch) -> None:
    monkeypatch.setattr("amplab.views.ticker.IDLE", 0.05)
    ticks = []
    ticker = Ticker(lambda: ticks.append(1), on_failure=ticks.append, period=0.01)
    assert ticker._thread is None
    for times in (1, 2):
        ticker.wake()
        until(lambda times=times: len(ticks) == times)
        until(lambda: ticker._thread is None)
    ticker.close()
    ticker.call(lambda: ticks.append(2))
    assert ticker._thread is None
    assert ticks == [1, 1]


def test_what_is_in_a_hurry_is_drawn_at_once() -> None:
    pace = Pace(100.0, lambda: None)
    assert pace.is_due(1)
    assert not pace.is_due(2)
    pace.forget()
    assert not pace.is_due(2)
    pace.hurry()
    assert pace.is_due(2)


def test_whatever_a_job_or_the_report_of_it_raises_the_thread_goes_on(until, capsys) -> None:
    done: list[int] = []
    failures: list[str] = []

    def on_failure(text: str) -> None:
        failures.append(text)
        sys.exit("the notice")

    ticker = Ticker(lambda: None, on_failure=on_failure)
    ticker.call(lambda: sys.exit("the job"))
    ticker.call(lambda: done.append(1))
    until(lambda: done == [1])
    ticker.close()
    assert "SystemExit: the job" in failures[0]
    assert "SystemExit: the notice" in capsys.readouterr().err


def test_a_ticker_goes_on_after_an_interrupt_anywhere_in_a_call(until) -> None:
    """One between the making of its thread and the start of that would let nothing run again."""
    done: list[str] = []

    def hand_over() -> None:
        ticker.call_latest("select", lambda: done.append("latest"))
        ticker.wake()

    for at in range(1, 1000):
        ticker = Ticker(lambda: done.append("tick"), on_failure=done.append, period=0.001)
        interrupt = interrupted(hand_over, at, folders=[sys.modules[Ticker.__module__].__file__])
        done.clear()
        hand_over()
        until(lambda: "latest" in done and "tick" in done)
        ticker.close()
        if interrupt is None:
            break


def test_a_thread_that_cannot_start_is_started_by_the_next_job():
    """At the limit of threads of a system, or of a container."""
    ran, ticks = [], []
    ticker = Ticker(lambda: ticks.append(0), on_failure=pytest.fail)
    before = threading.stack_size(2**46)  # more than there is: no thread starts
    try:
        ticker.call(lambda: ran.append("first"))
        ticker.wake()
    finally:
        threading.stack_size(before)
    assert ran == []
    ticker.wake()
    ticker.call(lambda: ran.append("second"))
    ticker.close(wait=10)
    assert ran == ["first", "second"]
    assert ticks
