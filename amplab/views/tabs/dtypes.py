"""The tab of op dtypes: a trace of one training step, taken again whenever a setting changes the dtypes."""

from __future__ import annotations

from amplab.lab import FIELDS, ConfigChanged, Event, TraceReady
from amplab.trace import Trace
from amplab.views.tabs.dtypes_payload import dtypes_payload
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["DtypesTab"]

RETRACED = tuple(name for name, each in FIELDS.items() if each.changes_dtypes)
"""Fields whose change needs a new trace."""


class DtypesTab(Tab):
    """Every op of a step with its dtypes and the reason; rows that a change of level has changed are marked."""

    name = "dtypes"
    label = "Op dtypes"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._traced: tuple[str, Trace] | None = None

    def begin(self) -> None:
        """Request the first trace."""
        self.trainer.request_trace()

    def on_event(self, event: Event) -> None:
        """Draw a trace, or request one."""
        match event:
            case TraceReady():
                before, self._traced = self._traced, (event.opt_level, event.trace)
                levels = (before and before[0], event.opt_level)
                self.show(dtypes_payload(event.trace, before=before and before[1], levels=levels))
            case ConfigChanged(config=config, previous=previous):
                if config.model != previous.model:
                    self._traced = None
                if any(getattr(config, name) != getattr(previous, name) for name in RETRACED):
                    self.trainer.request_trace()
