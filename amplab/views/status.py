"""The line above the figures that says in words how the run is, with a button where a change of the config helps.

A `RunStatus` becomes plain values; the button's message is {"type": "apply"}. No widget here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from amplab.lab import (
    ConfigChanged,
    ConfigRemedy,
    Event,
    Progress,
    Reading,
    RunStatus,
    StateChanged,
    Trainer,
    config_remedy,
    run_status,
    taken_back,
)
from amplab.lab.config import ExperimentConfig
from amplab.lab.config_remedies import float32_statistics
from amplab.lab.run_status import Measured
from amplab.lab.tasks import task_choice
from amplab.views.ticker import Pace

__all__ = ["Status", "status_payload"]

PERIOD = 0.5
"""Seconds between two writings of the line."""

STATES = {"paused": "Paused", "stopped": "Stopped", "failed": "Failed"}
FIRST = "Training the first step."
FAILED = "Training has failed; the message above says why. Reset to start again."


def status_payload(
    status: RunStatus,
    *,
    state: str = "paused",
    button: str | None = None,
    comparison: Progress | None = None,
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Return what the line shows.

    Args:
        status: How the run is.
        state: State of the trainer; "running" without a step while the first one is trained.
        button: Text of the button, None for none.
        comparison: How far the runs are that train before this one goes on, None for none.
        reading: What is read before this one goes on, None for nothing.
    """
    if state == "running" and comparison is not None:
        other = f"{comparison.name} trains, run {comparison.run} of {comparison.runs}"
        return _waiting("waiting", f"This run waits: {other}. Stop is in the tab Runs.")
    if state == "running" and reading is not None:
        left = f"Still to be read: {reading.left:,}."
        return _waiting("reading", f"Reading the batches before step {reading.step:,}. {left}")
    if state == "running" and status.kind == "ready":
        return _waiting("first", FIRST)
    if state == "failed":
        status = replace(status, kind="damaged", text=FAILED)
    ready = status.kind == "ready"
    return {
        "kind": status.kind,
        "tone": "bad" if status.is_bad else "odd" if status.kind in ("stuck", "slow", "floor", "searching") else "good",
        "text": "Ready: press Start." if ready else status.text,
        "state": "" if ready else STATES.get(state, ""),
        "step": status.step,
        "button": button,
    }


def _waiting(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "tone": "odd", "text": text, "state": "", "step": None, "button": None}


class Status:
    """Writes the line of one trainer; every method runs in the ticker's thread.

    Args:
        trainer: The experiment.
        wake: Requests a tick.
        show: Sets what the line shows.
    """

    def __init__(self, trainer: Trainer, wake: Callable[[], None], show: Callable[[dict[str, Any]], None]) -> None:
        self._trainer, self._show = trainer, show
        self._pace = Pace(PERIOD, wake)
        self._before: tuple[int, ExperimentConfig] | None = None  # step and config before the latest change
        self._reading: Reading | None = None
        self._remedy: ConfigRemedy | None = None
        self._remedied: tuple[object, ...] = ()  # what the remedy was chosen for

    def on_event(self, event: Event) -> None:
        """Remember the config before a change, and write the line at once."""
        if isinstance(event, ConfigChanged):
            self._before = None if event.reset else (event.step, event.previous)
        if isinstance(event, (Reading, StateChanged)):
            self._reading = event if isinstance(event, Reading) else None
        self._pace.hurry()

    def on_message(self) -> str | None:
        """Apply the remedy of the button; return why it was refused, or None."""
        try:
            if self._remedy is not None:
                self._trainer.apply(self._remedy)
        except ValueError as refusal:
            return str(refusal)
        return None

    def tick(self) -> None:
        """Write the line if the run has changed."""
        trainer, history = self._trainer, self._trainer.history
        present = (len(history), history.explained_count, trainer.state, trainer.config, trainer.nonfinite_buffers)
        comparison = trainer.comparison
        reading = self._reading if self._reading and self._reading.step == len(history) else None
        if not self._pace.is_due((*present, comparison and comparison.name, reading)):
            return
        config = trainer.config
        floor = config.min_loss_scale if config.is_dynamic else None
        measured = Measured(task_choice(config.task), nonfinite_buffers=trainer.nonfinite_buffers)
        status = run_status(history, floor=floor, learning_rate=config.learning_rate, measured=measured)
        button = self._button(status)
        shown = status_payload(status, state=trainer.state, button=button, comparison=comparison, reading=reading)
        self._show(shown)

    def _button(self, status: RunStatus) -> str | None:
        """Choose the remedy once for each bad status: to take back the change before it, or that of a finding."""
        if not status.is_bad:
            self._remedy, self._remedied = None, ()
            return None
        chosen_for = (status.kind, status.step, self._trainer.config)
        if chosen_for != self._remedied or self._remedy is None:
            self._remedy, self._remedied = self._remedy_of(status), chosen_for
        if self._remedy is None:
            return None
        return "Undo and start again" if self._is_undo(status) else self._remedy.label

    def _is_undo(self, status: RunStatus) -> bool:
        return status.change is not None and self._before is not None and self._before[0] == status.change.step

    def _remedy_of(self, status: RunStatus) -> ConfigRemedy | None:
        config = self._trainer.config
        if self._before is not None and self._is_undo(status):
            return taken_back(self._before[1], config)
        remedies = (config_remedy(each, config) for each in self._trainer.findings())
        found = next((each for each in remedies if each is not None), None)
        if found is None and status.kind == "evaluation" and self._trainer.nonfinite_buffers:
            return float32_statistics(config)
        return found
