"""The tab of op dtypes: a trace of one training step, taken again whenever a setting changes the dtypes."""

from __future__ import annotations

from typing import Any

from amplab.lab import FIELDS, ConfigChanged, Event, Failed, InputsReady, LevelTraced, TraceReady
from amplab.lab.config_field import SettingRefused, listed
from amplab.lab.levels import LEVELS
from amplab.policies import PrecisionPolicy
from amplab.views.parts import Message
from amplab.views.tabs.dtypes_payload import TracedLevel, dtypes_payload, measured_inputs
from amplab.views.tabs.tab import Desk, Tab

__all__ = ["DtypesTab"]

RETRACED = tuple(name for name, each in FIELDS.items() if each.changes_dtypes)
"""Fields whose change needs a new trace."""

OVERRIDES = {"op": "float32_ops", "module": "float32_modules"}
"""The field of the config that each kind of override is in."""


class DtypesTab(Tab):
    """Every op of a step with its dtypes and the reason, as a picture and as a table.

    Rows that a change has changed are marked. The page asks for what takes time: the inputs of one op, the step at
    another level.
    """

    name = "dtypes"
    label = "Op dtypes"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._now: TracedLevel | None = None
        self._before: TracedLevel | None = None
        self._other: TracedLevel | None = None
        self._compared: str | None = None
        self._measured: dict[str, Any] | None = None
        self._problem = ""
        self._untraced = ""  # why the present step could not be traced

    def begin(self) -> None:
        """Request the first trace."""
        self.trainer.request_trace()

    def on_event(self, event: Event) -> None:
        """Draw a trace, or request one."""
        match event:
            case TraceReady():
                if self._now is None or event.trace is not self._now.trace:  # else another dashboard has requested it
                    self._before, self._now = self._now, TracedLevel(event.opt_level, event.trace)
                    self._measured = None
                self._untraced = ""
                self._draw()
            case Failed(text=text) if text.startswith("trace failed"):
                self._untraced = event.error
                self._draw()
            case LevelTraced() if event.opt_level == self._compared:
                self._other = TracedLevel(event.opt_level, event.trace)
                self._draw()
            case InputsReady():
                self._measured = {"index": str(event.index), "inputs": measured_inputs(event.inputs)}
                self._draw()
            case ConfigChanged(config=config, previous=previous):
                if (config.task, config.model) != (previous.task, previous.model):
                    self._now = None
                if any(getattr(config, name) != getattr(previous, name) for name in RETRACED):
                    self._request()

    def on_message(self, message: Message) -> None:
        """Measure the inputs of an op, or compare with another level."""
        match message:
            case {"type": "measure", "index": index}:
                self.trainer.request_inputs(int(index))
            case {"type": "compare", "level": level}:
                self._compared, self._other = level, None
                if level is None:
                    self._draw()
                else:
                    self.trainer.request_trace_at(level)
            case {"type": "override", "kind": kind, "name": name, "on": on}:
                self._override(OVERRIDES[kind], name, on=on)

    def _override(self, field: str, name: str, *, on: bool) -> None:
        """Put an op or a module into float32 at the next step boundary, or take that back."""
        names = [each for each in listed(getattr(self.trainer.wanted_config, field)) if each != name]
        self._problem = ""
        try:
            self.trainer.change(**{field: ",".join([*names, *([name] if on else [])]) or None})
        except SettingRefused as refusal:
            self._problem = refusal.shown
        except ValueError as refusal:
            self._problem = str(refusal)
        self._draw()

    def _stale(self) -> str:
        """Say that the picture is that of another setting; "" if it is not."""
        if not self._untraced or self._now is None:
            return ""
        return f"Shown is a step at {self._now.level}, before the change. The present step fails: {self._untraced}"

    def _request(self) -> None:
        self.trainer.request_trace()
        if self._compared is not None:
            self._other = None
            self.trainer.request_trace_at(self._compared)

    def _draw(self) -> None:
        if self._now is None:
            if self._untraced:
                why = f"This step cannot be traced: {self._untraced}"
                self.show({"rows": [], "modules": [], "problem": why, "empty": "No step was traced."})
            return
        config = self.trainer.config
        has_lists = config.level.opt_level == "O1"
        policy = (config.policy or PrecisionPolicy()) if has_lists else None
        modules = self.trainer.module_names()
        payload = dtypes_payload(self._now, before=self._before, other=self._other, policy=policy, modules=modules)
        self.show(
            payload
            | {
                "measured": self._measured,
                "levels": [[name, each.label] for name, each in LEVELS.items() if name != config.opt_level],
                "problem": self._problem or self._stale(),
                "overrides": [
                    {"kind": kind, "name": name}
                    for kind, field in OVERRIDES.items()
                    for name in listed(getattr(config, field))
                ],
            }
        )
