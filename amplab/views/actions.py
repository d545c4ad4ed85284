"""What the page may ask of the trainer: each message of the controls as one call, refusals as a sentence.

    {"type": "start" | "pause" | "step" | "reset"}, {"type": "change", "field", "value"}, {"type": "inject", "kind"}

What may be chosen is decided by `ExperimentConfig` and `Trainer`. No widget here.
"""

from __future__ import annotations

from collections.abc import Mapping

from amplab.lab import LIVE_FIELDS, Trainer
from amplab.views.controls_payload import field_value

__all__ = ["act"]


def act(trainer: Trainer, message: Mapping[str, object]) -> str | None:
    """Do what the message asks; return the sentence that refuses it, None when it was done.

    Raises:
        KeyError: The message is of no known type.
    """
    try:
        _ACTIONS[message["type"]](trainer, message)
    except (ValueError, RuntimeError) as refusal:
        return str(refusal)
    return None


def _change(trainer: Trainer, message: Mapping[str, object]) -> None:
    """Change one field; one that needs new weights begins anew, and goes on running if it ran."""
    name = message["field"]
    value = field_value(name, message["value"])
    if name in LIVE_FIELDS:
        trainer.change(**{name: value})
        return
    running = trainer.state == "running"
    trainer.reset(trainer.config.changed(**{name: value}))
    if running:
        trainer.start()


_ACTIONS = {
    "start": lambda trainer, _: trainer.start(),
    "pause": lambda trainer, _: trainer.pause(),
    "step": lambda trainer, _: trainer.step(),
    "reset": lambda trainer, _: trainer.reset(),
    "change": _change,
    "inject": lambda trainer, message: trainer.inject(message["kind"]),
}
