"""Signals while a history is read or grows: no step is lost or there twice, and no lock stays taken."""

import signal
import sys
import threading
from contextlib import contextmanager

import pytest
from interrupts import interrupted_everywhere
from torch import nn, ones, optim

import amplab
from amplab.lab import fork_locks, growing_columns, history, load_run, run_store
from amplab.lab.events import StepRecord
from amplab.lab.history import History

FILES = history.__file__, growing_columns.__file__
STEPS = 300  # more than wait to be moved into the columns, so that some have been moved and others wait
READS = {
    "skips": History.skips,
    "records": History.records,
    "rate": History.rate,
    "thinned": lambda run: run.thinned(["loss"], 100),
    "losses": History.missing_losses,
    "len": len,
}


def record(step):
    skipped = step % 7 == 0
    return StepRecord(step, 1.0, 2.0, 1.0 if skipped else 2.0, skipped, None, "O1", None, step / 1000, None)


def grown(steps=STEPS):
    run = History()
    for step in range(steps):
        run.append(record(step))
    return run


def in_a_thread(read):
    """Return what a read gives in another thread, which does not wait for a lock that this one has left taken."""
    results = []
    thread = threading.Thread(target=lambda: results.append(read()), daemon=True)
    thread.start()
    thread.join(20)
    assert results, "the lock stays taken"
    return results[0]


@pytest.mark.parametrize("name", READS)
def test_an_interrupted_read_loses_no_step_and_leaves_the_lock(name):
    kept = []  # as IPython keeps the last exception, and with it the frames of its traceback

    def read():
        try:
            READS[name](runs[-1])
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    runs = [grown()]
    for interrupt in interrupted_everywhere(read, folders=FILES, every=11):
        assert in_a_thread(runs[-1].records) == [record(step) for step in range(STEPS)], interrupt
        assert len(runs[-1].skips()) == len(range(0, STEPS, 7)), interrupt
        runs.append(grown())
    assert kept


def test_an_interrupted_append_adds_its_step_once():
    runs = [grown(255)]
    for interrupt in interrupted_everywhere(lambda: runs[-1].append(record(255)), folders=FILES, every=5):
        assert [each.step for each in runs[-1].records()] in ([*range(255)], [*range(256)]), interrupt
        runs.append(grown(255))


@contextmanager
def signalled(at, files, answer):
    """Let a signal come at instruction number `at` of some files, whose handler calls `answer`; yield the ones left."""
    left = [at]

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before, tracing = signal.signal(signal.SIGUSR1, lambda *_: answer()), sys.gettrace()
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", READS)
def test_the_handler_of_a_signal_may_read_at_any_point(name):
    expected = repr(READS[name](grown()))
    for at in range(1, 100_000, 1 if name == "len" else 29):
        run, counts = grown(), []
        with signalled(at, FILES, lambda run=run, counts=counts: counts.append((len(run), len(run.skips())))) as left:
            result = READS[name](run)
        assert repr(result) == expected
        assert counts in ([], [(STEPS, len(range(0, STEPS, 7)))])
        if left[0] > 0:
            return
    pytest.fail("the read has no end")


def test_the_handler_of_a_signal_may_ask_for_findings_while_a_step_is_recorded(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    left, steps = [0], 0
    with amplab.watch(model, optimizer, log=tmp_path / "run.jsonl") as watch:
        while left[0] <= 0:
            steps += 1
            with signalled(steps, (*FILES, run_store.__file__), lambda: (watch.findings(), str(watch))) as left:
                optimizer.zero_grad()
                watch.loss(model(ones(1, 2)).sum()).backward()
                optimizer.step()
    assert watch.history.column("step").tolist() == list(range(steps))
    assert load_run(watch.log_path).history.column("step").tolist() == list(range(steps))
    assert len([*tmp_path.glob("*.jsonl")]) == 1


def test_another_thread_that_asks_for_findings_finishes_no_step_of_the_loop(tmp_path):
    model = nn.Linear(2, 1)
    with amplab.watch(model, optim.SGD(model.parameters(), lr=0.01), log=tmp_path / "run.jsonl") as watch:
        watch._store._appending = history.row_of(record(0)), 0  # as while the thread of the loop records a step
        in_a_thread(lambda: (watch.findings(), str(watch), repr(watch)))
        assert len(watch.history) == 0
        watch._store._appending = None


def test_a_read_that_is_interrupted_in_a_watched_loop_leaves_a_log_that_loads(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            watch.loss(model(ones(1, 2)).sum()).backward()
            optimizer.step()

    with amplab.watch(model, optimizer, log=tmp_path / "run.jsonl") as watch:
        train(5)
        reads = interrupted_everywhere(watch.history.skips, folders=FILES)
        trained = 5
        for _ in reads:
            train(5)
            trained += 5
    assert load_run(tmp_path / "run.jsonl").history.column("step").tolist() == list(range(trained))


def test_no_interrupt_is_lost_when_a_history_is_freed():
    """Python discards what the callback of a weak reference raises."""
    assert all(interrupt.escaped for interrupt in interrupted_everywhere(History, folders=[fork_locks.__file__]))
