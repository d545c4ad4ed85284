"""The casting state of a thread: its open scopes, its function modes, and the plan that each mode gets from them.

A scope is one entry into something that changes how the ops of a thread are cast: an engine, `disable_casts`,
`cpu_half`, `explaining`. It ends with its block, or, if a hook enters it, with the call that the hook belongs to.

The code at either end may not run: torch skips the hook after a call that is interrupted, and an interrupt may come
before the first line of `__exit__`. Therefore every scope stores the frame that it ends with, and has ended when that
frame no longer runs. `CastingThread.drop_ended` removes such scopes: whenever scopes are entered, left or read, and
before each op while casts are disabled or while a hook's engine casts. Other ops have no overhead.

A mode looks up each op in its plan. Everything that changes what a mode does replaces the plan.
"""

from __future__ import annotations

import copy
import functools
import inspect
import opcode
import threading
from collections.abc import Callable
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
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.half_on_cpu import DEFAULT_HALF_MODE, HalfMode
from amplab.policies.casting.plan import NO_PLAN

if TYPE_CHECKING:
    from amplab.policies.casting.compiled_engine import CompiledMode
    from amplab.policies.casting.engine import CastingEngine

__all__ = [
    "AUTOCAST_FLAG",
    "CastingMode",
    "CastingThread",
    "Scope",
    "THREAD",
    "casting_engine",
    "engine_at_work",
    "casts_enabled",
    "cpu_half",
    "cpu_half_mode",
    "disable_casts",
    "explaining",
    "function_modes",
    "insert_above_device",
    "is_running",
    "remove",
    "resume_casts",
    "set_function_modes",
    "suspend_casts",
    "thread_engines",
]

AUTOCAST_FLAG = "ipu"
"""The device type whose autocast flag is set while an engine casts: torch has no casts for it, and no tensor is on it.

`nn.RNN`, `nn.LSTM` and `nn.GRU` refuse an input whose dtype is not that of the weights, unless torch says that an
autocast is on for some device type. The kernel of compiled engines has its key.
"""

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_running(frame: FrameType) -> bool:
    """Return whether `frame` is on the stack of the calling thread. The time is proportional to the frames above it."""
    return _leads_to(frame, _getframe(1))


def _leads_to(frame: FrameType, caller: FrameType | None) -> bool:
    while caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False


