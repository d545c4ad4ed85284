"""The forward hooks of a model: casts of its inputs and outputs, and the casting engine during its forward.

    inputs -> cast to input_dtype -> forward, under the engine -> outputs cast to output_dtype

It uses official hooks of `torch.nn.Module`. A copied model therefore runs under the same engine, and an unpickled one
under an equal engine. The weights are cast in `model_weights`; engines are in `amplab.policies`.
"""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amplab.policies import CastingEngine, cast_tree
from amplab.policies.casting.hook_scopes import HookScopes, no_graph_of_its_own

__all__ = ["ForwardHooks", "InputEdits"]


class ForwardHooks:
    """Cast the inputs and outputs of a model's forward, and run the forward under an engine.

    Args:
        input_dtype: floating-point tensors in args and kwargs are cast to it; None for no cast. Containers keep their
            type.
        output_dtype: the same for the result.
        engine: active during forward; None for no engine.
        on_cpu_only: use the engine only if the weights are on the CPU, where products are accumulated in float32.
    """

    def __init__(
        self,
        *,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        engine: CastingEngine | None,
        on_cpu_only: bool,
    ) -> None:
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.engine = engine
        self.on_cpu_only = on_cpu_only
        self._scopes = HookScopes()

    def register(self, model: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on ``model``, inside other hooks; return no handles if there is nothing to do."""
        if self.engine is None and self.input_dtype is None and self.output_dtype is None:
            return []
        return [
            model.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            model.register_forward_hook(self.after_forward, prepend=True, always_call=True),
        ]

    @no_graph_of_its_own
    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the engine, then cast the inputs."""
        engine = None if self.on_cpu_only and not _on_cpu(model) else self.engine
        self._scopes.enter(*(() if engine is None else (engine.active(),)))
        if self.input_dtype is None:
            return None
        cast = cast_tree(args, self.input_dtype), cast_tree(kwargs, self.input_dtype)
        given, received = (*args, *kwargs.values()), (*cast[0], *cast[1].values())
        if _copied(given, received):  # rarely: most inputs are tensors
            self._scopes.add(InputEdits(given, received, self._outward))
        return cast

    @no_graph_of_its_own
    def after_forward(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Leave the engine, then cast the output; torch passes None if the forward raised."""
        self._scopes.leave()
        return self._outward(output)

    def _outward(self, value: Any) -> Any:
        return value if self.output_dtype is None else cast_tree(value, self.output_dtype)

    def leave(self) -> None:
        """Leave the scopes that are still active in this thread: after an interrupt in forward no hook runs."""
        self._scopes.leave_all()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scopes": None}  # the engine pickles as its policy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _scopes=HookScopes())

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForwardHooks":
        return ForwardHooks(
            input_dtype=self.input_dtype,
            output_dtype=self.output_dtype,
            engine=self.engine,
            on_cpu_only=self.on_cpu_only,
        )


def _on_cpu(model: nn.Module) -> bool:
    first = next(model.parameters(), None)
    return first is not None and first.device.type == "cpu"


class InputEdits:
    """A context that applies to the caller's inputs all additions, changes and removals that the block makes in copies.

    It is a class because torch.compile traces no generator that is entered in one hook and left in another.

    Args:
        given: the inputs that the caller passed, nested containers.
        cast: the result of `amplab.policies.cast_tree` for them.
        outward: applied to each value that is copied to ``given``.

    Sync: none.
    """

    def __init__(self, given: Any, cast: Any, outward: Callable[[Any], Any]) -> None:
        self._outward = outward
        self._copies = [(old, new, copy.copy(old), copy.copy(new)) for old, new in _copied(given, cast)]

    def __enter__(self) -> None:
        """Begin; the copies are as they were made."""

    def __exit__(self, *_error: object) -> None:
        for old, new, old_items, new_items in self._copies:
            if isinstance(old, list):
                _carry_list(old, new, old_items, new_items, self._outward)
            else:
                _carry_mapping(old, new, new_items, self._outward)


def _copied(given: Any, cast: Any) -> list[tuple[Any, Any]]:
    """Return the mutable containers of ``given`` that were copied, each with its copy in ``cast``."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, MutableMapping):
        if cast is not given:
            pairs.append((given, cast))
            for key in given:
                pairs += _copied(given[key], cast[key])
    elif isinstance(given, list | tuple):
        if isinstance(given, list) and cast is not given:
            pairs.append((given, cast))
        for old, new in zip(given, cast, strict=True):
            pairs += _copied(old, new)
    return pairs


def _carry_mapping(
    old: MutableMapping[Any, Any],
    new: MutableMapping[Any, Any],
    before: MutableMapping[Any, Any],
    outward: Callable[[Any], Any],
) -> None:
    for key, value in new.items():
        if key not in before or value is not before[key]:
            old[key] = outward(value)
    for key in before:
        if key not in new:
            old.pop(key, None)


def _carry_list(
    old: list[Any], new: list[Any], old_items: list[Any], new_items: list[Any], outward: Callable[[Any], Any]
) -> None:
    if len(new) == len(new_items) and all(a is b for a, b in zip(new, new_items, strict=True)):
        return
    originals = {id(cast): given for cast, given in zip(new_items, old_items, strict=True)}
    old[:] = [originals[id(item)] if id(item) in originals else outward(item) for item in new]
