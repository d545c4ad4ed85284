"""Wait in a cell for an experiment that runs in the trainer's thread, without stopping it."""

from __future__ import annotations

import threading

from amplab.lab import ConfigChanged, Event, StateChanged, StepRecord, Trainer

__all__ = ["watch"]


def watch(trainer: Trainer, steps: int) -> int:
    """Wait until a running trainer has made `steps` more steps; return how many it made.

    Fewer than `steps` when it came to rest; those since a reset when it was reset. An interrupt ends the waiting alone.

    Raises:
        RuntimeError: It came to rest without a step.
    """
    made, over = 0, threading.Event()

    def hear(event: Event) -> None:
        nonlocal made
        if isinstance(event, StepRecord):
            made += 1
        elif isinstance(event, ConfigChanged) and event.reset:
            made = 0
        if made >= steps or (isinstance(event, StateChanged) and event.state != "running"):
            over.set()

    unsubscribe = trainer.subscribe(hear)
    try:
        while not over.wait(0.2) and trainer.state == "running":
            pass
    finally:
        unsubscribe()
    if made == 0:
        raise RuntimeError(f"run({steps}): it came to rest ({trainer.state}) before a step; call run() again.")
    return min(made, steps)