class Scope:
    """A block or a call that changes how a thread casts. Enter an instance once; it also decorates functions.

    Args:
        engine: the engine that casts inside.
        disables: whether no engine casts inside.
        half_mode: how CPU halves are multiplied inside; None for no change.
        explanation: the explanation that steps report to inside; None for no change.

    Attributes:
        mode: the mode that the engine has pushed; None if the engine was casting already.
        frame: the frame that the scope ends with; None if it ends only with `leave`.
        by_hook: whether a hook has entered the scope for the length of a call.
    """

    mode: CastingMode | CompiledMode | None = None
    frame: FrameType | None = None
    by_hook = False
    _thread: CastingThread | None = None
    _outer: _Switches | None = None
    _left = False
    _caller: FrameType | None = None
    _place = 0
    _depth = 2

    def __init__(
        self,
        engine: CastingEngine | None = None,
        *,
        disables: bool = False,
        half_mode: HalfMode | None = None,
        explanation: Explanation | None = None,
    ) -> None:
        self.engine, self.disables, self.half_mode, self.explanation = engine, disables, half_mode, explanation

    def __enter__(self) -> Any:
        """Enter, until the block ends."""
        return self.enter(None if is_dynamo_compiling() else _getframe(1))

    def __exit__(self, *_error: object) -> None:
        self.leave()

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return `func` with its body inside the scope."""

        @functools.wraps(func)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with copy.copy(self):
                return func(*args, **kwargs)

        return inside

    def enter(self, frame: FrameType | None, *, by_hook: bool = False) -> Any:
        """Enter, until `leave` or until `frame` ends.

        Args:
            frame: the frame with the `with` statement; for a hook, the frame that runs the call. A generator does not
                count, since its frame does not run while the code around it does.
            by_hook: whether a hook enters the scope for the length of a call.
        """
        if by_hook and frame is not None:
            self.frame, self.by_hook, self._caller = frame, True, frame.f_back
            self._place = -1 if self._caller is None else self._caller.f_lasti
        elif frame is not None and not frame.f_code.co_flags & _SUSPENDABLE:
            self.frame, self._place = frame, frame.f_lasti
        try:
            thread = self._thread = THREAD.own
            if thread.scopes or thread.may_be_pushed_again:
                thread.drop_ended(frame)
            self._begin(thread)
        except BaseException:
            self.leave()
            raise
        return self.explanation

    def leave(self) -> None:
        """Leave; does nothing if the scope has ended already. Scopes may end in any order.

        If another thread calls it, for example because the garbage collector closes a generator there, the scope ends
        at the next call of amplab in its own thread.
        """
        self._left = True
        thread = self._thread
        if thread is None:
            return
        if thread is not THREAD.own:
            thread.left_elsewhere = True
            return
        try:
            self._end(thread)
        except BaseException:  # an interrupt; finish anyway
            self._end(thread)
            raise

    def has_ended(self) -> bool:
        """Whether the frame that this scope ends with no longer runs."""
        if self._left or self.frame is None or is_running(self.frame):
            return self._left
        if self.by_hook or _is_with_statement(self.frame, self._place):
            return True
        self.frame = None  # entered by a call, such as ExitStack.enter_context: its end is not that of the frame
        return False

    def has_ended_before_op(self) -> bool:
        """As `has_ended`, for `CastingMode.__torch_function__`: first checks the depth at which the frame was last."""
        try:
            if _getframe(self._depth) is self.frame:
                return False
        except ValueError:  # the stack is not that deep
            pass
        if self.frame is None:
            return self._left
        depth = 2
        caller: FrameType | None = _getframe(depth)
        while caller is not None:
            if caller is self.frame:
                self._depth = depth
                return False
            depth, caller = depth + 1, caller.f_back
        return self.has_ended()

    def seems_ended(self) -> bool:
        """Whether the call has certainly ended, because its caller executes another instruction.

        torch's module call handles exceptions, so it continues after each call. A walk along the stack before each op
        would take about 1 us; this takes 0.1 us.
        """
        return self._caller is not None and self._caller.f_lasti != self._place

    def _begin(self, thread: CastingThread) -> None:
        thread.scopes.append(self)
        engine = self.engine
        if engine is not None and not engine.is_live():
            self.mode = mode = engine.new_mode()
            if self.by_hook:
                mode.entered_by = self
            engine.push(mode)
        self.apply(thread)
        if self.mode is not None or engine is None:
            thread.give_plans()

    def apply(self, thread: CastingThread) -> None:
        """Set the switches of `thread` for this scope, and store their previous values."""
        self._outer = thread.modes, thread.disabled, thread.half_mode, thread.explanation
        if self.mode is not None:
            thread.modes = (*thread.modes, self.mode)
        if self.disables:
            thread.disabled = (*thread.disabled, self)
        if self.half_mode is not None:
            thread.half_mode = self.half_mode
        if self.explanation is not None:
            thread.explanation = self.explanation

    def _end(self, thread: CastingThread) -> None:
        scopes, mode, engine = thread.scopes, self.mode, self.engine
        if mode is not None:
            mode.engine.withdraw(mode)
        if scopes and scopes[-1] is self and self._outer is not None:
            scopes.pop()
            thread.modes, thread.disabled, thread.half_mode, thread.explanation = self._outer
            if mode is not None or engine is None:
                thread.give_plans()
        else:
            if self in scopes:
                scopes.remove(self)
            thread.refresh()
        if engine is None:
            return
        for scope in scopes:
            if scope.engine is engine:
                return
        engine.clear_cache()


def _is_with_statement(frame: FrameType, place: int) -> bool:
    code = frame.f_code.co_code
    return 0 <= place < len(code) and opcode.opname[code[place]] == "BEFORE_WITH"


_Modes = tuple["CastingMode | CompiledMode", ...]
_Switches = tuple[_Modes, tuple[Scope, ...], HalfMode | None, Explanation | None]


class CastingThread:
    """The open scopes of a thread, and the switches that they set.

    Attributes:
        scopes: the scopes that are open, in the order in which they were entered.
        installed: the modes of installed engines, the topmost one last.
        modes: the modes of installed engines, then those of the scopes; the last one casts.
        disabled: the scopes in which no engine casts.
        half_mode: how CPU halves are multiplied; None for the default.
        explanation: the explanation that steps report to; None if explanations are not requested.
        may_be_pushed_again: whether a mode that its engine has withdrawn may still be on the stack of function modes.
        left_elsewhere: whether another thread has left one of the scopes.
        flagged: whether `AUTOCAST_FLAG` is set.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.installed: list[CastingMode | CompiledMode] = []
        self.modes: _Modes = ()
        self.disabled: tuple[Scope, ...] = ()
        self.half_mode: HalfMode | None = None
        self.explanation: Explanation | None = None
        self.may_be_pushed_again = self.left_elsewhere = self.flagged = False

    def drop_ended(self, caller: FrameType | None = None) -> None:
        """Leave the scopes whose frame no longer runs, since their own exit has not run.

        Args:
            caller: a running frame at which the search begins; by default the caller of the calling function.
        """
        if (not self.scopes and not self.may_be_pushed_again) or is_dynamo_compiling():
            return
        if not (self.may_be_pushed_again or self.left_elsewhere):
            last = self.scopes[-1]
            above = caller or _getframe(1).f_back
            if last.frame is not None and not last.by_hook and _leads_to(last.frame, above):
                return  # a block runs: the frames of earlier scopes, which call its frame, run too
        self.left_elsewhere = False
        for scope in [scope for scope in reversed(self.scopes) if scope.has_ended()]:
            scope.leave()
        if self.may_be_pushed_again:
            for mode in [mode for mode in function_modes() if isinstance(mode, CastingMode) and mode.withdrawn]:
                remove(mode)
                self.may_be_pushed_again = False

    def refresh(self) -> None:
        """Set all switches again from the open scopes, after scopes have not ended in order."""
        self.modes, self.disabled, self.half_mode, self.explanation = tuple(self.installed), (), None, None
        for scope in self.scopes:
            scope.apply(self)
        self.give_plans()

    def give_plans(self) -> None:
        """Give the live modes their plans, and every other mode the empty plan.

        Only the topmost mode casts, so that an op is cast once; modes with a device type each meet different ops.
        """
        modes = self.modes
        if len(modes) == 1:  # a region that is entered in every step
            self._give_plan(modes[0])
        elif modes:
            self._share_plans(modes)
        self._set_flag()

    def _share_plans(self, modes: _Modes) -> None:
        seen: set[str | None] = set()
        live: list[CastingMode | CompiledMode] = []
        for mode in reversed(modes):
            device_type = mode.engine.device_type
            if seen and (device_type in seen or device_type is None or None in seen):
                mode.live = False
                mode.rest()  # before the live ones: the modes of compiled engines share one place
            else:
                live.append(mode)
            seen.add(device_type)
        for mode in live:
            self._give_plan(mode)

    def _give_plan(self, mode: CastingMode | CompiledMode) -> None:
        mode.live, mode.explanation = True, self.explanation
        mode.engine.give_plan(
            mode, self.half_mode or DEFAULT_HALF_MODE, len(self.disabled) == 0, self.explanation is not None
        )
        mode.has_ended = None if mode.entered_by is None else mode.entered_by.seems_ended
        for scope in self.disabled:
            if scope.frame is not None:
                mode.has_ended = scope.has_ended_before_op

    def _set_flag(self) -> None:
        wanted = False
        for mode in self.modes:
            if mode.live and (mode.keeps_flag or (mode.engine.policy.table is not None and not self.disabled)):
                wanted = True
                break
        if wanted is self.flagged:
            return
        self.flagged = wanted
        if not wanted and not is_dynamo_compiling() and _len_torch_function_stack():
            # autograd hands function modes and torch's flags to its threads, and not THREAD
            wanted = not self.modes and any(map(_casts, function_modes()))
        torch.set_autocast_enabled(AUTOCAST_FLAG, wanted)


