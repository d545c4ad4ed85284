"""The tab of runs: a table of the present and the kept runs, the comparison of all levels, and the twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amplab.lab import ActivationsReady, ConfigChanged, Event, ExperimentConfig, Failed, StateChanged, TwinReady
from amplab.lab.config_field import echo
from amplab.views.parts import Message
from amplab.views.tabs.runs_payload import runs_payload, twin_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["RunsTab"]

PERIOD = 0.4
"""Seconds between two drawings of the table."""


class RunsTab(Tab):
    """Runs side by side. Its messages::

    {"type": "compare", "steps"}, {"type": "stop"}, {"type": "twin"}
    {"type": "show", "number", "shown"}, {"type": "rename", "number", "name"}, {"type": "remove", "number"}
    {"type": "continue", "number"}, {"type": "restore", "number"}
    """

    name = "runs"
    label = "Runs"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._pace = self.pace(PERIOD)
        self._refusal: str | None = None
        self._answers = 0
        self._twin: dict[str, Any] | None = None
        self._counted: ExperimentConfig | None = None  # the config whose activations were requested
        self._activations: int | None = None

    def on_event(self, event: Event) -> None:
        """Keep the twin's report; draw at once what a reset or a failure changes."""
        if isinstance(event, TwinReady):
            self._twin = twin_payload(event.report, self.trainer.config.opt_level, event.step)
        if isinstance(event, ActivationsReady):
            self._activations = event.nbytes
        if isinstance(event, Failed) and self._twin == WAITING:
            self._twin = None
        if isinstance(event, TwinReady | ActivationsReady | Failed) or (
            isinstance(event, ConfigChanged) and event.reset
        ):
            self._pace.forget()
        if isinstance(event, StateChanged):
            self._pace.hurry()

    def on_message(self, message: Message) -> None:
        """Do what a button says; a refusal is shown in place of the summary."""
        try:
            _ACTIONS[message["type"]](self, message)
            self._refusal = None
        except (ValueError, RuntimeError) as refusal:
            self._refusal = str(refusal)
        self._answers += 1
        self._pace.forget()

    def tick(self) -> None:
        """Draw the table if something in it has changed; only its count while the tab is closed."""
        trainer = self.trainer
        if self.is_shown and self._counted != trainer.config:
            self._counted, self._activations = trainer.config, None  # none if they cannot be counted
            trainer.request_activations()
            self._pace.forget()
        steps = len(trainer.history) if self.is_shown or trainer.state != "running" else 0
        if self._pace.is_due((trainer.kept.version, trainer.comparison, self.is_shown, steps, self._answers)):
            shown = runs_payload(trainer, refusal=self._refusal, activations=self._activations)
            self.show({**shown, "twin": self._twin, "answers": self._answers})

    def on_open(self) -> None:
        """Draw at once."""
        self._pace.hurry()

    def ask_twin(self) -> None:
        """Request the twin, and say that it is on its way."""
        self.trainer.request_twin()
        self._twin = WAITING

    def restore(self, number: int) -> None:
        """Use the setting of a kept run: in place where the weights can stay, else with a reset."""
        trainer, wanted = self.trainer, self.trainer.kept.numbered(number).config
        if wanted.defaults() != trainer.wanted_config.defaults():
            trainer.reset(wanted)
        else:
            trainer.change(**wanted.live_values())


WAITING: dict[str, Any] = {"sentence": "Training both copies for a few steps …", "rows": []}

_ACTIONS: dict[str, Callable[[RunsTab, Message], object]] = {
    "compare": lambda tab, message: tab.trainer.compare(steps=_whole(message["steps"])),
    "stop": lambda tab, _: tab.trainer.stop_comparison(),
    "twin": lambda tab, _: tab.ask_twin(),
    "show": lambda tab, message: tab.trainer.kept.show(message["number"], is_shown=message["shown"]),
    "rename": lambda tab, message: tab.trainer.kept.rename(message["number"], message["name"]),
    "remove": lambda tab, message: tab.trainer.kept.remove(message["number"]),
    "continue": lambda tab, message: tab.trainer.continue_from(tab.trainer.kept.numbered(message["number"])),
    "restore": lambda tab, message: tab.restore(message["number"]),
}


def _whole(value: Any) -> int:
    """Return a number of steps from the page.

    Raises:
        ValueError: It is not a whole number from 1 to 100,000.
    """
    if value is None:
        raise ValueError("Steps: no number was entered; enter a whole number from 1 to 100,000.")
    if not isinstance(value, int | float) or not 1 <= value <= 100_000 or value != int(value):
        raise ValueError(f"Steps: {echo(str(value))} is not allowed; enter a whole number from 1 to 100,000.")
    return int(value)
