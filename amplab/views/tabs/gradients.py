"""The tab of gradients: their exponents against the range of float16, now or at the selected step.

Those of the present step are requested once a second while the tab is open, and not while a step is selected: the run
cannot go back, so a selected step shows the nearest stored histogram, at the scale of the step that it is of.
"""

from __future__ import annotations

from amplab.lab import ConfigChanged, Event, GradientsReady
from amplab.views.tabs.gradients_payload import gradients_payload, stored_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["GradientsTab"]

PERIOD = 1.0
"""Seconds between two drawings: each takes a forward and a backward pass."""


class GradientsTab(Tab):
    """A histogram with a table of the layers, and a heat map of the layers over the run."""

    name = "gradients"
    label = "Gradients"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace = self.pace(PERIOD)
        self._selected: int | None = None

    def on_event(self, event: Event) -> None:
        """Draw the gradients, if this tab waits for them."""
        if isinstance(event, ConfigChanged) and event.reset:
            self._pace.forget()
        if isinstance(event, GradientsReady):
            if self.is_shown and self._selected is None:
                self.show(gradients_payload(event.record, self.trainer.history))
            else:  # another view of this run requested them, or it is too late
                self._pace.forget()

    def on_select(self, step: int | None) -> None:
        """Show what was stored near a step, or the present gradients again."""
        self._selected = step
        self._pace.forget()

    def tick(self) -> None:
        """Request the gradients of the present step, or show those near the selected one."""
        trainer = self.trainer
        present = (len(trainer.history), trainer.shrinking, trainer.config, self._selected)
        if not self.is_shown or not self._pace.is_due(present):
            return
        stored = None if self._selected is None else stored_payload(trainer.history, self._selected)
        if stored is None:
            self._selected = None
            trainer.request_gradients()
        else:
            self.show(stored)
