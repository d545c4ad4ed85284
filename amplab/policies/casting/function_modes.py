"""The function modes of amplab, and the stack of function modes of a thread.

A mode looks up each op in its plan. Everything that changes what a mode does replaces the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._dynamo import eval_frame
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.plan import NO_PLAN, torch_nesting
from amplab.policies.tables.called_op import OF_TORCH, called_op

if TYPE_CHECKING:
    from amplab.policies.casting.engine import CastingEngine

__all__ = [
    "CastingMode",
    "OwnMode",
    "ScopeMode",
    "function_modes",
    "insert_above_device",
    "push_below_devices",
    "push_below_others",
    "remove",
    "set_function_modes",
    "without_function_modes",
]


class OwnMode(TorchFunctionMode):
    """A function mode that `CastingThread.withdraw` takes off the stack of a thread.

    Attributes:
        withdrawn: whether it has been taken off.
    """

    withdrawn = False


class ScopeMode(OwnMode):
    """A function mode that a scope puts on the stack of a thread."""

    def run_inside(self, inside: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `inside(*args, **kwargs)`, computed with this mode on the stack while it handles the call."""
        if is_dynamo_compiling():
            with self:
                return inside(*args, **kwargs)
        modes = function_modes()
        try:  # not `with self`, which takes off the topmost mode: an interrupted op may have lost a mode
            _push_on_torch_function_stack(self)
            return inside(*args, **kwargs)
        finally:
            set_function_modes(modes)


class CastingMode(ScopeMode, PreDispatchTorchFunctionMode):
    """One entry of an engine on one thread's stack of function modes.

    By its base class, regions of torch.autocast inside it are reported to it (see `torch_regions`).

    Attributes:
        engine: the engine whose plan the mode carries.
        plan: function -> step; a function without a step runs as it is.
        live: whether this is the mode that casts, for its device type.
        explanation: where steps report to while somebody reads explanations.
        watched, places: those of the innermost scope: it may have ended if `watched` executes another instruction.
        has_ended: called before each op: whether a call in which casts are disabled has ended; None outside of one.
        keeps_flag: False: `AUTOCAST_FLAG` is set only while the lists cast.
        torch_nesting: `torch_nesting()` when the mode was made or got the last report of a region of torch.autocast.
    """

    live = keeps_flag = False
    explanation: Explanation | None = None
    watched: FrameType | None = None
    places: frozenset[int] = frozenset()
    has_ended: Callable[[], bool] | None = None

    def __init__(self, engine: CastingEngine) -> None:
        """Start with an empty plan; `CastingThread.give_plans` gives a plan to the live mode."""
        self.engine = engine  # TorchFunctionMode has no state of its own
        self.plan = NO_PLAN
        self.torch_nesting = torch_nesting()

    def rest(self) -> None:
        """Cast nothing until the next plan."""
        self.plan, self.has_ended, self.watched = NO_PLAN, None, None

    def is_handling(self) -> bool:
        """Whether the calling thread runs a call that this mode handles; torch takes it off the stack meanwhile."""
        caller: FrameType | None = _getframe(1)
        while caller is not None:
            if caller.f_code is _HANDLER and caller.f_locals["self"] is self:
                return True
            caller = caller.f_back
        return False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the step of `func`, or `func` itself if the plan has no step for it."""
        try:
            if is_dynamo_compiling():
                step = self.plan.traced_step(func, self.torch_nesting)
            else:
                watched, has_ended = self.watched, self.has_ended
                if (watched is not None and watched.f_lasti not in self.places) or (
                    has_ended is not None and has_ended()
                ):
                    self.engine.drop_ended_scopes()
                    watched = has_ended = None  # frees the frame of an interrupted call: it may hold a region
                step = self.plan.get(func)
                if step is None and type(func) not in OF_TORCH:
                    func = called_op(func, _getframe(1))
                    step = self.plan.get(func)
            if step is None:
                result = func(*args, **kwargs) if kwargs else func(*args)
                return result  # noqa: RET504  where an interrupt after the call is caught
        except BaseException:
            if func is torch._C._set_grad_enabled and not is_dynamo_compiling():
                _finish_grad_mode(_getframe(1), args)  # an interrupt of these lines must not leave it off
            raise
        return step(self, func, args, kwargs or {})


_HANDLER = CastingMode.__torch_function__.__code__


def _finish_grad_mode(caller: FrameType | None, args: tuple[Any, ...]) -> None:
    """Set grad mode as after a block of `torch.no_grad` that an interrupt ends, or keeps from beginning."""
    first = caller
    while caller is not None and caller.f_code.co_filename == _GRAD_MODE:
        if caller.f_code.co_name == "__exit__":
            torch._C._set_grad_enabled(*args)
            return
        caller = caller.f_back
    if first is not None and first is not caller:
        torch._C._set_grad_enabled(first.f_locals["self"].prev)


_GRAD_MODE = torch.no_grad.__exit__.__code__.co_filename

# torch.compile traces the casts as a part of a graph. Between graphs it must not trace them as one of their own: there
# it takes the dtype that `tensor.dtype` returns for an integer.
eval_frame.set_code_exec_strategy(
    _HANDLER,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT),
)


def function_modes() -> list[TorchFunctionMode]:
    """Return this thread's stack of function modes, bottom first. A mode is not on it while it handles a call."""
    return [_get_function_stack_at(place) for place in range(_len_torch_function_stack())]


