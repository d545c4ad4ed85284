"""`DispatchMode`: the base of the modes that intercept every aten op, also those of autograd's backward.

`run_op` runs an op in a mode as it runs without one.
"""

import functools
import gc
import os
import sys
import time
from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _dispatch_has_kernel,
    _dispatch_has_kernel_for_dispatch_key,
    _get_dispatch_mode,
    _is_any_autocast_enabled,
    _TorchDispatchModeKey,
)
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["INTO_GRAD", "DispatchMode", "current_backward", "drop_ended", "run_op"]

current_backward = torch._C._current_graph_task_id
"""Number of the backward whose hook or node calls; -1 outside of one."""

INTO_GRAD = "torch::autograd::AccumulateGrad"
"""Name of the nodes that write to ``.grad``."""

_TRACERS = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL
"""Modes whose tensors have no values: an error in one of their ops may end the process."""

_AUTOCASTS = DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA
_is_off, _switch_off = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C._dispatch_tls_set_dispatch_key_excluded

_CAST_BEFORE = frozenset((torch.ops.aten._euclidean_dist.default,))
"""Ops that only casts of torch.autocast call, of `torch.cdist`: nothing in them is cast again.

Whether `torch.pinverse`, which casts, or `torch.linalg.pinv`, which does not, has called the op of both is not known:
in a mode, both return what the second one returns.
"""

_FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": "_is_in_any_mode_without_ignore_compile_internals",
}
"""Where a mode stores what it found, and what torch stores about all modes: whether there is one of some kind."""


_SET_BY_OWN = "old_dispatch_mode_flags", "old_non_infra_dispatch_mode_flags"
"""Those of `_FLAGS` that a mode of amplab sets. torch keeps one value for all threads: a mode that has found that of
another thread, and ends after it, would leave it True for good."""

_PATIENCE = 1.0  # seconds, in a loop: it takes milliseconds to see which blocks are open
_references = -1  # to the class torch.inference_mode while no block is open


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that can be entered without importing the compiler, which takes seconds.

    A subclass implements `run`, which runs ops by `run_op`. A mode is entered once; modes may end in any order. There
    are three places where a mode cannot be taken off: another thread, which closes the generator in which the mode was
    entered; a hook that a backward calls, since after the hook autograd restores the modes with which the backward
    began; and a block of ``torch.inference_mode`` that has begun since: its end restores that there is a mode, and
    without one each op would raise. A mode that ends there runs ops as they are until `drop_ended` in its own thread.

    Reference: torch.utils._python_dispatch.TorchDispatchMode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._thread, self.has_ended = get_ident(), False
        self.is_entered = False
        self._backward = -1  # in which it is entered
        self._blocks = frozenset[int]()  # of torch.inference_mode, in which it is entered
        self._stays_until = 0.0

    def __enter__(self) -> "DispatchMode":
        """Put this mode on top of this thread's stack."""
        self.is_entered = True  # first: an interrupt may follow
        self._backward, self._blocks = current_backward(), _inference_blocks()
        is_first = not _get_current_dispatch_mode_stack()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        for memory in _SET_BY_OWN if is_first else ():
            getattr(self, memory)[-1] = False
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op that a thread has called; one that a tracer of torch has called, as of torch.export, unseen.

        Unseen, too, are higher-order operators, such as that of `torch.cond`: in one, torch takes this mode off.
        """
        if isinstance(func, HigherOrderOperator) or _traces(types):
            return func(*args, **(kwargs or {}))
        if self.has_ended:
            return run_op(func, args, kwargs or {})
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and return its result."""
        raise NotImplementedError

    def __exit__(self, *_error: object) -> None:
        """Leave this thread's stack of modes, at any depth; does nothing if this mode has not been entered.

        torch's own takes off the topmost mode.
        """
        if get_ident() != self._thread or current_backward() not in (-1, self._backward):
            self.has_ended = True
            return
        if self.is_entered and not _inference_blocks() <= self._blocks:
            self.has_ended, self._stays_until = True, time.monotonic() + _PATIENCE
            return
        self.is_entered = False
        modes = _get_current_dispatch_mode_stack()
        place = next((place for place, mode in enumerate(modes) if mode is self), len(modes))
        above = modes[place + 1 :]
        self._pass_on_flags(above[0] if above else None)
        for mode in reversed(modes[place:]):
            _pop_mode(getattr(mode, "_mode_key", None))
        for mode in above:
            _push_mode(mode)

    def _pass_on_flags(self, above: TorchDispatchMode | None) -> None:
        """Restore what torch has stored about the modes below; if there is a mode above, let that one do it."""
        for memory, flag in _FLAGS.items():
            found = getattr(self, memory)
            if found and above is not None:
                getattr(above, memory)[-1] = found.pop()
            elif found:  # not yet, if `__enter__` was interrupted
                setattr(_python_dispatch, flag, found.pop())
        set_is_in_mode_without_ignore_compile_internals(
            _python_dispatch._is_in_any_mode_without_ignore_compile_internals
        )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: `torch.cond` compiles itself, and what is not compiled under a mode would not be compiled later."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for True torch wraps the mode by a function of the compiler


