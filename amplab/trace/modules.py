"""Which module is at work: a stack kept by the modules' own forward hooks.

The hooks are the official ones, on the submodules of one model and for the length of one `with` block. The path is the
one under which `named_modules` first meets a module, also where a module sits in the model twice.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["ModuleStack", "Stage"]

Stage = Literal["", "before", "after"]


@dataclass
class _Running:
    module: nn.Module
    stage: Stage


class ModuleStack:
    """The modules whose forward is running, outermost first.

    Args:
        model: the model to follow; its own path is its class name, since `named_modules` has none for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {module: path or type(module).__name__ for path, module in model.named_modules()}
        self._running: list[_Running] = []

    @property
    def path(self) -> str:
        """Path of the innermost module at work; empty when none is."""
        return self._paths[self._running[-1].module] if self._running else ""

    @property
    def stage(self) -> Stage:
        """`before` or `after` while other hooks of that module run around its forward; empty in the forward itself."""
        return self._running[-1].stage if self._running else ""

    @property
    def depth(self) -> int:
        """How many modules are at work, one inside the other."""
        return len(self._running)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the model while the block runs; every hook is off again afterwards, also after an exception."""
        with ExitStack() as handles:
            for module in self._paths:
                # First in and last out, so that what other hooks compute counts as the module's own.
                if module._forward_pre_hooks:
                    handles.callback(module.register_forward_pre_hook(self._begin).remove)
                if module._forward_hooks:
                    handles.callback(module.register_forward_hook(self._end, prepend=True).remove)
                handles.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                handles.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            try:
                yield
            finally:
                self._running.clear()

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._running.append(_Running(module, "before" if len(module._forward_pre_hooks) > 1 else ""))

    def _begin(self, *_: object) -> None:
        self._running[-1].stage = ""

    def _end(self, *_: object) -> None:
        self._running[-1].stage = "after"

    def _leave(self, module: nn.Module, *_: object) -> None:
        while self._running and self._running.pop().module is not module:
            continue  # a forward that was left without its hook
