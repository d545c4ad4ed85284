"""Whether a saved state fits the models and optimizers it is to be loaded into, before anything is loaded.

Every problem is a phrase that names the model or optimizer, and the keys, shapes or options that differ.
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
    """Return what is saved of an optimizer: its class, the shapes that it steps group by group, and its state_dict."""
    shapes = [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "shapes": shapes, "state": optimizer.state_dict()}


def model_problems(models: Sequence[Module], saved: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what keeps ``saved`` from being loaded into ``models``; no models, no problems."""
    if not models:
        return
    if len(models) != len(saved):
        yield f"{len(saved)} saved model(s) for {len(models)} passed"
        return
    for index, (model, values) in enumerate(zip(models, saved, strict=True)):
        name = "model" if len(models) == 1 else f"model {index}"
        expected = model.state_dict()
        yield from _different_keys(name, expected, values)
        for key in filter(values.__contains__, expected):
            here, there = _kind(expected[key]), _kind(values[key])
            if here != there and not is_lazy(expected[key]):
                yield f"{name}: {key} is {there} in the file, {here} here"


def optimizer_problems(optimizers: Sequence[Optimizer], saved: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the reasons why ``saved`` cannot be loaded into ``optimizers``; none without optimizers.

    An optimizer of another class is accepted if the file has every option that it needs, such as Adam for AdamW.
    """
    if not optimizers:
        return
    if len(optimizers) != len(saved):
        yield f"{len(saved)} saved optimizer(s) for {len(optimizers)} passed"
        return
    for index, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {index}"
        here = optimizer_entry(optimizer)
        if here["class"] != entry["class"]:
            needed = [key for key in optimizer.defaults if any(key not in group for group in _groups(entry))]
            if needed:
                yield f"{name}: {entry['class']} in the file has no {', '.join(needed)} for {here['class']}"
        yield from _different_shapes(name, here["shapes"], entry["shapes"])


def scaler_problems(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `Session.load_state_dict` would refuse in the saved loss scalers of a session."""
    for key, entry in saved.items():
        if re.fullmatch(r"loss_scaler\d+", key) is None:
            yield f'unexpected key "{key}" among the loss scalers'
            continue
        try:
            checked_entry(entry)
        except ValueError as error:
            yield f"{key}: {error}"


def _kind(value: Any) -> tuple[int, ...] | str:
    """The shape of a tensor; of an extra state, that it is one, since its content is its module's own."""
    if is_lazy(value):
        return "not made yet"
    return tuple(value.shape) if isinstance(value, Tensor) else "no tensor"


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
        yield f"{name}: groups of {saved_counts} parameters in the file, of {counts} here"
        return
    for group, (shapes, saved_shapes) in enumerate(zip(here, there, strict=True)):
        for index, (shape, saved_shape) in enumerate(zip(shapes, saved_shapes, strict=True)):
            if shape != saved_shape:
                yield (
                    f"{name}: parameter {index} of group {group} is {tuple(saved_shape)} in the file, "
                    f"{tuple(shape)} here"
                )
                return
