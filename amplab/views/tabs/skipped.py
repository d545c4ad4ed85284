"""The tab of skipped steps: one row for each, with its cause."""

from __future__ import annotations

from amplab.lab import ConfigChanged, Event, SkipExplained
from amplab.views.tabs.skipped_payload import explanation, is_broken, skipped_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["SkippedTab"]

PERIOD = 0.5
"""Seconds between two drawings of the table."""


class SkippedTab(Tab):
    """The table of skipped steps; the latest is explained while the tab is open, which takes several steps' time."""

    name = "skipped"
    label = "Skipped steps"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace = self.pace(PERIOD)
        self._explained: dict[int, str] = {}  # by the step that was skipped

    def on_event(self, event: Event) -> None:
        """Keep an explanation, or forget those of the run before."""
        if isinstance(event, SkipExplained):
            self._explained[event.step] = explanation(event.found)
            self._show()
        elif isinstance(event, ConfigChanged) and event.reset:
            self._explained = {}
            self._pace.forget()

    def on_open(self) -> None:
        """Request an explanation of the latest skipped step."""
        self._request_explanation()

    def tick(self) -> None:
        """Draw the rows if steps were skipped."""
        history = self.trainer.history
        if self._pace.is_due((history.skip_count, is_broken(history))):
            self._show()
            self._request_explanation()

    def _show(self) -> None:
        self.show(skipped_payload(self.trainer.history, self._explained))

    def _request_explanation(self) -> None:
        history = self.trainer.history
        latest = history.skips(max(0, history.skip_count - 1))
        if self.is_shown and latest and latest[-1].step not in self._explained:
            self.trainer.request_explanation()
