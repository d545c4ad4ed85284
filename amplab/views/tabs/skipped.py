"""The tab of skipped steps: the reason of each, as the trainer explains it."""

from __future__ import annotations

from amplab.lab import ConfigChanged, Event, SkipExplained, StateChanged
from amplab.lab.run_status import is_damaged
from amplab.views.parts import Message
from amplab.views.tabs.skipped_payload import skipped_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["SkippedTab"]

PERIOD = 0.5
"""Seconds between two drawings of the table."""


class SkippedTab(Tab):
    """The table of skipped steps. While a step can run again, its row has buttons to explain it and to step through."""

    name = "skipped"
    label = "Skipped steps"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace = self.pace(PERIOD)

    def on_event(self, event: Event) -> None:
        """Draw at once what was requested, and what a pause or a reset changes."""
        if isinstance(event, SkipExplained) or (isinstance(event, ConfigChanged) and event.reset):
            self._pace.forget()
        if isinstance(event, StateChanged):
            self._pace.hurry()

    def on_message(self, message: Message) -> None:
        """Explain a step: {"type": "explain", "step"}."""
        self.trainer.request_explanation(message["step"])

    def tick(self) -> None:
        """Draw the rows if there are other ones."""
        history = self.trainer.history
        explainable, walkable = self.trainer.explainable, self.trainer.walkable
        present = (history.skip_count, history.explained_count, is_damaged(history), explainable[:1], explainable[-1:])
        if self._pace.is_due(present):
            self.show(skipped_payload(history, explainable=explainable, walkable=walkable))
