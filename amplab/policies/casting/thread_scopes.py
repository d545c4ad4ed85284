"""The casting state of a thread: its open scopes, its function modes, and the plan that each mode gets from them.

A scope is one entry into something that changes how the ops of a thread are cast: an engine, `disable_casts`,
`cpu_half`, `explaining`. It ends with its block, or, if a hook enters it, with the call that the hook belongs to.

The code at either end may not run: torch skips the hook after a call that is interrupted, and an interrupt may come
before the first line of `__exit__`. Therefore every scope stores the frame that it ends with. The scope of a call has
ended when that frame no longer runs, that of a block when the frame executes an instruction outside of the block.
`CastingThread.drop_ended` removes such scopes when scopes are entered or read, and before each op that a mode sees.
A mode that finds this out casts nothing from this op on. torch puts it back on the stack after the op, so that it is
removed by the next call of amplab. Until the first op it has its plan. Code that torch.compile has compiled inside such
a call reads the plan without asking: if it is what is called first, it still casts.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import threading
from collections.abc import Callable
from sys import _current_frames, _getframe
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_function_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from amplab.policies.casting.explanation import Explanation
from amplab.policies.casting.function_modes import (
    CastingMode,
    OwnMode,
    ScopeMode,
    function_modes,
    insert_above_device,
    push_below_others,
    remove,
)
from amplab.policies.casting.half_on_cpu import DEFAULT_HALF_MODE, HalfMode
from amplab.policies.signals import is_interrupt

if TYPE_CHECKING:
    from amplab.policies.casting.compiled_engine import CompiledMode
    from amplab.policies.casting.engine import CastingEngine

__all__ = [
    "AUTOCAST_FLAG",
    "CastingThread",
    "Scope",
    "ScopeOfMode",
    "SUSPENDABLE",
    "THREAD",
    "block_at",
    "casting_engine",
    "engine_at_work",
    "casts_enabled",
    "casts_outside_step",
    "cpu_half",
    "cpu_half_mode",
    "disable_casts",
    "explaining",
    "is_running",
    "resume_casts",
    "suspend_casts",
    "thread_engines",
]

AUTOCAST_FLAG = "ipu"
"""The device type whose autocast flag is set while an engine casts: torch has no casts for it, and no tensor is on it.

