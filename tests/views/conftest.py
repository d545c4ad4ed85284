"""Shared by the tests of views: a trainer, an invented history, and the messages that a kernel sends to a page."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import comm
import pytest
from comm.base_comm import BaseComm

from amplab.lab import ExperimentConfig, History, StepRecord, Trainer


@pytest.fixture(autouse=True)
def quiet_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing."""
    monkeypatch.setenv("AMPLAB_KERNELS", "reference")


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A small trainer at rest, stopped when the test ends."""
    made = Trainer(ExperimentConfig(hidden=16))
    yield made
    made.stop()
    assert made.wait(10)


Record = Callable[..., StepRecord]


@pytest.fixture
def record() -> Record:
    """Make a step's record."""
    return make_record


def make_record(step: int, **changes: Any) -> StepRecord:
    """Return a clean step with some fields changed."""
    plain = {"loss": 1.0, "loss_scale": 65536.0, "next_loss_scale": 65536.0, "skipped": False, "opt_level": "O1"}
    rest = {"first_nonfinite": None, "score": None, "seconds": 0.01 * step, "injected": None}
    return StepRecord(step=step, **{**plain, **rest, **changes})


@pytest.fixture
def eventful() -> History:
    """Ten steps: 3 has a NaN loss, 5 is skipped by an injected overflow, 6 is at O2, 8 is skipped without a fault."""
    history = History()
    changes: dict[int, dict[str, Any]] = {
        3: {"loss": math.nan},
        5: {"skipped": True, "injected": "overflow", "first_nonfinite": "output.bias", "next_loss_scale": 32768.0},
        8: {"skipped": True, "loss": math.inf, "first_nonfinite": "hidden.weight", "loss_scale": 32768.0},
    }
    for step in range(10):
        level = "O1" if step < 6 else "O2"
        history.append(make_record(step, opt_level=level, **changes.get(step, {})))
    return history


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for a condition that another thread brings about."""

    def wait(condition: Callable[[], object], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.005)

    return wait


class RecordingComm(BaseComm):
    """A comm that keeps what it would send."""

    sent: list[dict]

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        self.sent.append({"type": msg_type, "comm": self.comm_id, "data": data or {}, "buffers": buffers or []})


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Everything that widgets made in this test send to the page, in order."""
    sent: list[dict] = []

    def create(*arguments: Any, **keys: Any) -> RecordingComm:
        # The first message goes out while the comm is being made.
        kind = type("Comm", (RecordingComm,), {"sent": sent})
        return kind(*arguments, **keys)

    monkeypatch.setattr(comm, "create_comm", create)
    return sent
