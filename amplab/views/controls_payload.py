"""What the controls show, as plain values: the config, what may be chosen, what is greyed and why.

Here a config becomes JSON, and a change that comes back from the page becomes a field of `ExperimentConfig`. Nothing
here decides what is allowed: that is `amplab.lab.ExperimentConfig` and `amplab.amp.explain_override`. No widget here.
"""

from __future__ import annotations

from amplab.amp import OPT_LEVELS, explain_override
from amplab.lab import FIELDS, ExperimentConfig, field_named

__all__ = ["BOOLEAN_OVERRIDES", "controls_payload", "field_value"]

BOOLEAN_OVERRIDES = tuple(name for name, each in FIELDS.items() if each.values.kind is bool)
STATIC_START = 128.0
"""Static scale that is offered first; apex's own documentation uses it."""


def controls_payload(
    config: ExperimentConfig, *, state: str, refusal: str | None, shrinking: bool, armed: list[str]
) -> dict:
    """Return all that the controls show.

    Args:
        config: The experiment in effect.
        state: State of the trainer.
        refusal: Sentence that refuses the latest change, None when it was taken.
        shrinking: Whether an injected underflow is on.
        armed: Faults that wait for the next step.
    """
    return {
        "config": {name: getattr(config, name) for name in ("task", "model", "opt_level", "optimizer")},
        "lr": config.learning_rate,
        "text": str(config),
        "state": state,
        "options": {name: _options(name) for name in ("task", "model", "optimizer")},
        "fields": {name: {"label": each.label, "title": _sentence(each.help)} for name, each in FIELDS.items()},
        "levels": [
            {"name": level.name, "brief": level.brief.partition(":")[2].strip(), "line": level.explanation}
            for level in OPT_LEVELS.values()
        ],
        "overrides": [_override(config, name) for name in BOOLEAN_OVERRIDES],
        "scale": _scale(config),
        "refusal": refusal,
        "shrinking": shrinking,
        "armed": armed,
    }


def field_value(name: str, value: object) -> object:
    """Return a value from the page as the field `name` takes it: JavaScript has one type of number.

    >>> field_value("growth_interval", 50.0), field_value("lr", 1), field_value("loss_scale", "level")
    (50, 1.0, None)
    """
    if name == "loss_scale" and value == "level":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if field_named(name).values.kind is int:
        return int(value) if float(value).is_integer() else value
    return float(value)


def _options(name: str) -> list[list[str]]:
    """The choices of a field as pairs of value and label."""
    return [[value, label] for value, label in FIELDS[name].values.choices().items()]


def _sentence(phrase: str) -> str:
    return phrase[:1].upper() + phrase[1:]


def _override(config: ExperimentConfig, name: str) -> dict:
    """A boolean override: its three values, and why it is greyed where it makes no sense."""
    prescribed = getattr(OPT_LEVELS[config.opt_level].properties, name)
    value = getattr(config, name)
    default = f"not at {config.opt_level}" if prescribed is None else f"{config.opt_level}: {prescribed}"
    return {
        "value": "default" if value is None else str(value).lower(),
        "options": [["default", default], ["true", "True"], ["false", "False"]],
        "reason": explain_override(config.opt_level, name),
    }


def _scale(config: ExperimentConfig) -> dict:
    """The loss scale: who decides it, and the numbers of the rule that results."""
    prescribed = OPT_LEVELS[config.opt_level].properties.loss_scale
    return {
        "mode": "level" if config.loss_scale is None else "dynamic" if config.is_dynamic else "static",
        "prescribed": prescribed if prescribed == "dynamic" else f"static {prescribed:g}",
        "dynamic": config.is_dynamic,
        "fixed": None if config.is_dynamic else float(config.effective_loss_scale),
        "first_fixed": STATIC_START,
        "init": config.init_scale,
        "window": config.growth_interval,
        "floor": config.min_loss_scale,
        "ceiling": config.max_loss_scale,
    }
