"""What a person changes while a run goes on: one `RunChange` for each changed field of the config and each fault.

The history keeps them in order, and the charts mark them. The run log holds whole configs; `config_changes` finds what
differs between two of them, so that a log that is read back has the same changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.config_field import ConfigField

__all__ = ["RunChange", "config_changes", "fault_change", "restart_change", "start_change"]


@dataclass(frozen=True)
class RunChange:
    """A change that is in effect from ``step`` on.

    Attributes:
        step: first step with it.
        field: the field of the config, "fault" for an injected fault, "start" for what the run begins with, "restart"
            if its processes were started again, "ranks" where ranks begin to differ.
        label: the new value in a few letters, for a mark on a chart.
        text: what changed, from and to.
    """

    step: int
    field: str
    label: str
    text: str


def start_change(config: ExperimentConfig) -> RunChange:
    """Return what a run begins with.

    >>> start_change(ExperimentConfig()).text
    'start: digits, MLP, O1'
    """
    texts = [_text(FIELDS[name], config) for name in ("task", "model", "opt_level")]
    return RunChange(0, "start", config.opt_level, f"start: {', '.join(texts)}")


def config_changes(previous: ExperimentConfig, config: ExperimentConfig, step: int) -> tuple[RunChange, ...]:
    """Return one change for each field that differs; values that a new opt_level or optimizer brings count as its own.

    >>> before = ExperimentConfig()
    >>> [change.text for change in config_changes(before, before.changed(opt_level="O2", lr=0.01), 120)]
    ['opt_level O1 → O2', 'Learning rate 0.1 → 0.01']
    """
    return tuple(
        RunChange(step, name, _label(field, config), f"{field.label} {_text(field, previous)} → {_text(field, config)}")
        for name, field in FIELDS.items()
        if _value(field, previous) != _value(field, config) and not _follows_level(field, previous, config)
    )


def fault_change(fault: str, step: int, *, on: bool) -> RunChange:
    """Return the change that an injected fault is; "underflow" lasts, the others are for one step.

    >>> fault_change("underflow", 40, on=True).text
    'injected underflow: on'
    """
    state = f" {'on' if on else 'off'}" if fault == "underflow" else ""
    name = "NaN" if fault == "nan" else fault
    return RunChange(step, "fault", f"{name}{state}", f"injected {name}{':' * bool(state)}{state}")


def restart_change(step: int) -> RunChange:
    """Return the change that a restart of the processes is: the run continued from the checkpoint of `step`."""
    return RunChange(step, "restart", "restart", f"restarted from the checkpoint of step {step}")


def _follows_level(field: ConfigField, previous: ExperimentConfig, config: ExperimentConfig) -> bool:
    """Return whether a new opt_level dropped the override."""
    return field.overrides_level and previous.opt_level != config.opt_level and getattr(config, field.name) is None


def _value(field: ConfigField, config: ExperimentConfig) -> object:
    return config.learning_rate if field.name == "lr" else getattr(config, field.name)


def _text(field: ConfigField, config: ExperimentConfig) -> str:
    """Return a value as the dashboard writes it."""
    value = _value(field, config)
    if value is None:
        return f"by {config.opt_level}" if field.overrides_level else "none"
    return field.shown(value)


def _label(field: ConfigField, config: ExperimentConfig) -> str:
    text = _text(field, config)
    if field.name in ("opt_level", "optimizer", "model", "task"):
        return text
    name = "lr" if field.name == "lr" else "scale" if field.name == "loss_scale" else field.label
    return f"{name[:1].lower()}{name[1:]} {text}"
