"""Check that a saved state has its form and fits the given models and scalers, before anything is loaded.

Each problem is a phrase that names the part, and what differs. Optimizers are checked in `optimizer_checks`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from amplab.amp.apex.loss_scaling import checked_entry
from amplab.amp.pytorch.loss_scale import checked_state
from amplab.amp.run_state.optimizer_checks import dtype_kind, problems_of_each

__all__ = ["form_problems", "model_problems", "scale_problems", "session_problems"]

_MOST_NAMES = 8

_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "models": (lambda part: isinstance(part, list), "a list"),
    "optimizers": (lambda part: isinstance(part, list), "a list"),
    "opt_level": (lambda part: part is None or isinstance(part, str), "a name or None"),
    "amp": (lambda part: part is None or isinstance(part, Mapping), "a dict or None"),
    "scaler": (lambda part: part is None or isinstance(part, Mapping), "a dict or None"),
    "rng": (lambda part: isinstance(part, Mapping), "a dict"),
    "position": (lambda _: True, "anything"),
    "extra": (lambda _: True, "anything"),
}


def form_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts that a state of `save_run_state` has and ``state`` lacks or has as another type."""
    for name, (fits, expected) in _PARTS.items():
        if name not in state:
            yield f'the file has no "{name}"'
        elif not fits(state[name]):
            yield f'"{name}" is a {type(state[name]).__name__} in the file: expected {expected}'


def model_problems(models: Sequence[Module], saved: Sequence[Any]) -> Iterator[str]:
    """Yield the problems of loading ``saved`` into ``models``; none if there are no models."""
    yield from problems_of_each("model", models, saved, _different_values)


def _different_values(model: Module, values: Any) -> Iterator[str]:
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        yield f"the file has a {type(values).__name__} instead of a state_dict"
        return
    expected = model.state_dict()
    yield from _different_keys(expected, values)
    for key in filter(values.__contains__, expected):
        if not is_lazy(expected[key]):
            yield from (f"{key} {each}" for each in _different_tensors(expected[key], values[key]))


def session_problems(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why `Session.load_state_dict` would refuse the saved loss scalers."""
    for key, entry in saved.items():
        if re.fullmatch(r"loss_scaler\d+", str(key)) is None:
            yield f'unexpected key "{key}" among the loss scalers'
            continue
        try:
            checked_entry(entry)
        except ValueError as error:
            yield f"{key}: {error}"


def scale_problems(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reason why a GradScaler could not continue with its saved state."""
    others = saved.get("losses", [])
    if not isinstance(others, list):
        yield f"scaler: losses is {others!r}: expected a list of states"
        return
    for state in (saved, *others):
        try:
            checked_state(state, None)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            yield f"scaler: {error.args[0]}"
            return


def _different_keys(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    for what, keys in (
        ("missing", [key for key in here if key not in there]),
        ("unexpected", [key for key in there if key not in here]),
    ):
        if keys:
            more = f" and {len(keys) - _MOST_NAMES} more" if len(keys) > _MOST_NAMES else ""
            yield f"{what} key(s) {', '.join(keys[:_MOST_NAMES])}{more}"


def _different_tensors(here: Any, there: Any) -> Iterator[str]:
    """Yield what differs: shape, layout or kind of dtype. The content of an extra state belongs to its module."""
    if not (isinstance(here, Tensor) and isinstance(there, Tensor)):
        if isinstance(here, Tensor) or isinstance(there, Tensor):
            yield f"is {_kind(there)} in the file and {_kind(here)} in the model"
    elif is_lazy(there) or here.shape != there.shape:
        yield f"is {_kind(there)} in the file and {_kind(here)} in the model"
    elif (dtype_kind(here), here.layout) != (dtype_kind(there), there.layout):
        yield f"is {there.dtype}, {there.layout} in the file and {here.dtype}, {here.layout} in the model"


def _kind(value: Any) -> tuple[int, ...] | str:
    if is_lazy(value):
        return "uninitialized"
    return tuple(value.shape) if isinstance(value, Tensor) else "not a tensor"
