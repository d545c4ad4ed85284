"""Replacements of CUDA's streams, events, generators and devices on the CPU, where each call finishes its work.

`cuda_on_cpu` puts them in place.
"""

import contextlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from amplab.scripts.cuda_names import DEVICE_NAME

__all__ = ["Event", "Scope", "Stream", "device_properties", "generator_on"]


class Scope(contextlib.AbstractContextManager[Any]):
    """A ``with`` block without effect: ``torch.cuda.device(0)``, ``torch.cuda.stream(stream)``."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


class Event:
    """A point in time.

    >>> start, end = Event(enable_timing=True), Event(enable_timing=True)
    >>> start.record()
    >>> end.record()
    >>> start.elapsed_time(end) >= 0.0
    True
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del enable_timing, blocking, interprocess
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        del stream
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Return at once: all work is done."""

    def synchronize(self) -> None:
        """Return at once: all work is done."""

    def query(self) -> bool:
        """Return True: everything before the event is done."""
        return True


class Stream(Scope):
    """A queue that is always empty; as a ``with`` block it has no effect."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        del device
        super().__init__()
        self.device = torch.device("cpu")
        self.priority = priority

    def wait_event(self, event: Any) -> None:
        """Return at once: all work is done."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: all work is done."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Return at once: all work is done."""

    def query(self) -> bool:
        """Return True: everything in the stream is done."""
        return True


class _SameKind(type(torch.Generator)):  # type: ignore[misc]  # its metaclass has no name
    """Makes ``isinstance`` of the replacement accept instances of the original class."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


def generator_on(moved: Callable[[Any], Any]) -> type[torch.Generator]:
    """Return a class that replaces ``torch.Generator`` and makes generators on ``moved(device)``.

    It is a class, since annotations contain ``torch.Generator | None``.
    """

    class Generator(torch._C.Generator, metaclass=_SameKind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator(moved(device))

    return Generator


def device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties of the CPU, with the capability of the first GPUs with tensor cores."""
    del device
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else 0
    return SimpleNamespace(
        name=DEVICE_NAME, major=7, minor=0, total_memory=memory, multi_processor_count=os.cpu_count() or 1
    )
