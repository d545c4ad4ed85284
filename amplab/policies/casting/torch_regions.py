"""Regions of torch.autocast inside amplab's: where one is disabled, amplab casts nothing either.

Libraries keep code in float32 with ``torch.autocast(device_type, enabled=False)``. torch.autocast reports that it is
entered and left to function modes of the class `PreDispatchTorchFunctionMode`, for torch.export. `CastingMode` is one,
and every plan has a step for these reports. There is no report to the modes that torch.compile traces, nor to the
kernel of compiled engines: they compare torch's nesting count with that at which their engine was entered.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from amplab.policies.casting.casting_state import CastingState, casting_state
from amplab.policies.casting.function_modes import CastingMode, function_modes, remove
from amplab.policies.casting.plan import torch_nesting
from amplab.policies.casting.thread_scopes import THREAD, Scope, casting_engine

if TYPE_CHECKING:
    from amplab.policies.casting.engine import CastingEngine

__all__ = ["meet_torch_region"]

_RESTORING = {
    "torch.utils.checkpoint": ("recompute_fn", "backward"),
    "torch.amp.autocast_mode": ("decorate_bwd",),
    "torch.nn.parallel.parallel_apply": ("_worker",),
}
"""Functions of torch, by module, that enter torch's autocast state of an earlier call. They disable nothing."""


def meet_torch_region(
    mode: CastingMode, func: Callable[..., Any], args: tuple[Any, ...], uncast: Callable[[str], CastingEngine]
) -> Any:
    """Run the step of torch.amp._enter_autocast or _exit_autocast: follow a region of torch.autocast.

    Args:
        mode: the mode that got the report.
        func: one of the two functions.
        args: device type, dtype, enabled and cache_enabled of a region that is entered.
        uncast: device type -> the engine that casts nothing there.
    """
    is_exit = func is torch.amp.autocast_mode._exit_autocast
    if args if is_exit else mode not in function_modes():  # a traced graph calls `func`: it is no report
        return func(*args)
    if mode.withdrawn:  # an interrupt has ended its call, so that this region is not inside of it
        remove(mode)
        others = (each for each in function_modes() if isinstance(each, PreDispatchTorchFunctionMode))
        following = next(others, None)
        if following is not None:  # torch reports to the first one alone; torch.export needs the report
            return following.__torch_function__(func, (), args)
    nesting = torch_nesting()
    if is_exit:
        _leave_above(int(nesting))
    elif not args[2] and (casting_engine(args[0]) is not None or not THREAD.own.modes):
        _enter_disabled(uncast(args[0]), int(nesting))
    for each in THREAD.own.modes:
        if isinstance(each, CastingMode):
            each.torch_nesting = nesting
    return None


def _enter_disabled(engine: CastingEngine, nesting: int) -> None:
    frame = _frame_with_region()
    if frame.f_code.co_name in _RESTORING.get(frame.f_globals.get("__name__", ""), ()):
        return
    thread = THREAD.own
    scope = Scope(engine)
    if not thread.modes:  # autograd hands function modes to its threads, and not THREAD
        around = casting_state()
        scope = CastingState((*around.engines, engine), around.disabled, around.half_mode).active()
    thread.torch_regions.append((nesting, scope))
    scope.enter(frame)


def _leave_above(nesting: int) -> None:
    regions = THREAD.own.torch_regions
    while regions and regions[-1][0] > nesting:
        regions.pop()[1].leave()


def _frame_with_region() -> FrameType:
    """The frame that enters the region, above the methods `__enter__` of torch.autocast and its subclasses."""
    frame = _getframe(1)
    inside = False
    while not inside or frame.f_code.co_name == "__enter__":
        inside = inside or frame.f_code.co_name == "__enter__"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame
