"""What one experiment is: a frozen value, and its readable one-line string.

    amplab/1 task=digits model=mlp opt_level=O1 init_scale=2**20 seed=3

The string names task, model and opt_level always and every other field where it differs from its default;
`ExperimentConfig.parse` reads it back. What each field may hold is in `fields.py`, what is trained in `experiment.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from amplab.amp import OPT_LEVELS, explain_override
from amplab.lab.fields import RULES, check, read, spell

__all__ = ["DEFAULT_LR", "LIVE_FIELDS", "OVERRIDES", "VERSION", "ExperimentConfig"]

VERSION = 1

DEFAULT_LR = {"sgd": 0.1, "adam": 0.005, "adamw": 0.005}
"""What lr=None stands for: the rate at which the digits models learn well in 300 steps."""

LIVE_FIELDS = (
    "opt_level",
    "optimizer",
    "lr",
    "momentum",
    "batch_size",
    "loss_scale",
    "init_scale",
    "growth_interval",
    "min_loss_scale",
    "max_loss_scale",
    "keep_batchnorm_fp32",
    "master_weights",
)
"""Fields that a running experiment can change at a step boundary; the others need new weights, hence a reset."""

OVERRIDES = ("keep_batchnorm_fp32", "master_weights", "loss_scale")
"""Fields whose None means: what the opt_level prescribes."""

_ALWAYS_NAMED = ("task", "model", "opt_level")
_HEAD = re.compile(r"amplab/(?P<version>\S+)")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment, complete: the same config gives the same run, bit for bit, on the same machine.

    Attributes:
        task: "digits".
        model: "mlp" or "cnn".
        hidden: Width of the hidden layers.
        opt_level: "O0", "O1", "O2" or "O3".
        optimizer: "sgd", "adam" or "adamw".
        lr: Learning rate, > 0; None stands for `DEFAULT_LR` of the optimizer.
        momentum: Momentum of sgd, in [0, 1); adam and adamw have no use for it.
        batch_size: Images per step.
        seed: Seed of weights, split and batches.
        loss_scale: "dynamic", a static scale > 0, or None for what the opt_level prescribes.
        init_scale: Scale at which a dynamic scale starts (clamped into [min_loss_scale, max_loss_scale]).
        growth_interval: Clean steps until a dynamic scale doubles. The lab's 50 lets the scale be seen to move; apex's
            own default is 2000.
        min_loss_scale: Floor of a dynamic scale, None for the smallest that float32 can hold.
        max_loss_scale: Ceiling of a dynamic scale.
        keep_batchnorm_fp32: Override of the opt_level, None for what it prescribes.
        master_weights: Override of the opt_level, None for what it prescribes.

    Raises:
        ValueError: A field holds what it may not, an override makes no sense at this opt_level, or the floor of the
            scale lies above its ceiling.

    >>> config = ExperimentConfig(opt_level="O2", init_scale=2.0**20)
    >>> str(config)
    'amplab/1 task=digits model=mlp opt_level=O2 init_scale=2**20'
    >>> ExperimentConfig.parse(str(config)) == config
    True
    """

    task: str = "digits"
    model: str = "mlp"
    hidden: int = 128
    opt_level: str = "O1"
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.9
    batch_size: int = 64
    seed: int = 0
    loss_scale: float | str | None = None
    init_scale: float = 2.0**16
    growth_interval: int = 50
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for field in fields(self):
            check(field.name, getattr(self, field.name))
        for name in OVERRIDES:
            reason = explain_override(self.opt_level, name) if getattr(self, name) is not None else None
            if reason:
                raise ValueError(f"{name}={spell(getattr(self, name))} with opt_level={self.opt_level}: {reason}")
        if self.min_loss_scale is not None and self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                f"min_loss_scale={spell(self.min_loss_scale)}: expected at most "
                f"max_loss_scale={spell(self.max_loss_scale)}; lower the floor or raise the ceiling."
            )

    @property
    def learning_rate(self) -> float:
        """The rate in effect: lr, or the optimizer's own default."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else float(self.lr)

    @property
    def effective_loss_scale(self) -> float | str:
        """The static scale in effect, or "dynamic": loss_scale, or what the opt_level prescribes."""
        return OPT_LEVELS[self.opt_level].properties.loss_scale if self.loss_scale is None else self.loss_scale

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.effective_loss_scale == "dynamic"

    def changed(self, **changes: object) -> ExperimentConfig:
        """Return this config with some fields changed.

        A new opt_level drops the overrides that make no sense there, unless they are given in the same call; those
        are refused.

        Raises:
            ValueError: An unknown field, or a value that the field may not hold.

        >>> str(ExperimentConfig(opt_level="O2", master_weights=False).changed(opt_level="O1"))
        'amplab/1 task=digits model=mlp opt_level=O1'
        """
        for name, value in changes.items():
            check(name, value)
        level = changes.get("opt_level", self.opt_level)
        dropped = {name: None for name in OVERRIDES if name not in changes and explain_override(level, name)}
        return replace(self, **{**dropped, **changes})

    def __str__(self) -> str:
        """Return the string that `parse` reads."""
        named = [field for field in fields(self) if field.name in _ALWAYS_NAMED]
        named += [
            field
            for field in fields(self)
            if field.name not in _ALWAYS_NAMED and getattr(self, field.name) != field.default
        ]
        return " ".join([f"amplab/{VERSION}", *(f"{field.name}={spell(getattr(self, field.name))}" for field in named)])

    @classmethod
    def parse(cls, text: str) -> ExperimentConfig:
        """Return the experiment that a string of `str(config)` names; fields left out keep their defaults.

        Raises:
            ValueError: Not such a string, of another version, with an unknown or repeated field, or a value that the
                field may not hold.
            TypeError: No string at all.
        """
        if not isinstance(text, str):
            raise TypeError(f"{text!r}: expected a config string; copy one from the lab's config().")
        head, *pairs = text.split() or [""]
        _check_head(head, text)
        values: dict[str, object] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{pair!r}: expected field=value, as in {cls()!s}.")
            if name in values:
                raise ValueError(f"{pair!r}: {name} is given twice; keep one.")
            values[name] = read(name, value)
        return cls(**values)


def _check_head(head: str, text: str) -> None:
    match = _HEAD.fullmatch(head)
    if match is None:
        raise ValueError(
            f"{text[:60]!r}: expected a config string such as 'amplab/{VERSION} task=digits model=mlp opt_level=O1'; "
            f"copy one from the lab's config()."
        )
    if match["version"] != str(VERSION):
        raise ValueError(
            f"config of version {match['version']} (amplab/{match['version']}): this amplab reads amplab/{VERSION}; "
            f"write the experiment anew with the fields {', '.join(RULES)}, or install the amplab that made it."
        )
