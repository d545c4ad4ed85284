"""The four optimization levels as data, and the overrides that each of them accepts.

=====================  =============  =============  =============  =============
property               O0             O1             O2             O3
=====================  =============  =============  =============  =============
cast_model_type        float32        None           float16        float16
patch_torch_functions  False          True           False          False
keep_batchnorm_fp32    None           None           True           False
master_weights         False          None           True           False
loss_scale             1.0            "dynamic"      "dynamic"      1.0
=====================  =============  =============  =============  =============

Overrides are checked and applied one at a time in the order of the table, as in NVIDIA apex. `session` applies the
properties of a level, and `banner` prints them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amplab.amp.arguments import checked_flag, scale_value

__all__ = [
    "OPT_LEVELS",
    "OptLevel",
    "OptProperties",
    "explain_override",
    "opt_level_named",
]


@dataclass(frozen=True)
class OptProperties:
    """The properties in force for one call of `initialize`; the defaults mean "off".

    Attributes:
        enabled: False makes everything a no-op.
        opt_level: "O0" to "O3", None while disabled.
        cast_model_type: dtype of the model's weights and inputs; None or False for no cast.
        patch_torch_functions: cast around torch functions (O1).
        keep_batchnorm_fp32: keep affine BatchNorm in float32 when the model is cast.
        master_weights: the optimizer steps float32 copies of the half weights.
        loss_scale: "dynamic", or a static scale.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    def with_overrides(self, refuse: Callable[[str], None] | None = None, **overrides: Any) -> "OptProperties":
        """Apply the overrides that are not None, each checked against the level.

        Args:
            refuse: called with the reason why an override makes no sense at this level; if it returns, the override
                is applied. None raises RuntimeError.
            overrides: properties and their values.

        Raises:
            RuntimeError: the override is not allowed at this level.
            AssertionError: ``keep_batchnorm_fp32`` is neither a bool nor "True" or "False".
            TypeError: ``cast_model_type`` is not a dtype.
            ValueError: ``cast_model_type`` or ``loss_scale`` has an invalid value.

        >>> OPT_LEVELS["O2"].properties.with_overrides(loss_scale="128.0").loss_scale
        128.0
        """
        properties = self
        for name in _OVERRIDES:
            value = overrides.pop(name, None)
            if value is not None:
                value = _CHECKS.get(name, _accept)(properties.opt_level, value, refuse or _refuse)
                properties = dataclasses.replace(properties, **{name: value})
        if overrides:
            raise TypeError(f"{sorted(overrides)[0]!r} is not a property: expected one of {', '.join(_OVERRIDES)}.")
        return properties

    def lines(self) -> list[str]:
        """Return one line ``name : value`` for each property, as apex prints them."""
        return [f"{field.name:22} : {getattr(self, field.name)}" for field in dataclasses.fields(self)]


@dataclass(frozen=True)
class OptLevel:
    """One optimization level.

    Attributes:
        name: "O0" to "O3".
        brief: the text that apex prints when the level is selected.
        properties: what the level sets before any override.
        explanation: one line for a reader who does not know the level.
    """

    name: str
    brief: str
    properties: OptProperties
    explanation: str


def _level(name: str, brief: str, explanation: str, **properties: Any) -> OptLevel:
    return OptLevel(name, brief, OptProperties(enabled=True, opt_level=name, **properties), explanation)


# Three of apex's briefs end in a newline, so that a blank line follows them in the banner.
OPT_LEVELS: dict[str, OptLevel] = {
    level.name: level
    for level in (
        _level(
            "O0",
            "O0:  Pure FP32 training.\n",
            "Everything in float32: the baseline for the other levels.",
            cast_model_type=torch.float32,
            patch_torch_functions=False,
            keep_batchnorm_fp32=None,
            master_weights=False,
            loss_scale=1.0,
        ),
        _level(
            "O1",
            "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
            "Weights stay float32; each op runs in float16 or in float32, as the op lists say. Start here.",
            cast_model_type=None,
            patch_torch_functions=True,
            keep_batchnorm_fp32=None,
            master_weights=None,
            loss_scale="dynamic",
        ),
        _level(
            "O2",
            "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
            "The model in float16 except BatchNorm; the optimizer steps float32 master weights.",
            cast_model_type=torch.float16,
            patch_torch_functions=False,
            keep_batchnorm_fp32=True,
            master_weights=True,
            loss_scale="dynamic",
        ),
        _level(
            "O3",
            "O3:  Pure FP16 training.",
            "Everything in float16, without master weights: the fastest level, and often unstable.",
            cast_model_type=torch.float16,
            patch_torch_functions=False,
            keep_batchnorm_fp32=False,
            master_weights=False,
            loss_scale=1.0,
        ),
    )
}

