"""What `doctor`, `twin` and `ladder` were given, held against what they take: one sentence for each odd argument.

What every step needs is in `amplab.trace.step_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from amplab.diagnose.observations import Observation
from amplab.trace.step_checks import accepts, check_loss_scale, check_model

__all__ = ["check_arguments", "check_called_with", "check_no_arguments", "check_seed", "check_steps", "check_tolerance"]


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
        if function is not None and (not callable(function) or isinstance(function, type)):
            _refuse(
                name, function, f"a function of no arguments, such as lambda: {_SUCH[name]}; a batch goes to batch="
            )
        if function is not None:
            check_called_with(name, function, 0, f"lambda: {_SUCH[name]}")
    if not _all(optimizers, Optimizer):
        _refuse("optimizers", optimizers, "a torch optimizer or a list of them")
    if run is not None and not isinstance(run, Observation):
        _refuse("run", run, "an amplab.diagnose.Observation, the steps so far; None for none")
    if not isinstance(stateful, Iterable) or not all(hasattr(each, "load_state_dict") for each in stateful):
        _refuse("stateful", stateful, "a list of what has state_dict and load_state_dict, such as [scheduler]")
    if loss_scale is not None:
        check_loss_scale(loss_scale)
    if loss_fn is not None or train_step is not None:
        check_model(model, compiled=loss_fn is None, values=True)


def check_no_arguments(**given: Any) -> None:
    """Raise a TypeError for the first value that `doctor` was given beside no model; None and () are none."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, tuple) and not value):
            raise TypeError(
                f"doctor got no model, but {name}: pass the model first, doctor(model, loss_fn); without arguments it "
                "looks at the machine."
            )


def check_called_with(name: str, function: Any, given: int, such: str) -> None:
    """Raise a TypeError unless `function` takes `given` arguments by place.

    Args:
        name: of the argument.
        function: what was given for it.
        given: how many values it will get.
        such: what would do, as code.
    """
    if not callable(function):
        raise TypeError(f"{name}={type(function).__name__}: expected a function, such as {such}.")
    refused = accepts(function, given)
    if refused is not None:
        what = f"{given} argument{'s' * (given != 1)}" if given else "no argument"
        raise TypeError(f"{name} is called with {what}, and {refused}: expected a function such as {such}.")


def check_steps(steps: Any, least: int = 1) -> None:
    """Raise a ValueError unless `steps` is a whole number of at least `least`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < least:
        wanted = "a whole number > 0, such as 10" if least == 1 else f"at least {least} steps, to see a loss fall"
        raise ValueError(f"steps={steps!r}: expected {wanted}.")


def check_tolerance(tolerance: Any) -> None:
    """Raise unless `tolerance` is a finite number >= 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise TypeError(f"tolerance={tolerance!r}: expected a number >= 0, such as 0.05 for 5 %.")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance}: expected a finite number >= 0, such as 0.05 for 5 %.")


def check_seed(seed: Any) -> None:
    """Raise unless `seed` is a whole number that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: expected a whole number, such as 0.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected a whole number of 64 bits, such as 0.")


_SUCH = {"loss_fn": "criterion(model(x), y)", "train_step": "train(batch)"}


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, Iterable) and all(isinstance(each, kind) for each in values)


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    kinds = ""
    if isinstance(value, list | tuple) and value:
        kinds = f" of {', '.join(dict.fromkeys(type(each).__name__ for each in value))}"
    raise TypeError(f"{name}={type(value).__name__}{kinds}: expected {expected}.")
