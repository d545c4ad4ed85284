"""What every tab of the dashboard has, and what the presenter gives it.

A tab consists of four files: its class here, its payload as plain values beside it, `web/tab_NAME.js` with the function
that builds it in the page, and `web/tab_NAME.css`. It is in `TABS` of this package and in `PANELS` of `panels.js`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from amplab.lab import Event, Trainer
from amplab.views.parts import Message
from amplab.views.ticker import Pace

__all__ = ["Desk", "Tab"]


class Desk(Protocol):
    """What a tab may use of the dashboard that it is part of."""

    @property
    def trainer(self) -> Trainer:
        """The experiment."""

    def wake(self) -> None:
        """Request a tick."""

    def is_shown(self, tab: str) -> bool:
        """Whether a page is open and shows this tab."""

    def show(self, tab: str, payload: dict[str, Any]) -> None:
        """Set what the page draws in this tab."""

    def select(self, step: int | None) -> None:
        """Select a step in the charts and in every tab; None selects nothing."""


class Tab:
    """One tab; every method runs in the ticker's thread. A method that is not overridden does nothing.

    Args:
        desk: The dashboard's side.

    Attributes:
        name: Key of the tab in the page and in messages.
        label: Its text in the strip of tabs.
    """

    name: ClassVar[str]
    label: ClassVar[str]

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    @property
    def trainer(self) -> Trainer:
        """The experiment; a reset keeps it and replaces its history."""
        return self.desk.trainer

    @property
    def is_shown(self) -> bool:
        """Whether a page is open and shows this tab. What takes time waits until it is."""
        return self.desk.is_shown(self.name)

    def show(self, payload: dict[str, Any]) -> None:
        """Set what the page draws: plain values. A "count" appears beside the label."""
        self.desk.show(self.name, payload)

    def pace(self, seconds: float) -> Pace:
        """Return a `Pace` with which `tick` draws at most once in so many seconds."""
        return Pace(seconds, self.desk.wake)

    def begin(self) -> None:
        """Called once, before any event."""

    def on_event(self, event: Event) -> None:
        """Called with every event of the trainer except `StepRecord`; a tick follows."""

    def on_open(self) -> None:
        """Called when the page opens this tab; a tick follows."""

    def on_message(self, message: Message) -> None:
        """Called with a message that the page sent from this tab; a tick follows."""

    def on_select(self, step: int | None) -> None:
        """Called when a step was selected, here or elsewhere; a tick follows."""

    def tick(self) -> None:
        """Called at most ten times a second while a page is open and something has changed."""
