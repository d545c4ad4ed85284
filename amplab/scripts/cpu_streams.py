"""What stands for CUDA's streams, events, generators and devices where all work is done when a call returns.

`cuda_on_cpu` puts these in their places.
"""

import contextlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["DEVICE_NAME", "Event", "Scope", "Stream", "device_properties", "generator_on"]

DEVICE_NAME = "CPU (in the place of CUDA)"


class Scope(contextlib.AbstractContextManager[Any]):
    """A block that changes nothing: ``torch.cuda.device(0)``, ``torch.cuda.stream(stream)``."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


class Event:
    """The moment at which it was recorded.

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
        """Take the time."""
        del stream
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Return: nothing is under way."""

    def synchronize(self) -> None:
        """Return: nothing is under way."""

    def query(self) -> bool:
        """Say that everything before it is done."""
        return True


class Stream(Scope):
    """A queue that is always empty; as a block it changes nothing."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        del device
        super().__init__()
        self.device = torch.device("cpu")
        self.priority = priority

    def wait_event(self, event: Any) -> None:
        """Return: nothing is under way."""

    def wait_stream(self, stream: Any) -> None:
        """Return: nothing is under way."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Return: nothing is under way."""

    def query(self) -> bool:
        """Say that everything in it is done."""
        return True


class _SameKind(type(torch.Generator)):
    """Lets what stands for a class recognize the instances of that class."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


def generator_on(moved: Callable[[Any], Any]) -> type[torch.Generator]:
    """Return a class in the place of ``torch.Generator`` that makes its generators on ``moved(device)``.

    A class, since annotations say ``torch.Generator | None``.
    """

    class Generator(torch._C.Generator, metaclass=_SameKind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator(moved(device))

    return Generator


def device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties of the one device there is; its capability is that of the first GPU with tensor cores."""
    del device
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else 0
    return SimpleNamespace(
        name=DEVICE_NAME, major=7, minor=0, total_memory=memory, multi_processor_count=os.cpu_count() or 1
    )
