"""`Calls`: a function mode that keeps the name of the call in the model's code that is running.

Ops are named after the outermost call. The exceptions are composites of torch that engines look into
(F.multi_head_attention_forward, `1 / x`, Tensor.backward): their inner calls are named, with and without an engine.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amplab.policies import APEX, CastPolicy
from amplab.policies.casting.function_modes import OwnMode, function_modes, remove
from amplab.policies.casting.plan import COMPOSITES, opened
from amplab.policies.casting.thread_scopes import THREAD
from amplab.policies.tables.called_op import called_op
from amplab.trace.lines import CodeLine, user_line
from amplab.trace.modules import ModuleStack

__all__ = ["Calls"]

_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu")
_READS = frozenset(getattr(Tensor, name).__get__ for name in _PROPERTIES) | {Tensor.dim, Tensor.size}
"""Functions that read a property of a tensor and compute nothing; these are the most frequent calls."""

_UNNAMED = _READS | {torch._C._set_grad_enabled}
"""Functions that run no op. An interrupt in a block's end before grad mode is restored would leave that off."""

_RUNS_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Calls(OwnMode):
    """The outermost call that is running, and whether autograd is.

    Attributes:
        name: the call's name; empty between calls.
        line: the line of the user's code that made it; None between calls.
        count: the number of calls so far.
        autocast: whether torch.autocast was enabled when the call began; torch disables it inside.
        in_autograd: True inside a call that computes gradients.
        autograd_depth: the depth of the module stack when that call began.
    """

    def __init__(self, modules: ModuleStack) -> None:
        super().__init__()
        self.name = ""
        self.line: CodeLine | None = None
        self.count = 0
        self.autocast = False
        self.in_autograd = False
        self.autograd_depth = 0
        self._modules = modules
        self._opened = _opened_by_engines()
        self._thread = THREAD.own

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_dynamo_compiling():  # as `torch.cond` does: no call is named in a graph
            return func(*args, **(kwargs or {}))
        func = called_op(func, sys._getframe(1))
        if func in _UNNAMED:
            return func(*args)
        if func in self._opened:
            return self._open(func, args, kwargs or {})
        before = self._begin(_name_of(func))
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.name, self.autocast, self.line = before

    def __enter__(self) -> "Calls":
        """Name calls from here on."""
        self.withdrawn, self._thread = False, THREAD.own
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the stack of modes, from which an interrupted function of torch may have taken this mode already."""
        self._thread.withdraw(self)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Treat the ops of the block as those of one call."""
        before = self._begin(name)
        try:
            yield
        finally:
            self.name, self.autocast, self.line = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Treat what runs in the block, unless in a deeper module than now, as part of autograd."""
        before = self.in_autograd, self.autograd_depth
        self.in_autograd, self.autograd_depth = True, self._modules.depth
        try:
            yield
        finally:
            self.in_autograd, self.autograd_depth = before

    def _begin(self, name: str) -> tuple[str, bool, CodeLine | None]:
        """Enter a call and return the values to restore after it."""
        before = self.name, self.autocast, self.line
        self.name, self.autocast, self.line = name, torch._C._is_any_autocast_enabled(), user_line()
        self.count += 1
        return before

    def _open(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self, self.in_backward() if func in _RUNS_BACKWARD else nullcontext():
            return opened(func)(*args, **kwargs)


@functools.cache
def _opened_by_engines() -> frozenset[Callable[..., Any]]:
    promoted = (func for func, rule in APEX.by_function.items() if rule.cast is CastPolicy.PROMOTE)
    return COMPOSITES | {func for func in promoted if isinstance(func, FunctionType)}


@functools.lru_cache(1024)
def _name_of(func: Any) -> str:
    """The name that the user's code shows: getitem for `__getitem__`, T for the getter of `x.T`."""
    name: str = getattr(func, "__name__", type(func).__name__).partition(".")[0]  # torch.ops say addmm.default
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name.strip("_") if name.endswith("__") else name.lstrip("_")


def _leave_in_forks() -> None:
    """As for `DispatchMode`: a forked process records nothing."""
    for mode in function_modes():
        if isinstance(mode, Calls):
            remove(mode)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_forks)
