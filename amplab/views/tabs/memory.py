"""The tab that answers what fits on a GPU: the bytes of a step at each level, counted one level after the other."""

from __future__ import annotations

from amplab.lab import ConfigChanged, Event, MemoryCounted
from amplab.lab.levels import LEVELS
from amplab.lab.memory_fit import LevelMemory
from amplab.views.tabs.memory_payload import memory_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["MemoryTab"]

RECOUNTED = ("task", "model", "hidden", "optimizer", "keep_batchnorm_fp32", "master_weights", "float32_modules")
"""Fields whose change makes the counts out of date."""


class MemoryTab(Tab):
    """A bar for each level, for a batch size and a card that the page chooses."""

    name = "memory"
    label = "Memory"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._counted: dict[str, LevelMemory] = {}
        self._asked: str | None = None

    def begin(self) -> None:
        """Show the cards."""
        self._draw()

    def on_event(self, event: Event) -> None:
        """Draw a level that was counted, and request the next."""
        match event:
            case MemoryCounted(memory=memory):
                if memory.opt_level == self._asked:
                    self._counted[memory.opt_level] = memory
                    self._asked = None
                    self._draw()
                    self._continue()
            case ConfigChanged(config=config, previous=previous):
                if any(getattr(config, name) != getattr(previous, name) for name in RECOUNTED):
                    self._counted, self._asked = {}, None
                    self._draw()
                    self._continue()

    def on_open(self) -> None:
        """Count what has not been counted."""
        self._continue()

    def _continue(self) -> None:
        left = [name for name in LEVELS if name not in self._counted]
        if left and self._asked is None and self.is_shown:
            self._asked = left[0]
            self.trainer.request_memory(left[0])

    def _draw(self) -> None:
        self.show(memory_payload([*self._counted.values()], len(LEVELS), self.trainer.config))
