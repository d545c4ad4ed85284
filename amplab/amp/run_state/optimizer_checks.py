"""Check a saved optimizer against the given one: its groups, its options, and the state that its steps need.

What a step needs is found out by a step: an optimizer of the same class takes one, with the saved options, on
parameters of the same shapes on the meta device, which hold no values. So the options are those that the class accepts,
and the saved state is compared with the state that the class makes: a missing ``exp_avg`` is found before it is loaded.
Classes of torch and amplab are checked so; of others, and of those that cannot step there (LBFGS, Adafactor), only the
groups, the kind of each option, and the learning rate.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "dtype_kind",
    "optimizer_entry",
    "optimizer_problems",
    "param_dtypes",
    "problems_of_each",
    "state_dtypes",
]

Part = TypeVar("Part")

_ELSEWHERE = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""Options that choose how a step runs, not what it computes."""


def dtype_kind(tensor: Tensor) -> str:
    """Return what a tensor holds, whatever its precision: "bool", "integer", "float" or "complex"."""
    if tensor.dtype.is_floating_point:
        return "float"
    return "complex" if tensor.dtype.is_complex else "bool" if tensor.dtype == torch.bool else "integer"


def optimizer_entry(optimizer: Optimizer) -> dict[str, Any]:
    """Return the saved form of an optimizer: its class, shapes and dtypes of its parameters, and its state_dict.

    A number of NumPy in a group, as a schedule sets it, becomes Python's.
    """
    shapes = [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    state = optimizer.state_dict()
    groups = [
        {name: value.item() if isinstance(value, np.generic) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    return {
        "class": type(optimizer).__name__,
        "shapes": shapes,
        "dtypes": param_dtypes(optimizer),
        "state": {**state, "param_groups": groups},
    }


def param_dtypes(optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the dtypes of each group's parameters."""
    return [[str(param.dtype).removeprefix("torch.") for param in group["params"]] for group in optimizer.param_groups]


def state_dtypes(optimizer: Optimizer, param: Tensor, options: Mapping[str, Any]) -> dict[str, torch.dtype] | None:
    """Return the dtype of each tensor of the state that an optimizer makes for a parameter; None if it is unknown.

    Args:
        optimizer: of any class.
        param: one of its parameters.
        options: of the parameter's group.
    """
    rule = _rule(optimizer)
    try:
        made = None if rule is None else _state_after_a_step(rule, param, options)
    except (TypeError, ValueError):
        return None
    tensors = {} if made is None else {name: value for name, value in made.items() if isinstance(value, Tensor)}
    return None if made is None else {name: value.dtype for name, value in tensors.items()}


def optimizer_problems(optimizers: Sequence[Optimizer], saved: Any) -> Iterator[str]:
    """Yield the problems of loading ``saved`` into ``optimizers``; none if there are no optimizers.

    The class may differ if the file has all options of the given optimizer, such as Adam and AdamW.
    """
    yield from problems_of_each("optimizer", optimizers, saved, _problems)


def problems_of_each(
    kind: str, passed: Sequence[Part], saved: Any, problems: Callable[[Part, Any], Iterator[str]]
) -> Iterator[str]:
    """Yield the problems of loading a list of entries into the parts of a program; none if no parts were passed.

    Args:
        kind: what a part is called, such as "optimizer".
        passed: the parts.
        saved: what the file has for them.
        problems: yields the problems of loading one entry into one part; its number is put before them.
    """
    if not passed:
        return
    if not isinstance(saved, list):
        yield f"the file has a {type(saved).__name__} instead of a list of {kind}s"
        return
    if len(passed) != len(saved):
        yield f"the file has {len(saved)} {kind}(s), and {len(passed)} were passed"
        return
    for index, (part, entry) in enumerate(zip(passed, saved, strict=True)):
        name = kind if len(passed) == 1 else f"{kind} {index}"
        yield from (f"{name}: {each}" for each in problems(part, entry))


def _problems(optimizer: Optimizer, entry: Any) -> Iterator[str]:
    for check in (_malformed, _other_groups, _unfit):  # each relies on the ones before it
        if found := list(check(optimizer, entry)):
            yield from found
            return


def _malformed(_optimizer: Optimizer, entry: Any) -> Iterator[str]:
    """Yield what is not of the form of `optimizer_entry`."""
    if not isinstance(entry, Mapping) or not isinstance(state := entry.get("state"), Mapping):
        yield "its entry has no state_dict"
        return
    groups, shapes = state.get("param_groups"), entry.get("shapes")
    if not (isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)):
        yield "its state_dict has no param_groups"
    elif not all(_is_list_of(group.get("params"), int) and _has_names(group) for group in groups):
        yield "its groups have no numbers of parameters"
    elif (numbers := list(chain(*(group["params"] for group in groups)))) != list(range(len(numbers))):
        yield "its groups do not number the parameters from 0"
    elif not (_is_list_of(shapes, list) and all(_is_list_of(each, list) for each in shapes)):
        yield "its entry has no shapes of parameters"
    elif not isinstance(entry.get("class"), str):
        yield "its entry has no class"
    elif not isinstance(states := state.get("state"), Mapping):
        yield "its state_dict has no state"
    elif not all(isinstance(each, Mapping) for key, each in states.items() if isinstance(key, int)):
        yield "the state of its parameters is not a dict"
    elif unknown := [key for key in states if isinstance(key, int) and key not in numbers]:
        yield f"its state has parameter {unknown[0]}, which no group has"


def _has_names(group: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in group)


def _is_list_of(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _other_groups(optimizer: Optimizer, entry: dict[str, Any]) -> Iterator[str]:
    """Yield the options that a class needs and the file lacks, and the parameters of another shape."""
    here, groups = optimizer_entry(optimizer), entry["state"]["param_groups"]
    if here["class"] != entry["class"]:
        needed = [key for key in optimizer.defaults if any(key not in group for group in groups)]
        if needed:
            yield f"{here['class']} needs {', '.join(needed)}, which {entry['class']} in the file lacks"
    yield from _different_shapes(here["shapes"], entry["shapes"], [len(group["params"]) for group in groups])
    yield from _other_order(optimizer.param_groups, groups)


def _other_order(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the first parameter at another place, of optimizers that were made with the same names of parameters.

    State goes by place, and a model that defines its layers in another order has exchanged the places.
    """
    for number, (group, saved) in enumerate(zip(here, there, strict=False)):
        names, saved_names = list(group.get("param_names") or ()), list(saved.get("param_names") or ())
        if names != saved_names and {*names} == {*saved_names}:
            pairs = enumerate(zip(names, saved_names, strict=False))
            place, name, saved_name = next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
            yield (
                f"parameter {place} of group {number} is {saved_name!r} in the file and {name!r} in the optimizer; "
                "pass it the parameters in the order of the file"
            )
            return


def _different_shapes(here: list[list[Any]], there: list[list[Any]], numbers: list[int]) -> Iterator[str]:
    counts, saved_counts = [len(group) for group in here], [len(group) for group in there]
    if counts != saved_counts or counts != numbers:
        saved = numbers if counts == saved_counts else saved_counts
        yield f"groups of {saved} parameters in the file and of {counts} in the optimizer"
        return
    for group, (shapes, saved_shapes) in enumerate(zip(here, there, strict=True)):
        for index, (shape, saved_shape) in enumerate(zip(shapes, saved_shapes, strict=True)):
            if shape != saved_shape:
                yield (
                    f"parameter {index} of group {group} is {tuple(saved_shape)} in the file "
                    f"and {tuple(shape)} in the optimizer"
                )
                return


def _unfit(optimizer: Optimizer, entry: dict[str, Any]) -> Iterator[str]:
    """Yield the options and the state with which the optimizer could not step."""
    states = entry["state"]["state"]
    rule = _rule(optimizer)
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, entry["state"]["param_groups"], strict=True)):
        options = {name: value for name, value in saved.items() if name != "params"}
        refused = [f"group {index}: {each}" for each in _unfit_options(group, options)]
        if refused:
            yield from refused
            continue
        made: dict[tuple[Any, ...], dict[str, Any] | None] = {}
        for number, param in zip(saved["params"], group["params"], strict=True):
            kind = (tuple(param.shape), param.dtype)
            if rule is not None and kind not in made:
                try:
                    made[kind] = _state_after_a_step(rule, param, options)
                except (TypeError, ValueError) as error:
                    yield f"group {index}: {rule.__name__} refuses its options ({error})"
                    break
            found = states.get(number, {})
            needed = {name: own for name, own in (made.get(kind) or {}).items() if name not in options}
            yield from (f"parameter {number}: {each}" for each in _unfit_state(found, needed))


def _unfit_options(here: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield each option whose kind is not that of the optimizer's own, or that is not finite."""
    for name, value in saved.items():
        computed = value is None and here.get(name) is None  # as Adafactor of transformers does for its rate
        if name == "lr" and not (computed or _is_not_negative(value)):
            yield f"lr is {value!r}: expected a number >= 0"
        elif name in here and not _is_like(value, here[name]):
            yield f"{name} is {value!r} in the file and {here[name]!r} in the optimizer"
        elif name not in here and _is_number(value) and not math.isfinite(value):
            yield f"{name} is {value!r}: expected a finite number"


def _is_like(value: Any, own: Any) -> bool:
    if value is None or own is None:
        return True  # a choice that is left to torch, as foreach and fused are
    if isinstance(own, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(own, bool)
    if _is_number(own):
        return _is_number(value) and (math.isfinite(value) or not math.isfinite(own))
    if isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(own):
            return False
        return all(_is_like(*pair) for pair in zip(value, own, strict=True))
    return isinstance(value, type(own))


def _is_not_negative(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value < math.inf


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
        return is_plain and value.numel() == 1 and dtype_kind(value) in ("integer", "float")
    return isinstance(value, int | float)


def _rule(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch that makes the state of an optimizer of torch or amplab; None for others."""
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "amplab"):
        return None
    ours = (each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.optim."))
    return next((each for each in ours if each is not Optimizer), None)


def _state_after_a_step(rule: type[Optimizer], param: Tensor, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state that ``rule`` makes for a parameter, with tensors on the meta device; None if it cannot.

    Raises:
        TypeError, ValueError: the class refuses an option.
    """
    trial = torch.empty(param.shape, dtype=param.dtype, device="meta", requires_grad=True)
    known = inspect.signature(rule).parameters.keys() & options.keys()
    chosen: dict[str, Any] = {name: _as_number(options[name]) for name in known}
    optimizer = rule([trial], **chosen | {name: value for name, value in _ELSEWHERE.items() if name in known})
    trial.grad = torch.empty_like(trial)
    try:
        with torch.no_grad():
            inspect.unwrap(rule.step)(optimizer)  # without the hooks that a program registered for all optimizers
    except (RuntimeError, TypeError, ValueError):  # a step that reads values, or needs a closure
        return None
    return dict(optimizer.state[trial])


def _as_number(option: Any) -> Any:
    return float(option) if isinstance(option, Tensor) else option


def _unfit_state(saved: Mapping[str, Any], needed: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the state of a parameter lacks or has in another form; a parameter without state begins anew."""
    for name, value in saved.items():
        own = needed.get(name)
        if name == "step":
            if not _is_not_negative(value):
                yield f"step is {value!r}: expected a number >= 0"
        elif isinstance(own, Tensor) and _form(value) != _form(own):
            yield f"{name} is {_form(value)} in the file and {_form(own)} in the optimizer"
    if missing := [name for name in needed if saved and name not in saved]:
        yield f"its state has no {', '.join(missing)}"


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{dtype_kind(value)} {tuple(value.shape)}{layout}"