def insert_above_device(mode: TorchFunctionMode) -> None:
    """Put `mode` at the bottom of this thread's stack, above the default device's context if there is one.

    Open contexts pop from the top when they close, so a mode that may be removed at any time must be at the bottom.
    Only the context of set_default_device, which has the attribute `old_device`, must be below it.
    """
    modes = function_modes()
    place = _place_above_device(modes)
    set_function_modes([*modes[:place], mode, *modes[place:]])


def push_below_others(mode: TorchFunctionMode) -> None:
    """Put `mode` on top of the modes of scopes at the bottom of this thread's stack, below the modes of others.

    Those pop from the top when they close, perhaps before a scope that `outlasts` them ends.
    """
    _push_at(mode, _place_above_scopes)


def push_below_devices(mode: TorchFunctionMode) -> None:
    """Put `mode` on top of this thread's stack, below the blocks of `torch.device` there.

    They change other functions than a mode that casts, so ops run as with `mode` on top. But at its end each pops the
    topmost mode, whichever it is, and an interrupt may have left `mode`.
    """
    _push_at(mode, _place_below_devices)


def _push_at(mode: TorchFunctionMode, find: Callable[[list[TorchFunctionMode]], int]) -> None:
    if _len_torch_function_stack() and not is_dynamo_compiling():
        modes = function_modes()
        place = find(modes)
        if place < len(modes):
            set_function_modes([*modes[:place], mode, *modes[place:]])
            return
    _push_on_torch_function_stack(mode)


def _place_above_scopes(modes: list[TorchFunctionMode]) -> int:
    place = _place_above_device(modes)
    while place < len(modes) and isinstance(modes[place], ScopeMode):
        place += 1
    return place


def _place_below_devices(modes: list[TorchFunctionMode]) -> int:
    place, lowest = len(modes), _place_above_device(modes)
    while place > lowest and isinstance(modes[place - 1], DeviceContext):
        place -= 1
    return place


def _place_above_device(modes: list[TorchFunctionMode]) -> int:
    return 1 if modes and isinstance(modes[0], DeviceContext) and "old_device" in vars(modes[0]) else 0


def remove(mode: TorchFunctionMode) -> bool:
    """Remove `mode` from this thread's stack, at any depth, and return whether it was there."""
    depth = top = _len_torch_function_stack()
    while top and _get_function_stack_at(top - 1) is mode:
        _pop_torch_function_stack()
        top -= 1
    if top < depth:
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


def without_function_modes() -> AbstractContextManager[Any]:
    """Return a context manager under which no function mode sees an op, for code that is not part of the model.

    As ``torch._C.DisableTorchFunction()``, which stays on if a trace function, such as a debugger's, raises where the
    block ends: this one ends when the frame with the block does, at the latest.
    """
    guard = torch._C.DisableTorchFunction()
    if is_dynamo_compiling() or not torch._C._is_torch_function_enabled():
        return guard  # they are disabled already, by a block that will enable them
    block, end = _Block(), _End()
    block.__enter__, block.__exit__ = guard.__enter__, end
    end.__call__ = end.__del__ = guard.__exit__
    return block


class _Block:
    """What a `with` statement enters: it calls functions written in C, in which no interrupt can come."""

    __slots__ = ("__enter__", "__exit__")
    __enter__: Any
    __exit__: Any


class _End:
    """The end of a block. The frame drops it when it leaves the block in any way, and it runs then if it has not."""

    __slots__ = ("__call__", "__del__")
    __call__: Any
    __del__: Any