def _casts(mode: TorchFunctionMode) -> bool:
    return isinstance(mode, CastingMode) and mode.live and mode.engine.policy.table is not None


class _Threads(threading.local):
    """The `CastingThread` of each thread. Look it up once: that takes as long as many reads of its attributes."""

    def __init__(self) -> None:
        self.own = CastingThread()


THREAD = _Threads()


def suspend_casts(frame: FrameType) -> None:
    """Cast nothing in this thread until the call that `frame` runs has ended, even by an exception. Sync: none."""
    Scope(disables=True).enter(frame, by_hook=True)


def resume_casts(frame: FrameType) -> None:
    """Undo `suspend_casts` for `frame`; a second call does nothing. Sync: none."""
    for scope in [scope for scope in THREAD.own.disabled if scope.by_hook and scope.frame is frame]:
        scope.leave()


def disable_casts() -> Scope:
    """Return a context manager under which no engine of this thread casts, even if it is entered inside. It nests.

    Products of CPU halves are still computed as `cpu_half_mode()` says. Sync: none.
    """
    return Scope(disables=True)


def casts_enabled() -> bool:
    """Whether engines of this thread may cast: no `disable_casts` block is open, and no optimizer step is running."""
    thread = THREAD.own
    thread.drop_ended()
    return not thread.disabled