`nn.RNN`, `nn.LSTM` and `nn.GRU` refuse an input whose dtype is not that of the weights, unless torch says that an
autocast is on for some device type. The kernel of compiled engines has its key.
"""

_NOWHERE: frozenset[int] = frozenset()
SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_running(frame: FrameType, thread: int | None = None) -> bool:
    """Return whether `frame` is on the stack of a thread. The time is proportional to the frames above it.

    Args:
        frame: any frame.
        thread: its ident; None for the calling thread.
    """
    other = thread is not None and thread != threading.get_ident()
    caller: FrameType | None = _current_frames().get(thread or 0) if other else _getframe(1)
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
        watched: the frame that ops look at: `frame` for a block, its caller for a call; None if they do not look.
        places: the instructions of `watched` that it executes while the scope is open. A call may have ended there,
            too: `has_ended` is exact.
        grad_enabled: whether grad mode was on when a hook entered the scope; None for a block.
        outlasts: whether the scope may still be open when a block around it has ended: its call may be interrupted, its
            generator or coroutine suspended, or a call has entered it, such as ExitStack.enter_context.
    """

    mode: CastingMode | CompiledMode | None = None
    frame: FrameType | None = None
    by_hook = False
    watched: FrameType | None = None
    places: frozenset[int] = _NOWHERE
    grad_enabled: bool | None = None
    outlasts = False
    _thread: CastingThread | None = None
    _outer: _Switches | None = None
    _left = False
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

    def __exit__(self, _type: object = None, error: BaseException | None = None, _traceback: object = None) -> None:
        """Leave; does nothing if the scope has ended already. Scopes may end in any order.

        If another thread calls it, for example because the garbage collector closes a generator there, the scope ends
        at the next call of amplab in its own thread, or before the next op that its mode sees.
        """
        try:
            self._leave()
            if error is not None and self._thread is not None and is_interrupt(error):
                self._thread.may_be_pushed_again = True  # by torch's own blocks, when the traceback is freed
        except BaseException:  # an interrupt; finish anyway
            self._leave()
            raise

    def leave(self) -> None:
        """As `__exit__`."""
        self.__exit__()

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
            frame: the frame with the `with` statement; for a hook, the frame that runs the call.
            by_hook: whether a hook enters the scope for the length of a call.
        """
        if frame is not None:
            self.by_hook, self.watched = by_hook, frame.f_back if by_hook else frame
            if self.watched is not None:
                place = self.watched.f_lasti
                self.places = frozenset((place,)) if by_hook else block_at(frame.f_code, place)
            self.outlasts = by_hook or not self.places or bool(frame.f_code.co_flags & SUSPENDABLE)
            if by_hook:
                self.grad_enabled = torch.is_grad_enabled()
        try:
            thread = self._thread = THREAD.own
            if thread.scopes or thread.installed or thread.may_be_pushed_again:
                thread.drop_ended()
            self._begin(thread)
            if by_hook or self.places:  # else entered by a call, such as ExitStack.enter_context
                self.frame = frame
            return self.explanation
        except BaseException:
            self.leave()
            raise

    def has_ended(self) -> bool:
        """Whether the call or the block that this scope belongs to has ended."""
        if self._left or self.frame is None:
            return self._left
        if self.by_hook:
            return not is_running(self.frame)
        return self.is_past() and not _is_leaving(self.frame)

    def is_past(self) -> bool:
        """Whether this is the scope of a block whose frame executes another instruction, perhaps that which leaves."""
        return self.frame is not None and not self.by_hook and self.frame.f_lasti not in self.places

    def is_running_block(self) -> bool:
        """Whether this is the scope of a block that runs, so that all blocks and calls around it do."""
        return self.frame is not None and not self.outlasts and not self.is_past()

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

    def _begin(self, thread: CastingThread) -> None:
        thread.scopes.append(self)
        engine = self.engine
        if engine is not None and not engine.is_live():
            self.mode = mode = engine.new_mode()
            engine.push(mode, below_others=self.outlasts)
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

    def _leave(self) -> None:
        self._left = True
        thread = self._thread
        if thread is None:
            return
        if thread is THREAD.own:
            self._end(thread)
        else:
            thread.left_elsewhere = True
            for mode in thread.modes:
                mode.has_ended = _always

    def _end(self, thread: CastingThread) -> None:
        """Undo `_begin`. The scope is listed until all is undone, so that `drop_ended` finishes what is interrupted."""
        scopes = thread.scopes
        if self in scopes[:-1]:
            self._hand_over_mode(scopes)
        mode, engine = self.mode, self.engine
        if mode is not None:
            mode.engine.withdraw(mode)
        if scopes and scopes[-1] is self and self._outer is not None:
            thread.modes, thread.disabled, thread.half_mode, thread.explanation = self._outer
            if mode is not None or engine is None:
                thread.give_plans(without=self)
            scopes.pop()
        else:
            thread.refresh(without=self)
            if self in scopes:
                scopes.remove(self)
        self.frame = self.watched = None  # or what the frame has would be kept, such as a generator with a region
        if engine is None:
            return
        for scope in scopes:
            if scope.engine is engine:
                return
        engine.clear_cache()

    def _hand_over_mode(self, scopes: list[Scope]) -> None:
        """Give the mode to the next scope that casts with it, which ends later: blocks of two coroutines overlap."""
        for scope in scopes[scopes.index(self) + 1 :]:
            if scope.engine is self.engine is not None and scope.mode in (None, self.mode):
                scope.mode, self.mode = self.mode, None
                return


class ScopeOfMode(Scope):
    """A scope in which `mode`, which casts nothing itself, sees the ops."""

    def __init__(self, mode: ScopeMode) -> None:
        super().__init__()
        self._mode = mode

    def _begin(self, thread: CastingThread) -> None:
        push_below_others(self._mode)
        super()._begin(thread)

    def _end(self, thread: CastingThread) -> None:
        thread.withdraw(self._mode)
        super()._end(thread)


def _always() -> bool:
    return True


def _is_leaving(frame: FrameType) -> bool:
    """Whether `frame` runs and calls the `__exit__` of a block."""
    callee: FrameType | None = None
    caller: FrameType | None = _getframe(1)
    while caller is not None and caller is not frame:
        callee, caller = caller, caller.f_back
    return caller is not None and callee is not None and callee.f_code.co_name == "__exit__"


_BLOCKS: dict[tuple[int, int], tuple[CodeType, frozenset[int]]] = {}
"""What `block_at` has returned, by the id of the code, since its hash takes microseconds."""


def block_at(code: CodeType, place: int) -> frozenset[int]:
    """Return the instructions of the block that the `with` statement at `place` begins; empty if there is none."""
    known = _BLOCKS.get((id(code), place))
    if known is None:
        if len(_BLOCKS) >= 1024:
            _BLOCKS.clear()
        known = _BLOCKS[id(code), place] = code, _find_block(code, place)
    return known[1]


def _find_block(code: CodeType, place: int) -> frozenset[int]:
    if dis.opname[code.co_code[place]] != "BEFORE_WITH":
        return frozenset()
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # dis shows the same table as text
    handler_of = {at: entry.target for entry in table for at in range(entry.start, entry.end, 2)}
    handler = handler_of[place + 2]  # calls `__exit__` after an exception in the block

    def is_inside(at: int) -> bool:
        return at in handler_of and (handler_of[at] == handler or is_inside(handler_of[at]))

    return frozenset(filter(is_inside, handler_of))


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
        may_be_pushed_again: whether a mode that is withdrawn may still be on the stack of function modes.
        torch_regions: the disabled regions of torch.autocast that are open, each with its nesting count and its scope.
        left_elsewhere: whether another thread has left one of the scopes.
        flagged: whether `AUTOCAST_FLAG` is set; None after an interrupt while it was changed.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.installed: list[CastingMode | CompiledMode] = []
        self.torch_regions: list[tuple[int, Scope]] = []
        self.modes: _Modes = ()
        self.disabled: tuple[Scope, ...] = ()
        self.half_mode: HalfMode | None = None
        self.explanation: Explanation | None = None
        self.may_be_pushed_again = self.left_elsewhere = False
        self.flagged: bool | None = False

    def drop_ended(self, *, before_op: bool = False) -> None:
        """Leave the scopes whose call or block has ended, since their own exit has not run.

        Grad mode, too, becomes what it was before the call: an interrupt may have ended a block of `torch.no_grad` in
        torch's own code. Without a live mode it stays, since nothing tells whether the user has set it since then.

        Args:
            before_op: whether a mode calls it before the first op after such a call.
        """
        if not (self.scopes or self.installed or self.may_be_pushed_again) or is_dynamo_compiling():
            return
        if self.installed:
            self._put_back_installed()
            if not (self.scopes or self.may_be_pushed_again):
                return
        if not (self.may_be_pushed_again or self.left_elsewhere) and self.scopes[-1].is_running_block():
            return
        was_left_elsewhere, self.left_elsewhere = self.left_elsewhere, False
        ended = [scope for scope in reversed(self.scopes) if scope.has_ended()]
        live = [mode for mode in self.modes if isinstance(mode, CastingMode) and mode.live]  # no generator, which may
        sees_grad_mode = before_op or bool(live)  # end in a finalizer, where Python swallows an interrupt
        for scope in ended:
            scope.leave()
        if was_left_elsewhere:
            self.give_plans()  # whose modes no longer ask before each op
        if ended and sees_grad_mode and not torch.is_inference_mode_enabled():
            _restore_grad_mode([scope.grad_enabled for scope in ended if scope.grad_enabled is not None])
        if self.may_be_pushed_again:
            for mode in [mode for mode in function_modes() if isinstance(mode, OwnMode) and mode.withdrawn]:
                remove(mode)
                self.may_be_pushed_again = False

    def withdraw(self, mode: OwnMode) -> None:
        """Take `mode` off the stack for good, from another thread at the next call of amplab in this one."""
        mode.withdrawn = True
        if self is not THREAD.own or not remove(mode):  # perhaps it handles a call, after which torch pushes it again
            self.may_be_pushed_again = True

    def _put_back_installed(self) -> None:
        """Put each installed mode on the stack once, unless it handles a call.

        For functions written in Python, torch takes a mode off the stack and puts it back in a `with` block. If an
        interrupt ends that block, the mode is off for good, or it is put back when the traceback is freed.
        """
        modes = function_modes()
        for mode in self.installed:
            if isinstance(mode, CastingMode) and modes.count(mode) != 1 and not mode.is_handling():
                remove(mode)
                insert_above_device(mode)

    def refresh(self, *, without: Scope | None = None) -> None:
        """Set all switches again from the open scopes, `without` one that ends now."""
        self.modes, self.disabled, self.half_mode, self.explanation = tuple(self.installed), (), None, None
        for scope in self.scopes:
            if scope is not without:
                scope.apply(self)
        self.give_plans(without=without)

    def give_plans(self, *, without: Scope | None = None) -> None:
        """Give the live modes their plans, and every other mode the empty plan.

        Only the topmost mode casts, so that an op is cast once; modes with a device type each meet different ops.

        Args:
            without: a scope that ends now.
        """
        modes = self.modes
        if len(modes) == 1:  # a region that is entered in every step
            self._give_plan(modes[0])
        elif modes:
            self._share_plans(modes)
        if modes and not is_dynamo_compiling():
            self._watch(without)
        self._set_flag()

    def _watch(self, without: Scope | None) -> None:
        """Let the live modes look at the innermost scope before each op, and at one around it that may end first."""
        frame, places, has_ended = None, _NOWHERE, None
        scopes = self.scopes
        for place in range(len(scopes) - 1, -1, -1):
            scope = scopes[place]
            if scope.places and scope is not without:
                frame, places = scope.watched, scope.places
                if scope.outlasts and not scope.by_hook and place and scopes[place - 1] is not without:
                    has_ended = scopes[place - 1].has_ended
                break
        for mode in self.modes:
            if mode.live and isinstance(mode, CastingMode):
                mode.watched, mode.places, mode.has_ended = frame, places, mode.has_ended or has_ended

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
        mode.has_ended = None
        for scope in self.disabled:
            if scope.by_hook:
                mode.has_ended = scope.has_ended_before_op

    def _set_flag(self) -> None:
        wanted = False
        for mode in self.modes:
            if mode.live and (mode.keeps_flag or (mode.engine.policy.table is not None and not self.disabled)):
                wanted = True
                break
        if wanted is self.flagged:
            return
        is_cast_elsewhere = False
        if not wanted and not is_dynamo_compiling() and _len_torch_function_stack():
            # autograd hands function modes and torch's flags to its threads, and not THREAD
            is_cast_elsewhere = not self.modes and any(map(_casts, function_modes()))
        self.flagged = None
        torch.set_autocast_enabled(AUTOCAST_FLAG, wanted or is_cast_elsewhere)
        self.flagged = wanted


def _restore_grad_mode(before: list[bool]) -> None:
    """Set grad mode as it was before the outermost, which is the last, of the calls that have ended.

    The op may be that with which a block of `torch.no_grad` begins. It has read grad mode already, and must not put
    what the interrupt has left back at its end.
    """
    if not before or torch.is_grad_enabled() is before[-1]:
        return
    torch._C._set_grad_enabled(before[-1])
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        if frame.f_code in _BEGINNINGS:
            frame.f_locals["self"].prev = before[-1]
        frame = frame.f_back


_BEGINNINGS = {
    torch.no_grad.__enter__.__code__,
    torch.enable_grad.__enter__.__code__,
    torch.set_grad_enabled.__init__.__code__,
}


def _casts(mode: TorchFunctionMode) -> bool:
    return isinstance(mode, CastingMode) and mode.live and not mode.withdrawn and mode.engine.policy.table is not None


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


class _OutsideStep(Scope):
    """A block in which casts are on as they were before the call for which a hook has suspended them."""

    def apply(self, thread: CastingThread) -> None:
        super().apply(thread)
        thread.disabled = tuple(scope for scope in thread.disabled if not scope.by_hook)


def casts_outside_step() -> Scope:
    """Return a context manager under which this thread casts as outside of the optimizer step that runs.

    For a hook on the step that runs a forward of the model. Sync: none.
    """
    return _OutsideStep()


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
