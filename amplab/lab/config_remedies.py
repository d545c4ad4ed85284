"""What a change of the lab's config can do about a finding, ready to be applied.

The remedies of `amplab.diagnose` are code for a training loop. Where the same can be done with a field of the config,
`config_remedy` returns the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from amplab.diagnose import Finding
from amplab.lab.changes import config_changes
from amplab.lab.config import FIELDS, ExperimentConfig

__all__ = ["ConfigRemedy", "config_remedy", "float32_statistics", "taken_back"]


@dataclass(frozen=True)
class ConfigRemedy:
    """A change of the config; `Trainer.apply` makes it.

    Attributes:
        changes: The new values, by field.
        text: What changes: "Learning rate 1e9 → 0.1".
        restarts: Whether the run must start again, because its weights are damaged or the change is for the start.
    """

    changes: Mapping[str, Any]
    text: str
    restarts: bool

    @property
    def label(self) -> str:
        """The text of a button."""
        return f"{self.text}, and start again" if self.restarts else self.text


def config_remedy(finding: Finding, config: ExperimentConfig) -> ConfigRemedy | None:
    """Return the change to make for a finding; None if no field of the config helps, or another finding explains it."""
    remedy = _REMEDIES.get(finding.name)
    changes = None if remedy is None else remedy(finding, config)
    if not changes or finding.certainty == "possible" or "injected_in_step" in finding.evidence:
        return None
    try:
        changed = config.changed(**changes)
    except ValueError:  # a combination that the config refuses
        return None
    text = ", ".join(each.text for each in config_changes(config, changed, 0))
    damaged = finding.name in _RESTARTS and finding.severity == "error" and "min_loss_scale" not in changes
    return ConfigRemedy(changes, text, damaged or finding.name == "slow-start") if text else None


def taken_back(previous: ExperimentConfig, config: ExperimentConfig) -> ConfigRemedy | None:
    """Return the remedy that puts back the config from before a change, and starts again; None if they are equal."""
    changes = {name: getattr(previous, name) for name in FIELDS if getattr(previous, name) != getattr(config, name)}
    text = ", ".join(each.text for each in config_changes(config, previous, 0))
    return ConfigRemedy(changes, text, restarts=True) if text else None


def float32_statistics(config: ExperimentConfig) -> ConfigRemedy | None:
    """Return the remedy for running statistics that overflowed in float16; None if BatchNorm is not float16."""
    if config.opt_level not in ("O2", "O3"):
        return None
    chosen = config.keep_batchnorm_fp32
    if config.level.properties.keep_batchnorm_fp32 if chosen is None else chosen:
        return None
    changes = {"keep_batchnorm_fp32": True}
    text = ", ".join(each.text for each in config_changes(config, config.changed(**changes), 0))
    return ConfigRemedy(changes, text, restarts=True)


Changes = Mapping[str, Any] | None


def _smaller_rate(_: Finding, config: ExperimentConfig) -> Changes:
    """The rate at which the optimizer learns well; a tenth if it is not larger than that."""
    is_large = config.learning_rate > config.usual_learning_rate
    return {"lr": None if is_large else config.learning_rate / 10}


def _lower_floor_or_smaller_rate(finding: Finding, config: ExperimentConfig) -> Changes:
    """A scale that cannot fall any further needs a lower floor."""
    return _smaller_rate(finding, config) if config.min_loss_scale is None else {"min_loss_scale": None}


def _dynamic_scale(_: Finding, config: ExperimentConfig) -> Changes:
    return None if config.is_dynamic else {"loss_scale": "dynamic"}


def _dynamic_or_smaller_rate(finding: Finding, config: ExperimentConfig) -> Changes:
    """Where nothing skips, inf comes through an overflow of the static scale, or through the learning rate."""
    large = config.learning_rate > config.usual_learning_rate
    return _smaller_rate(finding, config) if large or config.is_dynamic else _dynamic_scale(finding, config)


def _next_level(_: Finding, config: ExperimentConfig) -> Changes:
    """The level that keeps more ops in float32, or float32's range."""
    lower = {"O3": "O2", "O2": "O1", "O1": "O0", "autocast-fp16": "autocast-bf16", "autocast-bf16": "O0"}
    return {"opt_level": lower[config.opt_level]} if config.opt_level in lower else None


def _float32(_: Finding, config: ExperimentConfig) -> Changes:
    return {"opt_level": "O0"} if config.opt_level != "O0" else None


def _masters(_: Finding, config: ExperimentConfig) -> Changes:
    return {"master_weights": True} if config.opt_level == "O3" else None


def _float32_batchnorm(_: Finding, config: ExperimentConfig) -> Changes:
    return {"keep_batchnorm_fp32": True} if config.opt_level in ("O2", "O3") else None


def _scale_that_fits(finding: Finding, config: ExperimentConfig) -> Changes:
    if not config.is_dynamic:
        return _dynamic_scale(finding, config)
    fits = finding.evidence.get("first_scale_without_overflow")
    return {"init_scale": float(fits)} if isinstance(fits, int | float) else None


def _longer_window(_: Finding, config: ExperimentConfig) -> Changes:
    return {"growth_interval": max(1000, 20 * config.growth_interval)} if config.is_dynamic else None


def _shorter_window(_: Finding, config: ExperimentConfig) -> Changes:
    return {"growth_interval": max(50, config.growth_interval // 10)} if config.is_dynamic else None


_REMEDIES: Mapping[str, Callable[[Finding, ExperimentConfig], Changes]] = {
    "diverging": _smaller_rate,
    "nonfinite-in-float32": _smaller_rate,
    "nonfinite-parameter": _dynamic_or_smaller_rate,
    "nonfinite-loss": _dynamic_or_smaller_rate,
    "scale-collapse": _lower_floor_or_smaller_rate,
    "scale-too-large": _scale_that_fits,
    "slow-start": _scale_that_fits,
    "gradients-underflow": _dynamic_scale,
    "window-too-short": _longer_window,
    "window-too-long": _shorter_window,
    "updates-rounded-away": _masters,
    "adam-on-half": _masters,
    "nonfinite-buffer": _float32_batchnorm,
    "overflow-in-half": _next_level,
    "logits-overflow-half": _next_level,
    "reduction-overflows-half": _next_level,
    "variance-in-half": _next_level,
    "bce-after-sigmoid": _float32,  # every level between refuses it
    "constant-underflows-half": _next_level,
    "constant-overflows-half": _next_level,
}

_RESTARTS = frozenset(
    ("diverging", "nonfinite-in-float32", "nonfinite-parameter", "nonfinite-loss", "scale-collapse", "scale-too-large",
     "nonfinite-buffer")
)  # fmt: skip
"""Errors after which the weights are damaged or far off."""
