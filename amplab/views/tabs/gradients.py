"""The tab of gradients: their exponents against the range of float16, requested once a second while it is open."""

from __future__ import annotations

from amplab.lab import Event, GradientsReady
from amplab.views.tabs.gradients_payload import gradients_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["GradientsTab"]

PERIOD = 1.0
"""Seconds between two drawings: each takes a forward and a backward pass."""


class GradientsTab(Tab):
    """A histogram, and a table of the layers."""

    name = "gradients"
    label = "Gradients"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace = self.pace(PERIOD)

    def on_event(self, event: Event) -> None:
        """Draw the gradients, if this tab waits for them."""
        if isinstance(event, GradientsReady):
            if self.is_shown:
                self.show(gradients_payload(event.record))
            else:  # another view of this run requested them, or it is too late
                self._pace.forget()

    def tick(self) -> None:
        """Request the gradients of the present step."""
        trainer = self.trainer
        present = (len(trainer.history), trainer.shrinking, trainer.config)
        if self.is_shown and self._pace.is_due(present):
            trainer.request_gradients()
