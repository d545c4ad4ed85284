"""What a checkpoint of the lab holds besides the run state of `save_run_state`, checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amplab.amp.run_state.file_format import RunStateError, read_run_state
from amplab.lab.faults import FAULTS
from amplab.lab.own_values import storage_of
from amplab.lab.run_log.json_lines import is_count, is_number

__all__ = [
    "all_buffers",
    "read_saved",
    "register_buffers",
    "registered_buffers",
    "separate_buffers",
    "shape_of",
    "sharing_buffers",
    "unsaved_buffers",
]


def all_buffers(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
    """Yield the name of each buffer of a model, and where it is."""
    for path, module in model.named_modules():
        for key in module._buffers:
            yield f"{path}.{key}", module._buffers, key


def unsaved_buffers(
    model: nn.Module, shapes: Mapping[str, torch.Size | None]
) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
    """Yield those of `all_buffers` that a state_dict leaves out, or that a new model of these shapes cannot load."""
    hidden = _non_persistent(model)
    for name, buffers, key in all_buffers(model):
        if name in hidden or shapes.get(name) != shape_of(buffers[key]):
            yield name, buffers, key


def registered_buffers(model: nn.Module, shapes: Mapping[str, torch.Size | None]) -> dict[str, bool]:
    """Return the buffers that a forward has registered, by name, and whether a state_dict has them.

    A new model has buffers of these shapes.
    """
    hidden = _non_persistent(model)
    return {name: name not in hidden for name, *_ in all_buffers(model) if name not in shapes}


def register_buffers(model: nn.Module, names: Mapping[str, bool]) -> list[str]:
    """Register, in another process, what `registered_buffers` returned; return the names that a model does not take."""
    modules, refused = dict(model.named_modules()), []
    for name, is_persistent in names.items():
        path, _, key = name.rpartition(".")
        try:
            modules[path].register_buffer(key, None, persistent=is_persistent)
        except (KeyError, AttributeError, TypeError):  # no such module; a name that it uses for something else
            refused.append(name)
    return refused


def sharing_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that share memory with an earlier one; a change of the level can end that."""
    seen, sharing = set[int](), set[str]()
    for name, buffers, key in all_buffers(model):
        if (place := 0 if (buffer := buffers[key]) is None else storage_of(buffer)) in seen - {0}:
            sharing.add(name)
        seen.add(place)
    return sharing


def separate_buffers(model: nn.Module, names: Container[str]) -> None:
    """Give buffers memory of their own."""
    for name, buffers, key in all_buffers(model):
        if name in names and (buffer := buffers[key]) is not None:
            buffers[key] = buffer.clone()


def _non_persistent(model: nn.Module) -> set[str]:
    return {f"{path}.{key}" for path, module in model.named_modules() for key in module._non_persistent_buffers_set}


def shape_of(buffer: Tensor | None) -> torch.Size | None:
    """Return the shape of a buffer that may be missing."""
    return None if buffer is None else buffer.shape


def read_saved(path: Path, *, whole: bool = True) -> tuple[int, dict[str, Any]]:
    """Return the number of steps and the extra values of a saved experiment.

    Args:
        path: The file.
        whole: Whether to read and check all of it, which takes a second for each GB.

    Raises:
        OSError: The file cannot be read.
        RunStateError: It is damaged, or holds something else.
    """
    state = read_run_state(path, whole=whole)
    steps, extra = state.get("position"), state.get("extra")
    if is_count(steps) and isinstance(extra, dict) and _is_of_the_lab(extra):
        return steps, extra
    raise RunStateError(
        f"{path} is a run state, but none that the lab saved: expected its config, faults, time and length of the log. "
        "Load it with amp.load_run_state."
    )


def _is_of_the_lab(extra: dict[str, Any]) -> bool:
    return (
        isinstance(extra.get("config"), str)
        and isinstance(extra.get("armed"), list)
        and all(fault in FAULTS for fault in extra["armed"])
        and is_number(extra.get("seconds"))
        and is_count(extra.get("log_bytes", 0))
        and isinstance(extra.get("saved", ""), str)
        and _are(is_count, extra.get("epoch", []), (0, 2))
        and _are(is_count, extra.get("accumulates_since", [0, 0]), (2,))
        and _are(lambda state: isinstance(state, dict), extra.get("schedules", []))
        and _are(lambda name: isinstance(name, str), extra.get("left_out", []))
        and isinstance(extra.get("buffers", {}), dict)
        and _are(lambda name: isinstance(name, str), extra.get("separate", []))
        and isinstance(registered := extra.get("registered", {}), dict)
        and all(isinstance(name, str) and isinstance(each, bool) for name, each in registered.items())
        and all(_is_state(extra.get(name, {})) for name in ("own", "data"))
        and is_number(extra.get("learning_rate", 0.0))
        and isinstance(digests := extra.get("digests", {}), dict)
        and all(isinstance(each, str) for each in (*digests, *digests.values()))
    )


def _is_state(state: Any) -> bool:
    return isinstance(state, dict) and all(
        isinstance(path, str) and isinstance(values, dict) and all(isinstance(name, str) for name in values)
        for path, values in state.items()
    )


def _are(is_such: Callable[[Any], bool], values: Any, lengths: Container[int] | None = None) -> bool:
    return isinstance(values, list) and (lengths is None or len(values) in lengths) and all(map(is_such, values))
