"""The controls in both directions: what they show, as plain values, and what their messages do to the trainer.

    {"type": "start" | "pause" | "step" | "reset"}, {"type": "run", "steps"}, {"type": "speed", "value"},
    {"type": "change", "field", "value"}, {"type": "inject", "kind"}
    {"type": "undo"}, {"type": "default", "field"}, {"type": "defaults"}

Labels, choices and what a change requires come from the declarations of `ExperimentConfig`, which also decides what is
allowed. No widget here; controls.js draws the payload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from amplab.display.numbers import power
from amplab.lab import FIELDS, LIVE_FIELDS, ExperimentConfig, Trainer, field_named
from amplab.lab.config_field import Change, ConfigField, SettingRefused, echo
from amplab.lab.levels import LEVELS, Level, explained, why_no_override

__all__ = ["act", "controls_payload", "field_value"]

STATIC_START = 128.0
"""The static scale that is offered first; apex's documentation uses it."""


# What the controls show


def controls_payload(
    config: ExperimentConfig,
    *,
    state: str,
    refusal: str | None,
    shrinking: bool,
    armed: list[str],
    speed: float | None = None,
    last_change: str | None = None,
    undone: str | None = None,
) -> dict[str, object]:
    """Return all that the controls show.

    Args:
        config: The experiment in effect.
        state: State of the trainer.
        refusal: Why the latest change was refused, None if it was accepted.
        shrinking: Whether an injected underflow is on.
        armed: Faults that will go into the next step.
        speed: Steps per second at most, None for full speed.
        last_change: What Undo would take back, None for nothing.
        undone: What Undo has just taken back.
    """
    differing = config.differing()
    return {
        "fields": {name: _field(each, config, differs=name in differing) for name, each in FIELDS.items()},
        "levels": [
            {"name": level.name, "label": level.label, "brief": level.brief, "line": _line(level, config)}
            for level in LEVELS.values()
        ],
        "scale": _scale(config),
        "text": str(config),
        "state": state,
        "refusal": refusal,
        "shrinking": shrinking,
        "armed": armed,
        "speed": speed,
        "last_change": last_change,
        "undone": undone,
        "differs": config.defaults() != config,
    }


def _line(level: Level, config: ExperimentConfig) -> str:
    """What a level does: the present one with its overrides."""
    if level.name != config.opt_level:
        return level.explanation
    return explained(level.name, keep_batchnorm_fp32=config.keep_batchnorm_fp32, master_weights=config.master_weights)


def _field(field: ConfigField, config: ExperimentConfig, *, differs: bool) -> dict[str, object]:
    """A field's texts, its choices as pairs of value and label, its value, and why it cannot be changed now.

    "back" is the default in words where the field differs from it.
    """
    value = config.learning_rate if field.name == "lr" else getattr(config, field.name)
    resets = " A change starts over with new weights." if field.change is Change.NEW_WEIGHTS else ""
    return {
        "label": field.label,
        "title": f"{field.help[:1].upper()}{field.help[1:]}.{resets}",
        "value": value,
        "options": _options(field, config),
        "reason": why_no_override(config.opt_level, field.name) if field.overrides_level else None,
        "back": config.default_shown(field.name) if differs else None,
    }


def _options(field: ConfigField, config: ExperimentConfig) -> list[list[object]]:
    if field.values.kind is not bool:
        return [[value, label] for value, label in config.choices(field.name).items()]
    prescribed = getattr(config.level.properties, field.name)
    default = f"not at {config.level.label}" if prescribed is None else f"{config.level.label}: {prescribed}"
    return [[None, default], [True, "True"], [False, "False"]]


def _scale(config: ExperimentConfig) -> dict[str, object]:
    """Who decides the loss scale, and the static scale if there is one."""
    prescribed = config.level.properties.loss_scale
    return {
        "mode": "level" if config.loss_scale is None else "dynamic" if config.is_dynamic else "static",
        "prescribed": prescribed if isinstance(prescribed, str) else f"static {power(prescribed, raised=True)}",
        "fixed": None if config.is_dynamic else float(config.effective_loss_scale),
        "first_fixed": STATIC_START,
    }


