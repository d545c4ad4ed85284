"""What a config asks of a session and of optimizers, and what of a session is kept when the config changes.

An experiment applies it; see `Experiment.switch`. Which fields need a new session is declared in `config.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from amplab.lab.config import FIELDS, LIVE_FIELDS, OPTIMIZERS, OWN, ExperimentConfig
from amplab.lab.config_field import Change
from amplab.lab.tasks import MakeOptimizer

__all__ = [
    "kept_scales",
    "needs_new_session",
    "optimizer_maker",
    "refuse_new_weights",
    "session_settings",
]

_SESSION_FIELDS = tuple(name for name, each in FIELDS.items() if each.change is Change.NEW_SESSION)


def session_settings(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `Session.initialize` that the config decides."""
    dynamic: dict[str, Any] = {"dynamic_init_scale": config.init_scale, "scale_window": config.growth_interval}
    return {
        "opt_level": config.level.opt_level,
        "policy": config.policy,
        "keep_batchnorm_fp32": config.keep_batchnorm_fp32,
        "master_weights": config.master_weights,
        "loss_scale": config.effective_loss_scale,
        "min_loss_scale": config.min_loss_scale,
        "max_loss_scale": config.max_loss_scale,
        **(dynamic if config.is_dynamic else {}),
    }


def optimizer_maker(config: ExperimentConfig) -> MakeOptimizer | None:
    """Return what makes an optimizer of the config's kind of some parameters; None for the task's own kind."""
    if config.optimizer == OWN:
        return None
    choice = OPTIMIZERS[config.optimizer]
    options = {"momentum": config.momentum} if choice.takes_momentum else {}
    return functools.partial(choice.build, lr=config.learning_rate, **options)


def refuse_new_weights(old: ExperimentConfig, new: ExperimentConfig) -> None:
    """Raise ValueError if the new config cannot use the weights of the old one."""
    for name in FIELDS:
        if name not in LIVE_FIELDS and getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name}={getattr(new, name)}: expected {getattr(old, name)}, since a change of {name} needs new "
                f"weights; call reset() with the new config. At a step boundary these can change: "
                f"{', '.join(LIVE_FIELDS)}."
            )


def needs_new_session(old: ExperimentConfig, new: ExperimentConfig) -> bool:
    """Return whether a changed field takes effect in a new session only."""
    return any(getattr(old, name) != getattr(new, name) for name in _SESSION_FIELDS)


def kept_scales(state: dict[str, Any], old: ExperimentConfig, new: ExperimentConfig) -> dict[str, Any] | None:
    """Return the state of the old session as a new one loads it; None if its loss scales start again.

    A new level does not keep a scale below 1, to which an overflow that no scale mends has driven it. Loading applies
    the lower limit of a scale but not the upper one.
    """
    if not (old.is_dynamic and new.is_dynamic and old.init_scale == new.init_scale):
        return None
    if old.opt_level != new.opt_level:
        state = _without_collapsed(state, new.init_scale)
    return _with_upper_limit(state, new.max_loss_scale)


def _without_collapsed(state: dict[str, Any], start: float) -> dict[str, Any]:
    """Return a session's state in which scales below 1 are those of a start."""
    return {name: {**each, "loss_scale": start} if each["loss_scale"] < 1 else each for name, each in state.items()}


def _with_upper_limit(state: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return a session's state with scales of at most `limit`."""
    return {name: {**entry, "loss_scale": min(entry["loss_scale"], limit)} for name, entry in state.items()}
