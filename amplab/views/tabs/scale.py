"""The tab of the loss scale: how it moves, what the run costs, and other scaling rules over the same run."""

from __future__ import annotations

import time
from typing import Any

from amplab.lab import ConfigChanged, Event, StateChanged
from amplab.views.parts import Message
from amplab.views.tabs.scale_payload import dynamics, nearest_exponent, own_rule, what_if_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["ScaleTab"]

PERIOD = 0.5
"""Seconds between two drawings of the figures."""

WHAT_IF_PERIOD = 1.5
"""Seconds between two drawings of the other rules while the run goes on, at least; see `WHAT_IF_SHARE`."""

WHAT_IF_SHARE = 0.05
"""Largest share of the time that following other rules takes: a rule that moves at every step takes longest."""

_WINDOW = 2000  # of GradScaler, where that of the run is not known


class ScaleTab(Tab):
    """Two views, of which one is shown: "now", and "whatif" with a rule that the person describes."""

    name = "scale"
    label = "Scale"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace, self._slow = self.pace(PERIOD), self.pace(WHAT_IF_PERIOD)
        self._view = "now"
        self._begin_with_config()

    def on_event(self, event: Event) -> None:
        """Begin again with the rule of a new experiment; draw at once what a pause leaves."""
        if isinstance(event, StateChanged):
            self._pace.hurry()
            self._slow.hurry()
        if isinstance(event, ConfigChanged) and event.reset:
            self._begin_with_config()
            self._pace.forget()
            self._slow.forget()

    def on_message(self, message: Message) -> None:
        """Change the view or the rule, and draw at once."""
        if message["type"] == "view":
            self._view = message["view"]
        elif message["type"] == "rule":
            self._take(message)
        self._slow.forget()
        self._draw()

    def tick(self) -> None:
        """Draw what has changed."""
        history = self.trainer.history
        present = (id(history), len(history), self.trainer.config)
        pace = self._pace if self._view == "now" else self._slow
        if self.is_shown and pace.is_due(present):
            self._draw()

    def _begin_with_config(self) -> None:
        config = self.trainer.config
        init = nearest_exponent(config.init_scale)
        self._asked: dict[str, Any] = {"init": init, "window": config.growth_interval or _WINDOW, "backoff": 0.5}
        self._used = self._asked  # the last ones that are allowed
        self._refusal: str | None = None

    def _take(self, message: Message) -> None:
        """Use the rule of a message, or say why it is none."""
        self._asked = {name: message[name] for name in self._asked}
        try:
            own_rule(self.trainer.config, **self._asked)
            self._used, self._refusal = self._asked, None
        except (TypeError, ValueError) as refusal:
            self._refusal = str(refusal) if isinstance(refusal, ValueError) else "Enter a number in each field."

    def _draw(self) -> None:
        history = self.trainer.history
        payload: dict[str, Any] = {"view": self._view, "rule": self._asked, "refusal": self._refusal}
        if self._view == "now":
            payload |= dynamics(history, self.trainer.config, self.trainer.loss_scale, self.trainer.scale_growth)
        else:
            began = time.monotonic()
            payload |= what_if_payload(history, own_rule(self.trainer.config, **self._used))
            self._slow.period = max(WHAT_IF_PERIOD, (time.monotonic() - began) / WHAT_IF_SHARE)
        self.show(payload)
