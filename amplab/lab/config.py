"""The config of an experiment: a frozen value, each field declared once, with a readable one-line string form.

    amplab/1 task=digits model=mlp opt_level=O1 init_scale=2**20 seed=3

A declaration in `ExperimentConfig` says everything about a field: default, accepted values, label, help, and what a
change of it requires. The trainer, the command line and the dashboard read the declarations in `FIELDS`. The string
contains task, model and opt_level, and every other field that differs from its default; `ExperimentConfig.parse` reads
it. What a declaration consists of is in `config_field.py`; the values of `model`, `task` and `opt_level` are in
`models.py`, `tasks.py` and `levels.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import torch

from amplab.lab.config_field import (
    FLAG,
    NAMES,
    Change,
    ConfigField,
    SettingRefused,
    Values,
    count,
    echo,
    listed,
    number,
    one_of,
    spell,
)
from amplab.lab.levels import LEVELS, Level, why_no_override
from amplab.lab.models import MODELS, models_of
from amplab.lab.tasks import ABSENT_OWN, OWN_TASK, TASKS, task_choice
from amplab.policies import PrecisionPolicy

__all__ = [
    "DEFAULT_LR",
    "FIELDS",
    "LIVE_FIELDS",
    "OPTIMIZERS",
    "OVERRIDES",
    "OWN",
    "VERSION",
    "ExperimentConfig",
    "OptimizerChoice",
    "field_named",
]

VERSION = 1

_LARGEST_SCALE = 2.0**127  # the largest power of two in float32, the type of a scaled loss
_SMALLEST_SCALE = 2.0**-126  # the smallest whose inverse float32 can hold, which unscaling needs
_HEAD = re.compile(r"amplab/(?P<version>\S+)")

T = TypeVar("T")


@dataclass(frozen=True)
class OptimizerChoice:
    """One optimizer that a config can name.

    Attributes:
        label: Its name in the dashboard.
        build: Its class.
        lr: Learning rate for lr=None, at which the digits models learn well in 300 steps; a task may have another.
        takes_momentum: Whether it has a momentum.
    """

    label: str
    build: Callable[..., torch.optim.Optimizer]
    lr: float
    takes_momentum: bool = False


OPTIMIZERS = {
    "sgd": OptimizerChoice("SGD", torch.optim.SGD, lr=0.1, takes_momentum=True),
    "adam": OptimizerChoice("Adam", torch.optim.Adam, lr=0.005),
    "adamw": OptimizerChoice("AdamW", torch.optim.AdamW, lr=0.005),
}
"""Each optimizer by the name that a config gives it."""

OWN = "own"
"""The optimizer that a task makes itself, of tasks that do; the dashboard calls it "as given"."""

DEFAULT_LR = {name: choice.lr for name, choice in OPTIMIZERS.items()}
"""The default learning rate (lr=None), by optimizer."""


def _scale(note: str = "") -> Values:
    allowed = "a number > 0, at least 2**-126 and at most 2**127"
    entry = "an exponent of two from −126 to 127"
    return replace(
        number(lambda value: _SMALLEST_SCALE <= value <= _LARGEST_SCALE, allowed + note, entry), is_power=True
    )


_LEVEL = Values(
    str,
    lambda value: isinstance(value, str) and value in LEVELS,
    lambda: f"one of {', '.join(LEVELS)} (the letter O and a digit)",
    choices=lambda: {name: level.label for name, level in LEVELS.items()},
)
_OPTIMIZER = replace(one_of(OPTIMIZERS), accepts=lambda value: value == OWN or value in OPTIMIZERS)
_TASK = replace(
    one_of(TASKS), accepts=lambda value: isinstance(value, str) and (value in TASKS or bool(OWN_TASK.fullmatch(value)))
)
_MODEL = replace(one_of(MODELS), accepts=lambda value: isinstance(value, str))  # which ones, the task decides
_STATIC_SCALE = _scale(" (128 is a usual static scale)")
_LOSS_SCALE = Values(
    float,
    lambda value: value == "dynamic" or _STATIC_SCALE.accepts(value),
    lambda: f"'dynamic', {_STATIC_SCALE.allowed()}",
    _STATIC_SCALE.entry,
    is_power=True,
)


def _declare(default: T, values: Values, *, none_means: str = "", **details: Any) -> T:
    """Declare a field of `ExperimentConfig`; the details are attributes of `ConfigField`."""
    values = values.or_none() if none_means else values
    return field(default=default, metadata={"values": values, "none_means": none_means, **details})


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment: the same config gives the same run, bit for bit, on the same machine.

    Raises:
        SettingRefused: A field does not accept its value, an override has no meaning at this opt_level, init_scale is
            outside of min_loss_scale to max_loss_scale, or a static loss_scale is given together with settings of a
            dynamic one. It is a ValueError.

    >>> config = ExperimentConfig(opt_level="O2", init_scale=2.0**20)
    >>> str(config)
    'amplab/1 task=digits model=mlp opt_level=O2 init_scale=2**20'
    >>> ExperimentConfig.parse(str(config)) == config
    True
    """

    task: str = _declare(
        "digits",
        _TASK,
        label="Task",
        help="data set to train on",
        change=Change.NEW_WEIGHTS,
        changes_dtypes=True,
        is_always_named=True,
    )
    model: str = _declare(
        cast(str, None),
        _MODEL,
        none_means="the first model of the task",
        label="Model",
        help="model to train",
        change=Change.NEW_WEIGHTS,
        changes_dtypes=True,
        is_always_named=True,
    )
    hidden: int = _declare(
        128,
        count(1, 8192, "the width of the hidden layers"),
        label="Hidden",
        help="width of the hidden layers",
        change=Change.NEW_WEIGHTS,
        changes_dtypes=True,
    )
    opt_level: str = _declare(
        "O1",
        _LEVEL,
        label="opt_level",
        help="which weights and operations use float16 or bfloat16",
        change=Change.NEW_SESSION,
        changes_dtypes=True,
        is_always_named=True,
    )
    optimizer: str = _declare(
        cast(str, None),
        _OPTIMIZER,
        none_means="the task's optimizer",
        label="Optimizer",
        help="algorithm that updates the weights",
        change=Change.NEW_SESSION,
    )
    lr: float | None = _declare(
        None,
        number(lambda value: 0 < value <= _LARGEST_SCALE, "a number > 0 and at most 2**127", "a number above 0"),
        none_means=", ".join(f"{rate:g} with {name}" for name, rate in DEFAULT_LR.items()),
        label="Learning rate",
        help="learning rate",
        example="0.1",
        change=Change.IN_PLACE,
    )
    momentum: float = _declare(
        0.9,
        number(lambda value: 0 <= value < 1, "a number in [0, 1); 0 switches it off", "a number from 0 to below 1"),
        label="Momentum",
        help="momentum of sgd; adam and adamw ignore it",
        change=Change.IN_PLACE,
    )
    batch_size: int = _declare(
        64,
        count(1, 65536, "the examples in a batch"),
        label="Batch size",
        help="examples in a batch",
        change=Change.IN_PLACE,
    )
    accumulate: int = _declare(
        1,
        count(1, 1024, "the batches of a step"),
        label="Accumulate",
        help="batches whose gradients are accumulated before the optimizer steps",
        change=Change.IN_PLACE,
    )
    seed: int = _declare(
        0,
        count(0, 2**63 - 1, "the same seed gives the same run"),
        label="Seed",
        help="seed of the weights, the data split and the batches",
        change=Change.NEW_WEIGHTS,
    )
    loss_scale: float | str | None = _declare(
        None,
        _LOSS_SCALE,
        none_means="what the opt_level sets",
        label="Loss scale",
        help="dynamic, or one scale for the whole run",
        example="dynamic|128",
        change=Change.NEW_SESSION,
        overrides_level=True,
    )
    init_scale: float = _declare(
        2.0**16,
        _scale("; 2**16 is a usual start"),
        label="init",
        help="dynamic loss scale of the first step",
        change=Change.NEW_SESSION,
    )
    growth_interval: int = _declare(  # 50, so that the scale is seen to move; apex's default is 2000
        50,
        count(1, 10**9, "the steps without overflow before the scale doubles"),
        label="window",
        help="steps without overflow before a dynamic loss scale doubles",
        change=Change.NEW_SESSION,
    )
    min_loss_scale: float | None = _declare(
        None,
        _scale(),
        none_means="no lower limit",
        label="floor",
        help="lower limit of a dynamic loss scale",
        example="1",
        change=Change.NEW_SESSION,
    )
    max_loss_scale: float = _declare(
        2.0**24,
        _scale("; 2**24 is the default"),
        label="ceiling",
        help="upper limit of a dynamic loss scale",
        change=Change.NEW_SESSION,
    )
    keep_batchnorm_fp32: bool | None = _declare(
        None,
        FLAG,
        none_means="what the opt_level sets",
        label="keep_batchnorm_fp32",
        help="whether BatchNorm stays in float32",
        change=Change.NEW_SESSION,
        overrides_level=True,
        changes_dtypes=True,
    )
    master_weights: bool | None = _declare(
        None,
        FLAG,
        none_means="what the opt_level sets",
        label="master_weights",
        help="whether the optimizer updates float32 copies of the weights",
        change=Change.NEW_SESSION,
        overrides_level=True,
        changes_dtypes=True,
    )
    float32_ops: str | None = _declare(
        None,
        NAMES,
        none_means="none",
        label="Ops in float32",
        help="ops that run in float32 at every level",
        example="linear,softmax",
        change=Change.NEW_SESSION,
        changes_dtypes=True,
    )
    float32_modules: str | None = _declare(
        None,
        NAMES,
        none_means="none",
        label="Modules in float32",
        help="modules, by name or pattern, that run in float32 at every level",
        example="output,blocks.*.norm",
        change=Change.NEW_SESSION,
        changes_dtypes=True,
    )

    def __post_init__(self) -> None:
        """Make the values plain, fill in the model and the optimizer of the task; refuse what cannot be trained."""
        for name, declared in FIELDS.items():
            object.__setattr__(self, name, declared.accepted(getattr(self, name)))
        if self.model is None:
            object.__setattr__(self, "model", next(iter(models_of(self.task)), None))
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", task_choice(self.task).optimizer)
        self._refuse_of_another_task()
        for name in OVERRIDES:
            reason = why_no_override(self.opt_level, name) if getattr(self, name) is not None else None
            if reason:
                given = f"{name}={spell(getattr(self, name))} with opt_level={self.opt_level}"
                raise SettingRefused(f"{given}: {reason}", shown=f"{FIELDS[name].label}: {reason}")
        self._refuse_unknown_ops()
        self._refuse_bounds()
        self._refuse_growth_of_static_scale()

    def _refuse_unknown_ops(self) -> None:
        """Refuse float32_ops that no rule of a policy can name; which modules there are, only the model knows."""
        try:
            _ = self.policy
        except ValueError as error:
            label = FIELDS["float32_ops"].label
            raise SettingRefused(f"float32_ops={self.float32_ops}: {error}", shown=f"{label}: {error}") from error

    def _refuse_bounds(self) -> None:
        """Refuse a dynamic scale that cannot start within its bounds."""
        for lower, upper in (
            ("min_loss_scale", "max_loss_scale"),
            ("init_scale", "max_loss_scale"),
            ("min_loss_scale", "init_scale"),
        ):
            least, most = getattr(self, lower), getattr(self, upper)
            if least is None or least <= most:
                continue
            low, high = FIELDS[lower], FIELDS[upper]
            raise SettingRefused(
                f"{lower}={spell(least)}: expected at most {upper}={spell(most)}; lower {lower} or raise {upper}.",
                shown=f"{low.label} {low.shown(least)} is above {high.label} {high.shown(most)}; lower {low.label} or "
                f"raise {high.label} first.",
            )

    def _refuse_of_another_task(self) -> None:
        """Raise ValueError for a model or an optimizer that the task does not offer."""
        if self.task in TASKS and self.model not in MODELS:
            raise FIELDS["model"].refusal(self.model)
        for name, table in (("model", MODELS), ("optimizer", OPTIMIZERS)):
            value, offered = getattr(self, name), self.choices(name)
            if value not in offered:
                label = table[value].label if value in table else "as given"
                fits = " or ".join(offered) or f"another {name}"
                raise SettingRefused(
                    f"{name}={value} with task={self.task}: expected {fits}.",
                    shown=f"{FIELDS[name].label} {label} does not fit {FIELDS['task'].label} "
                    f"{task_choice(self.task).label}; choose {' or '.join(offered.values()) or 'another task'}.",
                )

    def choices(self, name: str) -> dict[str, str]:
        """Return the values that a field offers with the task of this config, each with its label.

        >>> ExperimentConfig().choices("model")["cnn"]
        'CNN'
        """
        if name == "model" and self.task not in TASKS:
            return {self.model: self.model}  # code of one's own that this process does not have
        if name == "model":
            return {model: choice.label for model, choice in models_of(self.task).items()}
        offered = field_named(name).values.choices()
        if name == "optimizer" and task_choice(self.task).has_own_optimizer:
            return {OWN: "as given", **offered}
        return offered

    def _refuse_growth_of_static_scale(self) -> None:
        """Refuse settings of a dynamic scale together with a static one."""
        if self.loss_scale in (None, "dynamic"):
            return  # the settings are kept where the opt_level sets a static scale: the next level may use them
        for name in GROWTH:
            value, static = getattr(self, name), self.loss_scale
            if value != FIELDS[name].default:
                field, scale = FIELDS[name], FIELDS["loss_scale"]
                raise SettingRefused(
                    f"{name}={spell(value)} with loss_scale={spell(static)}: a static scale does not change; leave "
                    f"{name} out, or use loss_scale='dynamic'.",
                    shown=f"{field.label} {field.shown(value)} has no effect with a static loss scale of "
                    f"{scale.shown(static)}; choose a dynamic loss scale first.",
                )

    @property
    def learning_rate(self) -> float:
        """The rate in effect: lr, or `usual_learning_rate`."""
        return self.usual_learning_rate if self.lr is None else float(self.lr)

    @property
    def usual_learning_rate(self) -> float:
        """The default rate of the optimizer and the task, at which the task learns."""
        return {**DEFAULT_LR, **task_choice(self.task).learning_rates}[self.optimizer]

    @property
    def level(self) -> Level:
        """What the opt_level names."""
        return LEVELS[self.opt_level]

    @property
    def policy(self) -> PrecisionPolicy | None:
        """The op lists and the rules of the session; None for the lists of the opt_level without rules.

        >>> str(ExperimentConfig(float32_ops="linear").policy)
        'apex/float16; op linear=float32'
        """
        ops, modules = listed(self.float32_ops), listed(self.float32_modules)
        if not ops and not modules:
            return self.level.policy
        base = self.level.policy or PrecisionPolicy()
        in_float32 = (dict.fromkeys(names, torch.float32) for names in (ops, modules))
        return PrecisionPolicy(base.table, base.compute_dtype, *in_float32)

    @property
    def effective_loss_scale(self) -> float | str:
        """The static scale in effect, or "dynamic": loss_scale, or what the opt_level sets."""
        return self.level.properties.loss_scale if self.loss_scale is None else self.loss_scale

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.effective_loss_scale == "dynamic"

    def default_of(self, name: str) -> Any:
        """Return the default of a field, which may depend on the task."""
        return FIELDS["task"].default if name == "task" else getattr(ExperimentConfig(task=self.task), name)

    def default_shown(self, name: str) -> str:
        """Return the default of a field as the dashboard shows it.

        >>> ExperimentConfig(opt_level="O2").default_shown("master_weights"), ExperimentConfig().default_shown("lr")
        ('by O2', '0.1')
        """
        if name == "lr":
            return FIELDS[name].shown(self.usual_learning_rate)
        value = self.default_of(name)
        if value is None and FIELDS[name].overrides_level:
            return f"by {self.opt_level}"
        return "none" if value is None else FIELDS[name].shown(value)

    def differs(self, name: str) -> bool:
        """Return whether the value in effect of a field differs from its default.

        >>> config = ExperimentConfig(lr=0.1, opt_level="O2")
        >>> config.differs("lr"), config.differs("opt_level"), config.changed(optimizer="adam").differs("lr")
        (False, True, True)
        """
        return name in self.differing()

    def differing(self) -> frozenset[str]:
        """Return the names of the fields whose value in effect differs from their default.

        >>> sorted(ExperimentConfig(lr=0.5, opt_level="O2", task="text").differing())
        ['lr', 'opt_level', 'task']
        """
        usual = ExperimentConfig(task=self.task)
        names = {name for name in FIELDS if name not in ("task", "lr") and getattr(self, name) != getattr(usual, name)}
        if self.task != FIELDS["task"].default:
            names.add("task")
        if self.learning_rate != self.usual_learning_rate:
            names.add("lr")
        return frozenset(names)

    def defaults(self) -> ExperimentConfig:
        """Return the config with the same weights at the start and every other field at its default.

        >>> str(ExperimentConfig(model="cnn", opt_level="O2", lr=0.5).defaults())
        'amplab/1 task=digits model=cnn opt_level=O1'
        """
        kept = {name: getattr(self, name) for name in FIELDS if name not in LIVE_FIELDS}
        return ExperimentConfig(**kept)

    def live_values(self) -> dict[str, Any]:
        """Return the fields that can change at a step boundary, by name."""
        return {name: getattr(self, name) for name in LIVE_FIELDS}

    def with_rate(self, rate: object) -> ExperimentConfig:
        """Return this config with a learning rate as a person enters it: the usual one is the default.

        Raises:
            ValueError: The field does not accept it.

        >>> ExperimentConfig(optimizer="adam", lr=0.5).with_rate(0.005) == ExperimentConfig(optimizer="adam")
        True
        """
        return self.changed(lr=None if rate == self.usual_learning_rate else rate)

    def changed(self, **changes: object) -> ExperimentConfig:
        """Return this config with some fields changed.

        A new opt_level drops the overrides that have no meaning there, and a static loss_scale drops the settings of a
        dynamic one, unless they are given in the same call; then they are refused. A new task brings its optimizer, and
        its model if it cannot train the present one. Another model has other modules: float32_modules is dropped.

        Raises:
            ValueError: An unknown field, or a value that the field does not accept.

        >>> str(ExperimentConfig(opt_level="O2", master_weights=False).changed(opt_level="O1"))
        'amplab/1 task=digits model=mlp opt_level=O1'
        """
        changes = {name: field_named(name).accepted(value) for name, value in changes.items()}
        level = str(changes.get("opt_level", self.opt_level))
        dropped: dict[str, object] = {name: None for name in OVERRIDES if why_no_override(level, name)}
        if changes.get("loss_scale") not in (None, "dynamic"):
            dropped |= {name: FIELDS[name].default for name in GROWTH}
        task = str(changes.get("task", self.task))
        if task != self.task:
            dropped |= {"optimizer": None} | ({"model": None} if self.model not in models_of(task) else {})
        if task != self.task or changes.get("model", self.model) != self.model:
            dropped |= {"float32_modules": None}
        return replace(self, **cast(dict[str, Any], {**dropped, **changes}))

    def __str__(self) -> str:
        """Return the string that `parse` reads."""
        values = {name: getattr(self, name) for name in FIELDS}
        always = {name: values[name] for name, declared in FIELDS.items() if declared.is_always_named}
        defaults = {name: declared.default for name, declared in FIELDS.items()}
        # A later process may not have code of one's own, nor know its default.
        defaults["optimizer"] = OWN if OWN_TASK.fullmatch(self.task) else task_choice(self.task).optimizer
        differing = {name: value for name, value in values.items() if value != defaults[name]}
        named = always | {name: value for name, value in differing.items() if name not in always}
        return " ".join([f"amplab/{VERSION}", *(f"{name}={spell(value)}" for name, value in named.items())])

    @classmethod
    def parse(cls, text: str) -> ExperimentConfig:
        """Return the experiment that a string of `str(config)` names; fields left out have their defaults.

        Raises:
            ValueError: Not such a string, of another version, with an unknown or repeated field, or a value that the
                field does not accept.
            TypeError: Not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"{text!r}: expected a config string; copy one from the lab's config().")
        head, *pairs = text.split() or [""]
        _check_head(head, text)
        values: dict[str, Any] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{pair!r}: expected field=value, as in {cls()!s}.")
            if name in values:
                raise ValueError(f"{pair!r}: {name} is given twice; keep one.")
            values[name] = field_named(name).read(value)
        return cls(**values)

    @classmethod
    def of_file(cls, text: str) -> ExperimentConfig:
        """Return what `parse` does, also of code of one's own that has other names in this process: then as if absent.

        Raises:
            ValueError, TypeError: As `parse`.
        """
        try:
            return cls.parse(text)
        except SettingRefused:
            absent, number = re.subn(rf"\btask={OWN_TASK.pattern}(?!\S)", f"task={ABSENT_OWN}", str(text))
            if not number:
                raise
            return cls.parse(absent)


FIELDS = {each.name: ConfigField(each.name, each.default, **each.metadata) for each in fields(ExperimentConfig)}
"""The declaration of each field, in their order."""

LIVE_FIELDS = tuple(name for name, each in FIELDS.items() if each.change is not Change.NEW_WEIGHTS)
"""Fields that can change at a step boundary of a running experiment; the others need a reset."""

OVERRIDES = tuple(name for name, each in FIELDS.items() if each.overrides_level)
"""Fields whose None means: what the opt_level sets."""

GROWTH = ("init_scale", "growth_interval", "min_loss_scale", "max_loss_scale")
"""Fields of a dynamic loss scale, which a static one does not have."""

_ATTRIBUTES = "\n".join(f"        {name}: {each.help}; {each.allowed}." for name, each in FIELDS.items())
ExperimentConfig.__doc__ = f"{(ExperimentConfig.__doc__ or '').rstrip()}\n\n    Attributes:\n{_ATTRIBUTES}\n    "


def field_named(name: str) -> ConfigField:
    """Return the declaration of a field.

    Raises:
        ValueError: There is no such field.
    """
    if name in FIELDS:
        return FIELDS[name]
    close = get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(FIELDS)}."
    raise ValueError(f"{echo(name)}: not a field of an experiment; {hint}")


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
            f"write the experiment again with the fields {', '.join(FIELDS)}, or install the amplab that made it."
        )