# What their messages do


def act(trainer: Trainer, message: Mapping[str, Any]) -> str | None:
    """Handle a message of the page; return why it was refused, or None.

    Raises:
        KeyError: The message has an unknown type.
    """
    try:
        _ACTIONS[message["type"]](trainer, message)
    except SettingRefused as refusal:
        return refusal.shown
    except (ValueError, RuntimeError) as refusal:
        return _in_labels(str(refusal))
    return None


def _in_labels(message: str) -> str:
    """Return an error message of the Python API in the labels of the page.

    >>> _in_labels("batch_size=5000: expected at most 1437, the number of training images of digits.")
    'Batch size: 5000 is not allowed; expected at most 1437, the number of training images of digits.'
    >>> _in_labels("step(): the run has stopped; call reset() to start again.")
    'The run has stopped; press Reset to start again.'
    """
    refused = _REFUSED.match(message)
    if refused and refused["field"] in FIELDS:
        return f"{FIELDS[refused['field']].label}: {refused['value']} is not allowed; {message[refused.end() :]}"
    said = _CALL.sub("", message).replace("call reset()", "press Reset")
    return said[:1].upper() + said[1:]


_REFUSED = re.compile(r"(?P<field>\w+)=(?P<value>\S+): (?=expected )")
_CALL = re.compile(r"^\w+\([^)]*\): ")


def field_value(name: str, value: object) -> object:
    """Return a value from the page in the type of the field `name`: JavaScript has one type of number.

    >>> field_value("growth_interval", 50.0), field_value("lr", 1), field_value("master_weights", True)
    (50, 1.0, True)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if field_named(name).values.kind is int:
        return int(value) if float(value).is_integer() else value
    return float(value)


def _change(trainer: Trainer, message: Mapping[str, Any]) -> None:
    """Change one field. A field that needs new weights resets the run, which then continues if it was running."""
    name, value = message["field"], field_value(message["field"], message["value"])
    if name != "lr":
        _set(trainer, name, value)
    elif value is None:  # the field was emptied; it shows a number also where the config has none
        raise FIELDS["lr"].refusal("none")
    else:
        trainer.change_rate(value)


def _set(trainer: Trainer, name: str, value: object) -> None:
    if name in LIVE_FIELDS:
        trainer.change(**{name: value})
    else:
        trainer.restart_with(**{name: value})


def _steps(value: object) -> int:
    """Return the steps of "Run N steps" as a whole number.

    Raises:
        ValueError: The field is empty, or its number is not a whole number > 0.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and float(value).is_integer():
        return int(value)
    if value is None:
        said = "Run N steps: no number was entered; "
    else:
        said = f"Run N steps: {echo(value)} is not allowed; " if isinstance(value, str) else f"Run {value} steps: "
    raise ValueError(f"{said}expected a whole number > 0, such as 100.")


def _put_back(trainer: Trainer, message: Mapping[str, Any]) -> None:
    """Put one field back to its default."""
    _set(trainer, message["field"], trainer.wanted_config.default_of(message["field"]))


_ACTIONS: dict[str, Callable[[Trainer, Mapping[str, Any]], object]] = {
    "start": lambda trainer, _: trainer.start(),
    "pause": lambda trainer, _: trainer.pause(),
    "step": lambda trainer, _: trainer.step(),
    "reset": lambda trainer, _: trainer.reset(),
    "run": lambda trainer, message: trainer.start(_steps(message["steps"])),
    "speed": lambda trainer, message: trainer.set_speed(message["value"]),
    "change": _change,
    "default": _put_back,
    "defaults": lambda trainer, _: trainer.change(**trainer.wanted_config.defaults().live_values()),
    "undo": lambda trainer, _: trainer.undo(),
    "inject": lambda trainer, message: trainer.inject(message["kind"]),
}
