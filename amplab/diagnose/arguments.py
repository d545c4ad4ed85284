"""What `doctor` was given, held against what it takes: one sentence for each argument of another type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from amplab.diagnose.observations import Observation

__all__ = ["check_arguments"]


def check_arguments(
    model: Any, loss_fn: Any, train_step: Any, optimizers: Any, *, loss_scale: Any, run: Any, stateful: Any
) -> None:
    """Raise a TypeError or ValueError for the first argument that `doctor` cannot take; see there.

    >>> check_arguments("a", None, None, (), loss_scale=None, run=None, stateful=())
    Traceback (most recent call last):
    TypeError: model=str: expected a torch.nn.Module; put several that learn together into a ModuleList.
    """
    if not isinstance(model, nn.Module):
        _refuse("model", model, "a torch.nn.Module; put several that learn together into a ModuleList")
    for name, function in (("loss_fn", loss_fn), ("train_step", train_step)):
        if function is not None and not callable(function):
            _refuse(name, function, f"a function of no arguments, such as lambda: {_SUCH[name]}")
    if not _all(optimizers, Optimizer):
        _refuse("optimizers", optimizers, "a torch optimizer or a list of them")
    if run is not None and not isinstance(run, Observation):
        _refuse("run", run, "an amplab.diagnose.Observation, the steps so far; None for none")
    if not isinstance(stateful, Iterable) or not all(hasattr(each, "load_state_dict") for each in stateful):
        _refuse("stateful", stateful, "a list of what has state_dict and load_state_dict, such as [scheduler]")
    _check_scale(loss_scale)


_SUCH = {"loss_fn": "criterion(model(x), y)", "train_step": "train(batch)"}


def _check_scale(loss_scale: Any) -> None:
    if loss_scale is None:
        return
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        _refuse("loss_scale", loss_scale, "a number > 0, or None for the present scale")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale={loss_scale!r}: expected a number > 0, or None for the present scale.")


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, Iterable) and all(isinstance(each, kind) for each in values)


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    kinds = ""
    if isinstance(value, list | tuple) and value:
        kinds = f" of {', '.join(dict.fromkeys(type(each).__name__ for each in value))}"
    raise TypeError(f"{name}={type(value).__name__}{kinds}: expected {expected}.")