def cpu_half(mode: HalfMode) -> Scope:
    """Return a context manager that sets how engines of this thread multiply CPU halves.

    Args:
        mode: "fp32_accumulate" (float32 products and sums, one rounding) or "native" (the CPU's half kernel).

    Raises:
        ValueError: `mode` is neither.
    """
    if mode not in ("fp32_accumulate", "native"):
        raise ValueError(
            f"cpu_half({mode!r}): expected 'fp32_accumulate' or 'native'; "
            "use 'fp32_accumulate' on a CPU without fp16 arithmetic."
        )
    return Scope(half_mode=mode)


def cpu_half_mode() -> HalfMode:
    """How this thread multiplies CPU halves: the innermost `cpu_half`, else the default for this CPU."""
    THREAD.own.drop_ended()
    return THREAD.own.half_mode or DEFAULT_HALF_MODE


def explaining() -> Scope:
    """Return a context manager that yields an Explanation, whose `.decision` is that about the current op.

    A block inside another yields the same Explanation. Ops outside the block have no overhead.

    Raises:
        RuntimeError: an engine that gives no reasons is active (`CompiledEngine`).
    """
    for engine in thread_engines():
        engine.require_reasons()
    return Scope(explanation=THREAD.own.explanation or Explanation())


def thread_engines() -> tuple[CastingEngine, ...]:
    """The engines that are active in the calling thread, outermost first; the last one casts."""
    THREAD.own.drop_ended()
    return tuple(mode.engine for mode in THREAD.own.modes)


def engine_at_work() -> tuple[CastingEngine | None, bool]:
    """The innermost engine of the calling thread, and whether it may cast, for the op that runs now.

    For code that reads this at every op: unlike `thread_engines` and `casts_enabled`, it does not search for scopes
    that have ended.
    """
    thread = THREAD.own
    return (thread.modes[-1].engine if thread.modes else None), not thread.disabled


def casting_engine(device_type: str) -> CastingEngine | None:
    """The engine that casts ops on `device_type`, e.g. "cpu", in the calling thread; None if there is none."""
    thread = THREAD.own
    thread.drop_ended()
    for mode in reversed(thread.modes):
        if mode.live and mode.engine.device_type in (None, device_type):
            return mode.engine
    return None


# -- the function modes of a thread ------------------------------------------------------------


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
        keeps_flag: False: `AUTOCAST_FLAG` is set only while the lists cast.
    """

    live = withdrawn = keeps_flag = False
    explanation: Explanation | None = None
    entered_by: Scope | None = None
    has_ended: Callable[[], bool] | None = None

    def __init__(self, engine: CastingEngine) -> None:
        """Start with an empty plan; `CastingThread.give_plans` gives a plan to the live mode."""
        self.engine = engine  # TorchFunctionMode has no state of its own
        self.plan = NO_PLAN

    def rest(self) -> None:
        """Cast nothing until the next plan."""
        self.plan, self.has_ended = NO_PLAN, None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the step of `func`, or `func` itself if the plan has no step for it."""
        if is_dynamo_compiling():
            step = self.plan.traced_step(func)
        else:
            has_ended = self.has_ended
            if has_ended is not None and has_ended():
                self.engine.drop_ended_scopes()
            step = self.plan.get(func)
        if step is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return step(self, func, args, kwargs or {})


if hasattr(eval_frame, "_FrameExecStrategy"):  # since torch 2.7
    # torch.compile traces the casts as a part of a graph. Between graphs it must not trace them as one of their own:
    # there it takes the dtype that `tensor.dtype` returns for an integer.
    eval_frame.set_code_exec_strategy(
        CastingMode.__torch_function__.__code__,
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
    place = 1 if modes and isinstance(modes[0], DeviceContext) and "old_device" in vars(modes[0]) else 0
    set_function_modes([*modes[:place], mode, *modes[place:]])


def remove(mode: TorchFunctionMode) -> bool:
    """Remove `mode` from this thread's stack, at any depth, and return whether it was there."""
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
