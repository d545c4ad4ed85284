"""Opening and closing the lab again and again leaves nothing behind."""

import gc
import resource
import sys
import threading
import time
from pathlib import Path

import pytest

import amplab.lab
from amplab.lab import ExperimentConfig
from amplab.lab.open import _Kernel

pytest.importorskip("amplab.views")

TIMES = 50
MOST_BYTES = 20_000_000
SMALL = ExperimentConfig(hidden=16)


def resident_bytes() -> int:
    """Return the memory that the process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_and_close(times: int) -> None:
    """Open a dashboard, train in it and close it, as a cell that runs again and again."""
    for _ in range(times):
        dashboard = amplab.lab.open(SMALL)
        dashboard.trainer.run(2)
        dashboard.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process as Linux shows it")
def test_fifty_openings_leave_no_thread_and_little_memory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Kernel()
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "_kernel", kernel)
    open_and_close(5)  # what is imported and built once
    threads, memory = threading.active_count(), resident_bytes()
    open_and_close(TIMES)
    grown = resident_bytes() - memory
    now = [thread.name for thread in threading.enumerate()]
    kernel.trainer.stop()
    assert kernel.trainer.wait(10)
    assert len(now) <= threads, now
    assert grown < MOST_BYTES, f"{grown / 1e6:.1f} MB"


def test_a_cell_that_runs_again_leaves_no_thread(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old dashboards are never closed; no page shows them."""
    kernel = _Kernel()
    monkeypatch.setattr(sys.modules["amplab.lab.open"], "_kernel", kernel)
    shown = [amplab.lab.open(SMALL)]
    shown[0].trainer.run(2)
    time.sleep(1.5)
    threads = threading.active_count()
    for _ in range(10):
        shown.append(amplab.lab.open(SMALL))
        shown[-1].trainer.run(2)
    end = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.1)
    now = [thread.name for thread in threading.enumerate()]
    kernel.trainer.stop()
    assert kernel.trainer.wait(10)
    for each in shown:
        each.close()
    assert len(now) <= threads, now
