"""Which call of the model's code is at work: a function mode that keeps its name.

Composites of torch that engines open (F.multi_head_attention_forward, `1 / x`, Tensor.backward) are opened here too, so
that the calls inside them go by the same names with and without an engine; every other call goes by the outermost one.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amplab.policies import APEX, CastPolicy
from amplab.policies.composites import COMPOSITES, opened
from amplab.trace.lines import CodeLine, user_line
from amplab.trace.modules import ModuleStack

__all__ = ["Calls"]

_ASKED = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu")
_QUESTIONS = frozenset(getattr(Tensor, name).__get__ for name in _ASKED) | {Tensor.dim, Tensor.size}
"""What asks a tensor about itself and computes nothing: by far the most frequent calls."""

_RUNS_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Calls(TorchFunctionMode):
    """The outermost call at work, and whether autograd is.

    Attributes:
        name: the call's name, empty between calls.
        line: the user's line that made it, None between calls.
        count: how many calls have begun.
        autocast: whether torch's own autocast was on as the call began; inside, it switches itself off.
        in_autograd: True inside a call that computes gradients.
        autograd_depth: how many modules were at work when that call began.
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

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _QUESTIONS:
            return func(*args)
        if func in self._opened:
            return self._open(func, args, kwargs or {})
        before = self._begin(_name_of(func))
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.name, self.autocast, self.line = before

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Take the ops of the block for those of one call."""
        before = self._begin(name)
        try:
            yield
        finally:
            self.name, self.autocast, self.line = before

    @contextmanager
    def autograd_at_work(self) -> Iterator[None]:
        """Take what runs in the block, and in no deeper module than now, for autograd's."""
        before = self.in_autograd, self.autograd_depth
        self.in_autograd, self.autograd_depth = True, self._modules.depth
        try:
            yield
        finally:
            self.in_autograd, self.autograd_depth = before

    def _begin(self, name: str) -> tuple[str, bool, CodeLine | None]:
        """Enter a call and return what to be back at after it."""
        before = self.name, self.autocast, self.line
        self.name, self.autocast, self.line = name, torch._C._is_any_autocast_enabled(), user_line()
        self.count += 1
        return before

    def _open(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self, self.autograd_at_work() if func in _RUNS_BACKWARD else nullcontext():
            return opened(func)(*args, **kwargs)


@functools.cache
def _opened_by_engines() -> frozenset[Callable]:
    promoted = (func for func, rule in APEX.by_function.items() if rule.cast is CastPolicy.PROMOTE)
    return COMPOSITES | {func for func in promoted if isinstance(func, FunctionType)}


@functools.lru_cache(1024)
def _name_of(func: Callable) -> str:
    """The name under which code calls `func`: `__getitem__` is getitem, the getter of `x.T` is T."""
    name = getattr(func, "__name__", type(func).__name__).partition(".")[0]  # torch.ops say addmm.default
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name.strip("_") if name.endswith("__") else name.lstrip("_")
