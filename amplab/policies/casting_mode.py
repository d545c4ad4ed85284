"""The function mode that carries a plan, and the per-thread list of such modes.

The hot path is one dict lookup. Everything that changes what a mode does (another engine on top of
it, disable_casts, cpu_half, explaining) swaps the dict; the lookup itself knows nothing of it.
Only the topmost mode of a thread holds a plan; those below hold an empty one, so an op is cast once. Modes
that mind one device type each hold theirs at the same time: they meet different ops.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C import _len_torch_function_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from amplab.policies.casting_plan import Plan
from amplab.policies.casting_steps import Step
from amplab.policies.decision import Explanation
from amplab.policies.half_on_cpu import DEFAULT_HALF_MODE, HalfMode
from amplab.policies.running_calls import is_running

__all__ = [
    "THREAD",
    "CastingMode",
    "insert_above_device",
    "is_pushed",
    "pop_stack",
    "push_stack",
    "remove",
    "resume_casts",
    "suspend_casts",
]

_PYTHON_METHODS = tuple(value for value in vars(torch.Tensor).values() if isinstance(value, types.FunctionType))


class CastingMode(TorchFunctionMode):
    """One entry of an engine on one thread's stack of function modes.

    Attributes:
        plan: function -> step; functions not in it run as they are.
        live: whether this is the mode that casts, for its device type.
        explanation: where steps report to while somebody explains.
    """

    def __init__(self, plans: PlanSource) -> None:
        """Hold no plan yet; `THREAD.refresh` gives one to the live mode."""
        super().__init__()
        self.plans = plans
        self.plan: Plan | _PlanOfACall = {}
        self.live = False
        self.explanation: Explanation | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` by its step, or as it is where the plan has none."""
        step = self._traced_step(func) if is_dynamo_compiling() else self.plan.get(func)
        if step is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return step(self, func, args, kwargs or {})

    def _traced_step(self, func: Callable[..., Any]) -> Step | None:
        # torch.compile compares Tensor's Python methods right with `is`, and wrongly as dict keys.
        for method in _PYTHON_METHODS:
            if func is method:
                return self.plan.get(method, None)
        return self.plan.get(func)


class PlanSource(Protocol):
    """What a mode asks for its plan; an engine is one.

    Attributes:
        device_type: the only type of device whose tensors the plan minds; None for all of them.
    """

    device_type: str | None

    def plan(self, half_mode: HalfMode, casts: bool, explained: bool) -> Plan:
        """The plan for this combination of switches."""
        ...


class _PlanOfACall:
    """The plan of a mode during a call in which nothing is cast. It replaces itself once that call has ended.

    Ops outside such calls never meet this plan, so they pay nothing for the check.
    """

    __slots__ = ("_mode", "_plan")

    def __init__(self, mode: CastingMode, plan: Plan) -> None:
        self._mode, self._plan = mode, plan

    def get(self, func: Callable[..., Any], default: Any = None) -> Any:
        """Return the step of ``func`` in the plan that is valid now."""
        if not (THREAD.suspended and is_running(THREAD.suspended[-1])):
            THREAD.refresh()
        plan = self._mode.plan
        return (self._plan if plan is self else plan).get(func, default)


class _CastingThread(threading.local):
    """What this thread has switched on, and the modes it has pushed, the live one last.

    Attributes:
        disabled: how many `disable_casts` blocks are open.
        suspended: the frames of calls in which nothing is cast, outermost first. A frame counts while it runs.
    """

    def __init__(self) -> None:
        self.modes: list[CastingMode] = []
        self.disabled = 0
        self.suspended: list[FrameType] = []
        self.half_mode: HalfMode | None = None
        self.explanation: Explanation | None = None
        self.entered: list[PlanSource] = []
        self.installed: list[CastingMode] = []

    def drop_ended_calls(self) -> None:
        """Resume casts that were suspended for a call that has raised: torch runs no hook after such a call."""
        if self.suspended and not is_running(self.suspended[-1]):
            self.refresh()

    def casts(self) -> bool:
        """Whether the modes of this thread may cast."""
        self.drop_ended_calls()
        return not (self.disabled or self.suspended)

    def refresh(self) -> None:
        """Give the live modes their plans, and every other one the empty plan."""
        if self.suspended:
            self.suspended = [frame for frame in self.suspended if is_running(frame)]
        if len(self.modes) == 1:  # a region that is entered every step
            (mode,) = self.modes
            mode.live, mode.explanation, mode.plan = True, self.explanation, self._plan(mode)
        elif self.modes:
            self._refresh_all()

    def _refresh_all(self) -> None:
        seen: set[str | None] = set()
        for mode in reversed(self.modes):
            device_type = mode.plans.device_type
            mode.live = not seen or not (device_type in seen or device_type is None or None in seen)
            mode.explanation = self.explanation
            seen.add(device_type)
        for mode in sorted(self.modes, key=lambda mode: mode.live):  # compiled ones share one place
            mode.plan = self._plan(mode) if mode.live else {}

    def live(self, device_type: str) -> PlanSource | None:
        """What decides about ops on `device_type` in this thread."""
        for mode in reversed(self.modes):
            if mode.live and mode.plans.device_type in (None, device_type):
                return mode.plans
        return None

    def _plan(self, mode: CastingMode) -> Any:
        half_mode, explained = self.half_mode or DEFAULT_HALF_MODE, self.explanation is not None
        plan = mode.plans.plan(half_mode, not (self.disabled or self.suspended), explained)
        return _PlanOfACall(mode, plan) if self.suspended and isinstance(plan, dict) else plan


THREAD = _CastingThread()


def suspend_casts(frame: FrameType) -> None:
    """Cast nothing in this thread until ``frame``, which is on the stack, has ended in any way. Sync: none."""
    THREAD.drop_ended_calls()
    THREAD.suspended.append(frame)
    THREAD.refresh()


def resume_casts(frame: FrameType) -> None:
    """Undo `suspend_casts` for ``frame``; does nothing if that has happened already. Sync: none."""
    if frame in THREAD.suspended:
        THREAD.suspended.remove(frame)
        THREAD.refresh()


def insert_above_device(mode: TorchFunctionMode) -> None:
    """Put `mode` at the bottom of this thread's stack, above the default device's context if there is one.

    Contexts entered earlier pop from the top, `with torch.device(...)` among them, so only the
    bottom is safe for a mode that leaves in no particular order. The context of set_default_device
    is the one that insists on the very bottom; it is told by what its `__enter__` keeps.
    """
    above = pop_stack()
    at_bottom = bool(above) and isinstance(above[-1], DeviceContext) and "old_device" in vars(above[-1])
    below = [above.pop()] if at_bottom else []
    push_stack([*below, mode, *reversed(above)])


def is_pushed(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is on this thread's stack; it is not while it handles a call."""
    return any(other is mode for other in _get_current_function_mode_stack())


def remove(mode: TorchFunctionMode) -> None:
    """Take `mode` out of this thread's stack, wherever it lies."""
    top = _pop_mode()
    if top is mode:
        return
    _push_mode(top)
    push_stack([other for other in reversed(pop_stack()) if other is not mode])


def pop_stack() -> list[TorchFunctionMode]:
    """Empty the stack; its modes, top first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def push_stack(modes: list[TorchFunctionMode]) -> None:
    """Push `modes`, bottom first."""
    for mode in modes:
        _push_mode(mode)
