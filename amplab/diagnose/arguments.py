"""Checks of the options of `doctor`, `twin` and `ladder`: one sentence for each wrong argument.

`amplab.trace.handed_step` checks the model, the batch and the step, which all tools take alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from amplab.diagnose.observations import Observation
from amplab.trace.step_checks import accepts, check_loss_scale

__all__ = ["check_called_with", "check_no_arguments", "check_options", "check_seed", "check_steps", "check_tolerance"]


def check_options(*, run: Any, stateful: Any, loss_scale: Any) -> None:
    """Raise for the first option that `doctor` cannot take; see there.

    Raises:
        TypeError, ValueError: one sentence each.

    >>> check_options(run=3, stateful=(), loss_scale=None)
    Traceback (most recent call last):
    TypeError: run=int: expected an amplab.diagnose.Observation, the steps so far, or None.
    """
    if run is not None and not isinstance(run, Observation):
        raise TypeError(
            f"run={type(run).__name__}: expected an amplab.diagnose.Observation, the steps so far, or None."
        )
    if not isinstance(stateful, Iterable) or not all(hasattr(each, "load_state_dict") for each in stateful):
        kinds = f" of {', '.join(type(each).__name__ for each in stateful)}" if isinstance(stateful, list) else ""
        raise TypeError(
            f"stateful={type(stateful).__name__}{kinds}: expected a list of objects with state_dict and "
            "load_state_dict, such as [scheduler]."
        )
    if loss_scale is not None:
        check_loss_scale(loss_scale)


def check_no_arguments(**given: Any) -> None:
    """Raise a TypeError for the first value that `doctor` was given without a model; None and () do not count."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, tuple) and not value):
            raise TypeError(
                f"doctor got {name}, but no model: pass the model first, amplab.doctor(model, batch, loss=criterion) "
                "or amplab.doctor(model, step=loss_of); without arguments it reports on the machine."
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
