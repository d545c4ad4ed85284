"""The tab that walks through one training step in its stages: it takes a real step, keeps its record, and draws it.

Messages of the page: {"type": "step"} trains one step, {"type": "again", "step"} takes a skipped one again beside the
run, {"type": "parameter", "name"} and {"type": "element", "value"}
choose what is shown of the record. Which stage is shown is known to the page alone.
"""

from __future__ import annotations

from dataclasses import replace

from amplab.lab import ConfigChanged, Event, StagesReady, StepStages
from amplab.views.parts import Message
from amplab.views.tabs.step_through_payload import Chosen, step_through_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["StepThroughTab"]

GONE = "cannot run again: it is not kept any more. The run was reset, or later skipped steps have taken its place."


class StepThroughTab(Tab):
    """One step of the running experiment in eight stages: the chosen parameter before and after each."""

    name = "step_through"
    label = "Step through"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._stages: StepStages | None = None
        self._chosen = Chosen()
        self._answers = 0

    def on_event(self, event: Event) -> None:
        """Show a recorded step; forget the one of the run before."""
        if isinstance(event, StagesReady) and event.stages is not None:
            self._stages = event.stages
            self._draw()
            self.desk.select(event.step)
        elif isinstance(event, StagesReady):
            self._draw(refusal=f"Step {event.step:,} {GONE}")
        elif isinstance(event, ConfigChanged) and event.reset:
            self._stages = None
            self._draw()

    def on_message(self, message: Message) -> None:
        """Take a step, or show another parameter or element of the recorded one."""
        if message["type"] == "step":
            self._step()
            return
        if message["type"] == "again":
            self.trainer.request_stages(message["step"], self._chosen.parameter)
            return
        if message["type"] == "parameter":
            self._chosen = Chosen(message["name"], self._rule)
        elif message["type"] == "element":
            value = message["value"]
            self._chosen = replace(self._chosen, element=value if isinstance(value, str) else int(value))
        self._draw()

    @property
    def _rule(self) -> str | None:
        """The rule that chooses the element; an index belongs to one parameter only."""
        return self._chosen.element if isinstance(self._chosen.element, str) else None

    def _step(self) -> None:
        try:
            self.trainer.step_in_stages(self._chosen.parameter)
        except RuntimeError as refusal:
            self._draw(refusal=str(refusal))

    def _draw(self, *, refusal: str = "") -> None:
        self._answers += 1  # an answer is seen even if it shows the same again
        shown = {} if self._stages is None else step_through_payload(self._stages, self._chosen)
        self.show({**shown, "refusal": refusal, "answers": self._answers})
