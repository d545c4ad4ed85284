"""Check that a saved state matches the given models and optimizers, before anything is loaded.

Each problem is a phrase that names the model or optimizer, and the keys, shapes or options that differ.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from amplab.amp.apex.loss_scaling import checked_entry

__all__ = ["model_problems", "optimizer_entry", "optimizer_problems", "scaler_problems"]

_MOST_NAMES = 8


def optimizer_entry(optimizer: Optimizer) -> dict[str, Any]:
    """Return the saved form of an optimizer: its class, the shapes of each group's parameters, and its state_dict."""
    shapes = [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "shapes": shapes, "state": optimizer.state_dict()}


def model_problems(models: Sequence[Module], saved: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the problems of loading ``saved`` into ``models``; none if there are no models."""
    if not models:
        return
    if len(models) != len(saved):
        yield f"the file has {len(saved)} model(s), and {len(models)} were passed"
        return
    for index, (model, values) in enumerate(zip(models, saved, strict=True)):
        name = "model" if len(models) == 1 else f"model {index}"
        expected = model.state_dict()
        yield from _different_keys(name, expected, values)
        for key in filter(values.__contains__, expected):
            here, there = _kind(expected[key]), _kind(values[key])
            if here != there and not is_lazy(expected[key]):
                yield f"{name}: {key} is {there} in the file and {here} in the model"


def optimizer_problems(optimizers: Sequence[Optimizer], saved: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the problems of loading ``saved`` into ``optimizers``; none if there are no optimizers.

    The class may differ if the file has all options of the given optimizer, such as Adam and AdamW.
    """
    if not optimizers:
        return
    if len(optimizers) != len(saved):
        yield f"the file has {len(saved)} optimizer(s), and {len(optimizers)} were passed"
        return
    for index, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {index}"
        here = optimizer_entry(optimizer)
        if here["class"] != entry["class"]:
            needed = [key for key in optimizer.defaults if any(key not in group for group in _groups(entry))]
            if needed:
                yield f"{name}: {here['class']} needs {', '.join(needed)}, which {entry['class']} in the file lacks"
        yield from _different_shapes(name, here["shapes"], entry["shapes"])


def scaler_problems(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why `Session.load_state_dict` would refuse the saved loss scalers."""
    for key, entry in saved.items():
        if re.fullmatch(r"loss_scaler\d+", key) is None:
            yield f'unexpected key "{key}" among the loss scalers'
            continue
        try:
            checked_entry(entry)
        except ValueError as error:
            yield f"{key}: {error}"


def _kind(value: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or a description: the content of an extra state belongs to its module."""
    if is_lazy(value):
        return "uninitialized"
    return tuple(value.shape) if isinstance(value, Tensor) else "not a tensor"


def _groups(entry: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = entry["state"]["param_groups"]
    return groups


def _different_keys(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    for what, keys in (
        ("missing", [key for key in here if key not in there]),
        ("unexpected", [key for key in there if key not in here]),
    ):
        if keys:
            more = f" and {len(keys) - _MOST_NAMES} more" if len(keys) > _MOST_NAMES else ""
            yield f"{name}: {what} key(s) {', '.join(keys[:_MOST_NAMES])}{more}"


def _different_shapes(name: str, here: list[list[Any]], there: list[list[Any]]) -> Iterator[str]:
    counts, saved_counts = [len(group) for group in here], [len(group) for group in there]
    if counts != saved_counts:
        yield f"{name}: groups of {saved_counts} parameters in the file and of {counts} in the optimizer"
        return
    for group, (shapes, saved_shapes) in enumerate(zip(here, there, strict=True)):
        for index, (shape, saved_shape) in enumerate(zip(shapes, saved_shapes, strict=True)):
            if shape != saved_shape:
                yield (
                    f"{name}: parameter {index} of group {group} is {tuple(saved_shape)} in the file "
                    f"and {tuple(shape)} in the optimizer"
                )
                return
