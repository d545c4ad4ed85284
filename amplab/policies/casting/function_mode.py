"""The function mode that carries a plan, and the stack of function modes of a thread.

The hot path is one dict lookup. Everything that changes what a mode does (another engine above it, disable_casts,
cpu_half, explaining) replaces the dict. Which mode of a thread holds which plan is decided in `thread_scopes`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.steps import Step

if TYPE_CHECKING:
    from amplab.policies.casting.engine import CastingEngine
    from amplab.policies.casting.thread_scopes import Scope

__all__ = ["CastingMode", "function_modes", "insert_above_device", "remove", "set_function_modes"]

_PYTHON_METHODS = tuple(value for value in vars(torch.Tensor).values() if isinstance(value, types.FunctionType))


class CastingMode(TorchFunctionMode):
    """One entry of an engine on one thread's stack of function modes.

    Attributes:
        engine: the engine whose plan the mode carries.
        plan: function -> step; a function without a step runs as it is.
        live: whether this is the mode that casts, for its device type.
        explanation: where steps report to while somebody reads explanations.
        withdrawn: whether its engine has taken it off.
        entered_by: the scope that a hook has entered the mode with; None for a mode that a block has entered.
        has_ended: called before each op: whether a scope that the plan depends on has ended; None where none can.
    """

    live = withdrawn = False
    explanation: Explanation | None = None
    entered_by: Scope | None = None
    has_ended: Callable[[], bool] | None = None

    def __init__(self, engine: CastingEngine) -> None:
        """Start with an empty plan; `CastingThread.give_plans` gives a plan to the live mode."""
        self.engine = engine  # TorchFunctionMode has no state of its own
        self.plan: Mapping[Callable[..., Any], Step] = {}

    def rest(self) -> None:
        """Cast nothing until the next plan."""
        self.plan, self.has_ended = {}, None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` by its step, or as it is where the plan has none."""
        if is_dynamo_compiling():
            step = self._traced_step(func)
        else:
            has_ended = self.has_ended
            if has_ended is not None and has_ended():
                self.engine.drop_ended_scopes()
            step = self.plan.get(func)
        if step is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return step(self, func, args, kwargs or {})

    def _traced_step(self, func: Callable[..., Any]) -> Step | None:
        # torch.compile compares Tensor's Python methods right with `is`, and wrongly as dict keys.
        for method in _PYTHON_METHODS:
            if func is method:
                return self.plan.get(method)
        return self.plan.get(func)


def function_modes() -> list[TorchFunctionMode]:
    """Return this thread's stack of function modes, bottom first. A mode is not on it while it handles a call."""
    return [_get_function_stack_at(place) for place in range(_len_torch_function_stack())]


def insert_above_device(mode: TorchFunctionMode) -> None:
    """Put `mode` at the bottom of this thread's stack, above the default device's context if there is one.

    Contexts that are open now pop from the top when they close, so only the bottom is safe for a mode that is removed
    at any time. The context of set_default_device must be at the very bottom. It is the one that keeps `old_device`.
    """
    modes = function_modes()
    place = 1 if modes and isinstance(modes[0], DeviceContext) and "old_device" in vars(modes[0]) else 0
    set_function_modes([*modes[:place], mode, *modes[place:]])


def remove(mode: TorchFunctionMode) -> bool:
    """Take `mode` out of this thread's stack, wherever it is, and return whether it was there."""
    depth = _len_torch_function_stack()
    if depth and _get_function_stack_at(depth - 1) is mode:
        _pop_torch_function_stack()
        return True
    modes = function_modes()
    others = [other for other in modes if other is not mode]
    if len(others) < len(modes):
        set_function_modes(others)
    return len(others) < len(modes)


def set_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Make `modes`, bottom first, this thread's stack of function modes."""
    try:
        _replace_stack(modes)
    except BaseException:  # an interrupt must not lose the modes of others
        _replace_stack(modes)
        raise


def _replace_stack(modes: list[TorchFunctionMode]) -> None:
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in modes:
        _push_on_torch_function_stack(mode)
