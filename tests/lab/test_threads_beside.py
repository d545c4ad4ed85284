"""A watch beside threads of one's own: what they write is never taken back, and those that share nothing are no bar."""

import itertools
import multiprocessing
import os
import queue
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import amplab

COUNT = 0


class Attribute:
    def __init__(self) -> None:
        self.number = 0

    def put(self) -> None:
        self.number += 1

    def sample(self) -> int:
        return self.number


class InList(Attribute):
    def __init__(self) -> None:
        self.items: list[int] = []

    def put(self) -> None:
        self.items.append(1)

    def sample(self) -> int:
        return len(self.items)


class InArray(Attribute):
    def __init__(self) -> None:
        self.items = np.zeros(1, dtype=np.int64)

    def put(self) -> None:
        self.items[0] += 1

    def sample(self) -> int:
        return int(self.items[0])


class InTensor(InArray):
    def __init__(self) -> None:
        self.items = torch.zeros(1, dtype=torch.int64)


class InFile:
    def put(self) -> None:
        global COUNT  # noqa: PLW0603
        COUNT += 1

    def sample(self) -> int:
        return COUNT


class InClosure:
    def __init__(self) -> None:
        number = 0

        def put() -> None:
            nonlocal number
            number += 1

        self.put, self.sample = put, lambda: number


KINDS = [Attribute, InList, InArray, InTensor, InFile, InClosure]


def train(loss_of, model, work=None, steps=6):
    """Train beside a thread that works all the time, with a scale at which each step is skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cpu", init_scale=2.0**60)
    ends, done = threading.Event(), 0

    def runs() -> None:
        nonlocal done
        while not ends.is_set():
            work()
            done += 1
            ends.wait(1e-4)

    thread = threading.Thread(target=runs, name="actor", daemon=True)
    if work is not None:
        thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with amplab.watch(model, optimizer, scaler=scaler, step=loss_of) as watched:
                for batch in watched.batches([torch.ones(8, 4)] * steps):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
    finally:
        ends.set()
        if work is not None:
            thread.join()
    assert watched.history.skip_count == steps
    return watched, done


def run_beside(kind, works=True):
    global COUNT
    COUNT, model, buffer = 0, nn.Linear(4, 1), kind()

    def loss_of(batch):
        read = buffer.sample()
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean() + 0 * read

    watched, done = train(loss_of, model, buffer.put if works else None)
    return watched, done, buffer.sample()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_thread_writes_to_what_a_step_reads_is_never_taken_back(kind):
    watched, done, held = run_beside(kind)
    assert (held, done > 20) == (done, True)
    assert "the thread actor may write to" in watched.failures[0]
    assert "End it before, or let step= use a copy." in watched.failures[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_thread_skipped_steps_run_again(kind):
    watched, _, _ = run_beside(kind, works=False)
    assert watched.failures == ()
    assert watched.history.explanations[0].kind == "scale"


class Settings:
    def __init__(self) -> None:
        self.factor, self.seen = 1.0, 0


def test_a_thread_that_shares_nothing_it_writes_to_is_no_bar():
    """It reads what the step reads, as settings, and writes to a queue of its own."""
    model, settings, ahead, ready = nn.Linear(4, 1), Settings(), queue.Queue[float](), []

    def work():
        ahead.put(settings.factor)
        ready.append(ahead.get())

    def loss_of(batch):
        with amplab.autocast("cpu", torch.float16):
            return settings.factor * model(batch).float().square().mean()

    watched, done = train(loss_of, model, work)
    assert watched.failures == ()
    assert watched.history.explanations[0].kind == "scale"
    assert len(ready) == done > 20


def test_a_thread_that_runs_the_model_is_told():
    model, seen = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), []

    def act():
        with torch.no_grad():
            seen.append(model(torch.ones(2, 4)))

    def loss_of(batch):
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    watched, _ = train(loss_of, model, act)
    assert "the thread actor may write to an object of class" in watched.failures[0]


def test_a_thread_that_draws_gets_no_number_twice():
    model, drawn = nn.Linear(4, 1), []

    def loss_of(batch):
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    watched, _ = train(loss_of, model, lambda: drawn.append(float(torch.randn(()))))
    assert len({*drawn}) == len(drawn) > 20
    assert "the thread actor may write to the state of random generators" in watched.failures[0]


def count_in(shared):
    for _ in range(300):
        shared[0] += 1
        time.sleep(5e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that is forked")
def test_what_another_process_writes_to_shared_memory_is_never_taken_back():
    model, shared = nn.Linear(4, 1), torch.zeros(2).share_memory_()

    def loss_of(batch):
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean() + 0 * float(shared[0])

    process = multiprocessing.get_context("fork").Process(target=count_in, args=(shared,))
    process.start()
    watched, _ = train(loss_of, model, steps=20)
    process.join(timeout=60)
    assert (process.exitcode, float(shared[0])) == (0, 300.0)
    assert "another process may write to a tensor in shared memory" in watched.failures[0]


def with_a_lock():
    """The loop holds the lock while it updates the weights, in which amplab's scaler says that the step was skipped."""
    lock = threading.Lock()

    def update(make):
        with lock:
            make()

    def wait():
        with lock:
            return True

    return update, wait


def with_a_queue():
    """One item for each step."""
    items = queue.Queue()
    for number in range(6):
        items.put(number)
    return lambda make: make(), items.get


def with_an_iterator():
    items = itertools.count()
    return lambda make: make(), lambda: next(items)


AWAITED = {"lock": with_a_lock, "Queue": with_a_queue, "count": with_an_iterator}


@pytest.mark.parametrize("kind", AWAITED)
def test_a_step_that_waits_or_takes_the_next_item_is_not_run_again(kind):
    update, wait = AWAITED[kind]()
    model, waited = nn.Linear(4, 1), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), amplab.GradScaler("cpu", init_scale=2.0**60)

    def loss_of(batch):
        waited.append(wait())
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    def loop():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with amplab.watch(model, optimizer, scaler=scaler, step=loss_of) as watched:
                for batch in watched.batches([torch.ones(8, 4)] * 6):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(batch)).backward()
                    update(lambda: (scaler.step(optimizer), scaler.update()))
        done.append(watched)

    done = []
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert (len(waited), done[0].history.skip_count) == (6, 6)
    assert kind == "lock" or waited == [*range(6)]
    assert f"names an object of class {kind}: a step that runs again could wait" in done[0].failures[0]


def test_a_flag_that_is_only_read_and_a_free_lock_are_no_bar():
    model, stop, lock, outer = nn.Linear(4, 1), threading.Event(), threading.Lock(), threading.RLock()

    def loss_of(batch):
        with lock, outer, amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean() * (0 if stop.is_set() else 1)

    with outer:
        watched, _ = train(loss_of, model)
    assert watched.failures == ()
    assert watched.history.explanations[0].kind == "scale"


class Actor(threading.Thread):
    def __init__(self, items):
        super().__init__(name="one of a class", daemon=True)
        self.items, self.ends = items, threading.Event()

    def run(self):
        while not self.ends.is_set():
            self.items.append(1)
            self.ends.wait(1e-4)


def test_a_class_of_threads_is_followed():
    model, items = nn.Linear(4, 1), []
    actor = Actor(items)

    def loss_of(batch):
        with amplab.autocast("cpu", torch.float16):
            return model(batch).float().square().mean() + 0 * len(items)

    actor.start()
    try:
        watched, _ = train(loss_of, model)
    finally:
        actor.ends.set()
        actor.join()
    assert "the thread one of a class may write to an object of class list" in watched.failures[0]
