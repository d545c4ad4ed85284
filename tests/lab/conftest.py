"""What the tests of the lab share: a folder for run logs, a small trainer, an ear for its events."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from amplab.lab import TASKS, Event, ExperimentConfig, StateChanged, Trainer, skip_explanation
from amplab.lab.own_task import forget_own


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that $AMPLAB_RUNS names."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("AMPLAB_RUNS", str(folder))
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")  # for the processes started here: they compile nothing
    return folder


@pytest.fixture
def with_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every skip is explained, however slow the machine is."""
    monkeypatch.setattr(skip_explanation, "SHARE", math.inf)


@pytest.fixture
def trainer():
    """A trainer of the default experiment with 16 hidden units, no log."""
    trainer = Trainer(ExperimentConfig(hidden=16))
    yield trainer
    trainer.stop()
    assert trainer.wait(10)


class Ear:
    """Keeps the events of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()
        trainer.subscribe(self.hear)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def states(self) -> list[str]:
        return [event.state for event in self.of(StateChanged)]


@pytest.fixture
def listen() -> Callable[[Trainer], Ear]:
    """Listen to a trainer."""
    return Ear


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition."""

    def wait(condition: Callable[[], bool], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.002)

    return wait


@pytest.fixture
def nothing_own() -> Iterator[None]:
    """Forget the models of one's own that a test has given."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    forget_own(set())
    assert set(TASKS) & {"own", "own-2"} == set()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    """A kernel of its own."""
    pytest.importorskip("amplab.views")
    kernel = sys.modules["amplab.lab.open"]._Kernel()
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "_kernel", kernel)
    yield kernel
    if kernel.trainer is not None:
        kernel.trainer.stop()
        assert kernel.trainer.wait(10)
