"""The patterns of `float32_modules`: each has to match a module of the model."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from amplab.lab.config import FIELDS, ExperimentConfig
from amplab.lab.config_field import SettingRefused, listed
from amplab.lab.models import build_model
from amplab.trace.handed_step import ModelGroup

__all__ = ["check_float32_modules", "names_of_modules"]


def check_float32_modules(config: ExperimentConfig, model: nn.Module | None = None) -> None:
    """Raise SettingRefused if float32_modules names a module that the model of a config does not have.

    Args:
        config: The config.
        model: Its model; None to build it.
    """
    if not config.float32_modules:
        return
    names = names_of_modules(model or build_model(config.model, config.hidden, config.seed))
    for pattern in listed(config.float32_modules):
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]) or "none"
            raise SettingRefused(
                f"float32_modules={pattern}: matches no module of the model; the closest are {near}.",
                shown=f"{FIELDS['float32_modules'].label}: there is no {pattern}; choose from {near}.",
            )


def names_of_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that float32_modules may list; none of several models."""
    return () if isinstance(model, ModelGroup) else tuple(name for name, _ in model.named_modules() if name)
