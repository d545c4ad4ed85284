"""Which module is at work: a stack kept by the modules' own forward hooks.

The hooks are the official ones, on the submodules of one model and for the length of one `with` block. The path is the
one under which `named_modules` first meets a module, also where a module sits in the model twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

__all__ = ["ModuleStack", "Stage"]

Stage = Literal["", "before", "after"]


class ModuleStack:
    """The modules whose forward is running, outermost first.

    What it says is kept in plain attributes: they are read with every op, and change with every module.

    Args:
        model: the model to follow; its own path is its class name, since `named_modules` has none for it.

    Attributes:
        path: path of the innermost module at work; empty when none is.
        stage: `before` or `after` while other hooks of that module run around its forward; empty in the forward itself.
        depth: how many modules are at work, one inside the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self.path = ""
        self.stage: Stage = ""
        self.depth = 0
        self._names = {module: path for path, module in model.named_modules()}
        self._paths = {**self._names, model: self._names[model] or type(model).__name__}
        self._running: list[tuple[nn.Module, str, Stage]] = []  # each with the path and the stage to be back at

    def parameter_names(self) -> dict[int, str]:
        """Return the names of `model.named_parameters()` by id, from the walk over the modules that has been made."""
        names: dict[int, str] = {}
        for module, path in self._names.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), f"{path}.{name}" if path else name)
        return names

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the model while the block runs; every hook is off again afterwards, also after an exception."""
        handles = []
        try:
            for module in self._paths:
                # First in and last out, so that what other hooks compute counts as the module's own.
                if module._forward_pre_hooks:
                    handles.append(module.register_forward_pre_hook(self._begin))
                if module._forward_hooks:
                    handles.append(module.register_forward_hook(self._end, prepend=True))
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()
            self.path, self.stage, self.depth = "", "", 0

    def _enter(self, module: nn.Module, *_: object) -> None:
        self._running.append((module, self.path, self.stage))
        self.path, self.stage = self._paths[module], "before" if len(module._forward_pre_hooks) > 1 else ""
        self.depth += 1

    def _begin(self, *_: object) -> None:
        self.stage = ""

    def _end(self, *_: object) -> None:
        self.stage = "after"

    def _leave(self, module: nn.Module, *_: object) -> None:
        left = None
        while self._running and left is not module:  # a forward may have been left without its hook
            left, self.path, self.stage = self._running.pop()
        self.depth = len(self._running)
