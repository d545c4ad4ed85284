"""The buffers of a model in training: which are not finite, and what a new model needs of them besides a state_dict.

A state_dict leaves out buffers that are not persistent, and a new model of the same code may have others: a forward
registers one, gives one its first value, another shape or another dtype, or a level separates two that shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amplab.lab.own_values import storage_of
from amplab.trace.tensor_copies import write_value

__all__ = ["ModelBuffers", "is_state_of_buffers"]

_Place = tuple[str, dict[str, Tensor | None], str]  # a name, and where the buffer is


class ModelBuffers:
    """The buffers of a model that is new.

    >>> class Norm(nn.Module):
    ...     def forward(self, x):
    ...         self.register_buffer("mean", x.mean(0), persistent=False)
    >>> norm, other = Norm(), Norm()
    >>> buffers, of_other = ModelBuffers(norm), ModelBuffers(other)
    >>> norm(torch.ones(3, 2))
    >>> of_other.load(buffers.state()), other.mean
    ([], tensor([1., 1.]))
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shapes = {name: _shape_of(buffers[key]) for name, buffers, key in _places(model)}
        self._dtypes: dict[str, torch.dtype] = {}  # as the level has made them
        self._retyped = set[str]()  # by the run, at earlier levels
        self._sharing = _sharing(model)
        self._nonfinite = frozenset(_nonfinite(model))

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names of buffers that hold NaN or inf; not of those that did when new, as a mask. Sync: one."""
        return tuple(name for name in _nonfinite(self._model) if name not in self._nonfinite)

    def begin_level(self) -> None:
        """A level has given the buffers their dtypes: from now on another one comes from the run."""
        self._dtypes = {
            name: each.dtype for name, buffers, key in _places(self._model) if (each := buffers[key]) is not None
        }

    def end_level(self) -> None:
        """Another level is about to give them its own."""
        self._retyped = self._retyped_by_run()

    def _retyped_by_run(self) -> set[str]:
        now = {name: buffers[key] for name, buffers, key in _places(self._model)}
        return self._retyped | {
            name for name, each in now.items() if each is not None and self._dtypes.get(name, each.dtype) != each.dtype
        }

    def state(self) -> dict[str, Any]:
        """Return what a new model needs besides the state_dict of this one."""
        hidden = {
            f"{path}.{key}" for path, each in self._model.named_modules() for key in each._non_persistent_buffers_set
        }
        now = {name: buffers[key] for name, buffers, key in _places(self._model)}
        kept = hidden | (retyped := self._retyped_by_run())
        is_needed = {name: name in kept or self._shapes.get(name) != _shape_of(each) for name, each in now.items()}
        return {
            "buffers": {name: each for name, each in now.items() if is_needed[name]},
            "registered": {name: name not in hidden for name in now if name not in self._shapes},
            "gone": {name: name not in now for name, shape in self._shapes.items() if shape and now.get(name) is None},
            "retyped": sorted(retyped & now.keys()),
            "separate": sorted(self._sharing - _sharing(self._model)),
        }

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Take over what `state` returned for another model; return the names of buffers that this one cannot have.

        Call it before the state_dict is loaded.
        """
        refused = [
            name
            for name, is_persistent in state.get("registered", {}).items()
            if not self._register(name, is_persistent)
        ]
        for name, buffers, key in [*_places(self._model)]:
            if name in state.get("gone", {}):
                buffers[key] = None
                if state["gone"][name]:
                    del buffers[key]
        values, separate, retyped = state.get("buffers", {}), state.get("separate", ()), state.get("retyped", ())
        device = next((each.device for each in self._model.parameters()), None)
        for name, buffers, key in _places(self._model):
            value, own = values.get(name), buffers[key]
            if name in separate and own is not None:
                own = buffers[key] = own.clone()
            if not isinstance(value, Tensor):
                continue
            if own is None or own.shape != value.shape or (name in retyped and own.dtype != value.dtype):
                buffers[key] = value.to(device if own is None else own.device, copy=True)
            else:
                write_value(own, value)
        return refused

    def _register(self, name: str, is_persistent: bool) -> bool:
        path, _, key = name.rpartition(".")
        try:
            self._model.get_submodule(path).register_buffer(key, None, persistent=is_persistent)
        except (KeyError, AttributeError):  # no such module, or a name that it has for something else
            return False
        return True


def is_state_of_buffers(state: Mapping[str, Any]) -> bool:
    """Whether values of a file have the types of `ModelBuffers.state`; older files have less."""
    registered, named = state.get("registered", {}), (state.get("separate", []), state.get("retyped", []))
    return (
        isinstance(state.get("buffers", {}), dict)
        and isinstance(registered, dict)
        and all(isinstance(name, str) and isinstance(each, bool) for name, each in registered.items())
        and isinstance(state.get("gone", {}), dict)
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in named)
    )


def _places(model: nn.Module) -> Iterator[_Place]:
    for path, module in model.named_modules():
        for key in module._buffers:
            yield f"{path}.{key}", module._buffers, key


def _shape_of(buffer: Tensor | None) -> torch.Size | None:
    return None if buffer is None else buffer.shape


def _sharing(model: nn.Module) -> set[str]:
    """Return the names of buffers that share memory with an earlier one."""
    seen, sharing = {0}, set[str]()
    for name, buffers, key in _places(model):
        storage = 0 if (buffer := buffers[key]) is None else storage_of(buffer)
        if storage and storage in seen:
            sharing.add(name)
        seen.add(storage)
    return sharing


def _nonfinite(model: nn.Module) -> tuple[str, ...]:
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    return tuple(name for name, buffer in buffers if not torch.isfinite(buffer).all())