_OVERRIDES = tuple(field.name for field in dataclasses.fields(OptProperties))

_SENSELESS = {
    ("O0", "cast_model_type"): "O0 uses float32 only; O3 casts the whole model to half.",
    ("O0", "patch_torch_functions"): "O0 uses float32 only; O1 casts around functions.",
    ("O0", "keep_batchnorm_fp32"): "At O0 BatchNorm is float32 already.",
    ("O0", "master_weights"): "At O0 the weights are float32, so masters would be plain copies.",
    ("O1", "cast_model_type"): "O1 casts around functions and keeps the weights float32; O2 and O3 cast the model.",
    (
        "O1",
        "keep_batchnorm_fp32",
    ): "BatchNorm's weights and statistics stay float32.",
    ("O1", "master_weights"): "At O1 the model's weights are float32 and need no masters.",
    ("O2", "patch_torch_functions"): "O2 casts the model; O1 casts around functions.",
    ("O3", "patch_torch_functions"): "O3 casts the model; O1 casts around functions.",
}


def opt_level_named(name: str) -> OptLevel:
    """Return the level called ``name``.

    Raises:
        RuntimeError: there is no such level.
    """
    if not isinstance(name, str) or name not in OPT_LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {name}. Options are 'O0', 'O1', 'O2', 'O3'.  "
            "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    return OPT_LEVELS[name]


def explain_override(opt_level: str, name: str) -> str | None:
    """Return the reason why an override of ``name`` is not useful at ``opt_level``; None if it may be useful.

    This is advice. `OptProperties.with_overrides` refuses some of these overrides. Others are allowed and have no
    effect, or turn the level into another one.

    Raises:
        RuntimeError: there is no such level.
        ValueError: there is no such property.

    >>> explain_override("O1", "master_weights")
    "At O1 the model's weights are float32 and need no masters."
    >>> explain_override("O2", "master_weights") is None
    True
    """
    level = opt_level_named(opt_level)
    if name not in _OVERRIDES[2:]:
        raise ValueError(
            f"{name!r} is not a property that can be overridden: expected one of {', '.join(_OVERRIDES[2:])}."
        )
    return _SENSELESS.get((level.name, name))


_Refuse = Callable[[str], None]


def _refuse(message: str) -> None:
    raise RuntimeError(message)


def _accept(_level: str | None, value: Any, _refuse: _Refuse) -> Any:
    return value


def _checked_cast_model_type(opt_level: str | None, value: Any, refuse: _Refuse) -> Any:
    if opt_level == "O1" and value is not False and value is not torch.float32:
        refuse(
            "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
            "themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' "
            f"or 'O3'. cast_model_type was {value}"
        )
    if value is not False and not isinstance(value, torch.dtype):
        raise TypeError(f"cast_model_type={value!r}: expected a torch.dtype such as torch.float16, False or None.")
    if value not in (False, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"cast_model_type={value}: expected torch.float16, torch.bfloat16, torch.float32 or False (no cast)."
        )
    return value


def _checked_patch_torch_functions(opt_level: str | None, value: Any, refuse: _Refuse) -> Any:
    if opt_level != "O1" and value and value != "False":
        refuse(
            "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'. "
            f"opt_level was '{opt_level}'"
        )
    return checked_flag("patch_torch_functions", value)


def _checked_keep_batchnorm_fp32(opt_level: str | None, value: Any, refuse: _Refuse) -> Any:
    if opt_level == "O1":
        refuse(
            "With opt_level O1, no weight is cast and BatchNorm stays in FP32, so keep_batchnorm_fp32 should be None. "
            f"keep_batchnorm_fp32 was {value}"
        )
    value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise AssertionError(  # the type that apex raises here
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, "
            f"found keep_batchnorm_fp32={value}"
        )
    return value


def _checked_master_weights(opt_level: str | None, value: Any, refuse: _Refuse) -> Any:
    if opt_level == "O1":
        refuse(
            "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
            f"FP32. master_weights was {value}; leave it out, or use opt_level='O2'"
        )
    return checked_flag("master_weights", value)


def _checked_loss_scale(_level: str | None, value: Any, _refuse: _Refuse) -> float | str:
    return value if isinstance(value, str) and value == "dynamic" else scale_value("loss_scale", value)


_CHECKS: dict[str, Callable[[str | None, Any, _Refuse], Any]] = {
    "cast_model_type": _checked_cast_model_type,
    "patch_torch_functions": _checked_patch_torch_functions,
    "keep_batchnorm_fp32": _checked_keep_batchnorm_fp32,
    "master_weights": _checked_master_weights,
    "loss_scale": _checked_loss_scale,
}
