"""A thread of a trainer that is busy, as in a long step, while controls come."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from amplab.lab import Trainer


@contextmanager
def busy(trainer: Trainer) -> Iterator[None]:
    """Keep the trainer's thread from the next step boundary until the block ends."""
    begun, ends = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ends.wait(30)

    trainer._worker.post(wait)
    assert begun.wait(30)
    try:
        yield
    finally:
        ends.set()