def _traces(types: Iterable[type]) -> bool:
    """Whether a tracer is at work: its mode is on, or an op reads one of its tensors, as before the mode is on."""
    return any(_get_dispatch_mode(key) is not None for key in _TRACERS) or any(
        issubclass(each, FakeTensor) for each in types
    )


def run_op(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op with which a mode was called, and cast in its kernel what torch.autocast casts there without a mode.

    An op without a cast of its own, such as the fast path of a transformer layer, `torch.sparse.mm`, or a custom op,
    calls others in its kernel, which torch.autocast casts. For a mode, torch turns autocast off.
    """
    uncast = _autocasts_without(func)
    if not uncast:
        return func(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # as the code that called the op has it
        cast_inside = [key for key in uncast if not _is_off(key)] if _is_any_autocast_enabled() else ()
    if not cast_inside:
        return func(*args, **kwargs)
    for key in cast_inside:
        _switch_off(key, False)
    try:
        return func(*args, **kwargs)
    finally:
        for key in cast_inside:
            _switch_off(key, True)


@functools.cache
def _autocasts_without(func: OpOverload) -> tuple[DispatchKey, ...]:
    """Return the autocast keys for which an op has no cast of its own; none if the op has no kernel that casts."""
    if func.is_view or func in _CAST_BEFORE or not _dispatch_has_kernel(func.name()):
        return ()
    return tuple(key for key in _AUTOCASTS if not _dispatch_has_kernel_for_dispatch_key(func.name(), key.name))


def _inference_blocks() -> frozenset[int]:
    """Identify the open blocks of ``torch.inference_mode`` that may be this thread's: no thread knows its own."""
    global _references  # noqa: PLW0603  while it has not grown, there is no new block
    found = sys.getrefcount(torch.inference_mode)
    if found <= _references and not torch.is_inference_mode_enabled():
        _references = found
        return frozenset()
    blocks = [each for each in gc.get_referrers(torch.inference_mode) if type(each) is torch.inference_mode]
    begun = [each for each in blocks if hasattr(each, "_inference_mode_context")]  # not those that only decorate
    inside = torch.is_inference_mode_enabled()
    own = frozenset(id(each) for each in begun if inside or not each.mode)
    if not own:
        _references = found  # one that is kept after its block counts, too
    return own


def drop_ended(*, in_loop: bool = False) -> None:
    """Take those modes off this thread's stack that have ended where they could not be taken off.

    Args:
        in_loop: called in each step: ask at most once a second whether a block of ``torch.inference_mode`` has ended.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, DispatchMode) and mode.has_ended and not (in_loop and time.monotonic() < mode._stays_until):
            mode.__exit__()


def _leave_in_forks() -> None:
    """A forked process, such as a worker of a DataLoader, records nothing, and each of its ops would be slower."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, DispatchMode):
            mode.__exit__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_forks)
