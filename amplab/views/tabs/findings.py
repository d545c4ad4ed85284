"""The tab of findings: what the rules of `amplab.diagnose` find in the run while it goes, and what to do about it."""

from __future__ import annotations

from amplab.lab import ConfigChanged, ConfigRemedy, Event, SkipExplained, StateChanged, config_remedy
from amplab.views.parts import Message
from amplab.views.tabs.findings_payload import card_key, findings_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["FindingsTab"]

PERIOD = 1.5
"""Seconds between two examinations while the tab is open: each reads the last 2,000 steps."""

CLOSED = 4.0
"""Seconds between two while it is closed, for the count beside its label."""


class FindingsTab(Tab):
    """One card for each finding. A button applies its remedy where that is a change of the config."""

    name = "findings"
    label = "Findings"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._open, self._closed = self.pace(PERIOD), self.pace(CLOSED)
        self._remedies: dict[str, ConfigRemedy] = {}  # by the key of their card
        self._refusal = ""

    def on_event(self, event: Event) -> None:
        """Examine at once after a change, a pause, and the explanation of a skipped step."""
        if isinstance(event, ConfigChanged | SkipExplained):
            self._open.forget()
        if isinstance(event, StateChanged):
            self._open.hurry()
            self._closed.hurry()
        if isinstance(event, ConfigChanged):
            self._closed.forget()
            self._refusal = ""

    def on_open(self) -> None:
        """Examine at once."""
        self._open.hurry()

    def on_message(self, message: Message) -> None:
        """Apply the remedy of a card: {"type": "apply", "key"}."""
        remedy = self._remedies.get(message["key"])
        try:
            if remedy is not None:
                self.trainer.apply(remedy)
        except (ValueError, RuntimeError) as refusal:
            self._refusal = str(refusal)
        self._open.forget()

    def tick(self) -> None:
        """Draw the cards if the run has gone on."""
        trainer, history = self.trainer, self.trainer.history
        present = (len(history), history.explained_count, trainer.config, self._refusal)
        if not (self._open if self.is_shown else self._closed).is_due(present):
            return
        found = trainer.findings()
        remedies = {card_key(each): config_remedy(each, trainer.config) for each in found}
        self._remedies = {key: remedy for key, remedy in remedies.items() if remedy is not None}
        self.show(findings_payload(found, self._remedies, steps=len(history), refusal=self._refusal))
