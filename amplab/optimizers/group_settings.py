"""Settings of an optimizer or a group by name: checked before anything is constructed, and the learning rate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

__all__ = ["REQUIRED", "check_settings", "groups_with_rates", "learning_rate"]

REQUIRED: Any = required
"""The default of a learning rate that every group may have instead, as in apex."""

_INF = float("inf")
_NO_LIMIT = -1  # of BERT's warm-up and its number of steps


def check_settings(optimizer: str, settings: Mapping[str, Any]) -> None:
    """Raise for a setting of the wrong type or out of its range; unknown names are not checked.

    Args:
        optimizer: its name, for the message.
        settings: values by name; a tensor of one element is a number.

    Raises:
        TypeError: a setting that is not a number, or not a pair of numbers.
        ValueError: a number out of its range.

    Sync: one for each number that is a tensor on a device.

    >>> check_settings("FusedAdagrad", {"lr": -1.0, "foreach": None})
    Traceback (most recent call last):
        ...
    ValueError: lr=-1.0: FusedAdagrad expected a finite number >= 0, such as 1e-3.
    """
    for name, value in settings.items():
        if name not in _EXPECTED:
            continue
        fits, expectation = _EXPECTED[name]
        try:
            fine = fits(value)
        except TypeError:
            raise TypeError(f"{name}={value!r}: {optimizer} expected {expectation}.") from None
        if not fine:
            raise ValueError(f"{name}={value!r}: {optimizer} expected {expectation}.")


def groups_with_rates(optimizer: str, params: Iterable[Any], first: int = 0) -> list[Any]:
    """Return the groups of an optimizer without a default learning rate.

    Args:
        optimizer: its name, for the message.
        params: what it was given.
        first: the index of the first group.

    Raises:
        ValueError: parameters without a group, or a group without ``lr``.

    >>> groups_with_rates("FusedSGD", [{"params": [], "lr": 0.1}, {"params": []}])
    Traceback (most recent call last):
        ...
    ValueError: parameter group 1 has no lr: FusedSGD expected lr in every group, or lr as an argument for all.
    """
    groups = [params] if isinstance(params, Tensor) else list(params)
    for index, group in enumerate(groups, first):
        if not (isinstance(group, Mapping) and "lr" in group):
            raise ValueError(
                f"parameter group {index if isinstance(group, Mapping) else 0} has no lr: {optimizer} expected lr in "
                "every group, or lr as an argument for all."
            )
    return groups


def learning_rate(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a group of any optimizer; None if it has none, or computes it in its steps.

    Sync: one if it is a tensor on a device.

    >>> learning_rate({"lr": 0.1}), learning_rate({"lr": None}), learning_rate({"decay": 0.9})
    (0.1, None, None)
    """
    rate = group.get("lr")
    return None if rate is None else float(rate)


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError
        return float(value.detach())
    if not isinstance(value, Real):
        raise TypeError
    return float(value)


def _not_negative(value: Any) -> bool:
    return 0.0 <= _number(value) < _INF


def _share(value: Any) -> bool:
    return 0.0 <= _number(value) < 1.0


def _shares(values: Any) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError
    return all(list(map(_share, values))) and len(values) == 2


def _sixteen_bits(dtype: Any) -> bool:
    return dtype in (None, torch.float16, torch.bfloat16)


# What each must be, and the words for it.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("lr",), (_not_negative, "a finite number >= 0, such as 1e-3")),
    **dict.fromkeys(("eps", "e"), (_not_negative, "a finite number >= 0, such as 1e-8")),
    **dict.fromkeys(
        ("weight_decay", "lr_decay", "initial_accumulator_value", "initial_square_avg", "first_step"),
        (_not_negative, "a finite number >= 0, such as 0"),
    ),
    **dict.fromkeys(("delta", "wd_ratio"), (_not_negative, "a finite number >= 0, such as 0.1")),
    "momentum": (_not_negative, "a finite number >= 0, such as 0.9"),
    "trust_coefficient": (_not_negative, "a finite number >= 0, such as 0.02"),
    "dampening": (lambda value: -_INF < _number(value) < _INF, "a finite number, such as 0"),
    "alpha": (_share, "a number in [0, 1), such as 0.99"),
    **dict.fromkeys(("b1", "b2"), (_share, "a number in [0, 1), such as 0.9")),
    "rho": (lambda value: 0.0 <= _number(value) <= 1.0, "a number in [0, 1], such as 0.9"),
    "betas": (_shares, "two numbers in [0, 1), such as (0.9, 0.999)"),
    "warmup": (
        lambda value: _number(value) == _NO_LIMIT or _share(value),
        "a share of all steps in [0, 1), such as 0.1; or -1 for no warm-up",
    ),
    "t_total": (
        lambda value: _number(value) == _NO_LIMIT or 1 <= _number(value) < _INF,
        "a number of steps >= 1, such as 1000; or -1 for a constant rate",
    ),
    "max_grad_norm": (
        lambda value: value is None or _not_negative(value),
        "a finite number > 0, such as 1.0; omit it for no clipping",
    ),
    "max_weight_norm": (lambda value: _number(value) > 0.0, "a number > 0, such as 10.0; or inf for no limit"),
    "reduced_precision_dtype": (_sixteen_bits, "torch.float16, torch.bfloat16 or None"),
}
