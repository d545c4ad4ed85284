"""`ModuleStack`: the modules whose forward is running, kept by forward hooks. `UncopiedHook`: hooks that copies lack.

The hooks of a stack are on the submodules of one model, for the length of one `with` block. A module that is in the
model twice has the path under which `named_modules` finds it first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from torch import nn

from amplab.trace.as_found import Undo

__all__ = ["ModuleStack", "Stage", "UncopiedHook"]

Stage = Literal["", "before", "after"]


class UncopiedHook(partial[Any]):
    """A forward hook of one module. Where a copy by deepcopy or pickle has a hook, too, that one does nothing.

    For an observer of one model, whose state is neither copied nor saved with the model.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # returns None; a saved model loads where amplab is missing

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; torch.jit.script reads the name of each hook, to compile it."""
        what = f"a hook of amplab has no {name}"
        if name == "__name__":
            what += ": call torch.jit.script, which compiles the hooks of a model, after the block of amplab.watch"
        raise AttributeError(f"{what}.", name=name, obj=self)


class ModuleStack:
    """The modules whose forward is running, outermost first.

    The results are plain attributes, since they are read with every op.

    Args:
        model: the model to follow; its own path is its class name, since its path in `named_modules` is empty.

    Attributes:
        path: path of the innermost running module; empty if none runs.
        stage: `before` or `after` while other hooks of that module run around its forward, else empty.
        depth: the number of running modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.path = ""
        self.stage: Stage = ""
        self.depth = 0
        self._names = {module: path for path, module in model.named_modules()}
        self._paths = {**self._names, model: self._names[model] or type(model).__name__}
        self._running: list[tuple[nn.Module, str, Stage]] = []  # each with the path and stage to restore

    def parameter_names(self) -> dict[int, str]:
        """Return the names of `model.named_parameters()` by id, without another walk over the modules."""
        names: dict[int, str] = {}
        for module, path in self._names.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(id(parameter), f"{path}.{name}" if path else name)
        return names

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the model while the block runs, and remove every hook at its end, also after an exception."""
        with Undo() as undo:
            undo.add(self._end_following)
            for module in self._paths:
                # Run first and last, so that the ops of other hooks count as ops of the module.
                if module._forward_pre_hooks:
                    module.register_forward_pre_hook(UncopiedHook(self._begin))
                if module._forward_hooks:
                    module.register_forward_hook(UncopiedHook(self._end), prepend=True)
                module.register_forward_pre_hook(UncopiedHook(self._enter), prepend=True)
                module.register_forward_hook(UncopiedHook(self._leave), always_call=True)
            yield

    def _end_following(self) -> None:
        """Remove the hooks, found by their owner: an interrupt may have lost the handle of the last one."""
        for module in self._paths:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [number for number, hook in hooks.items() if self._is_own(hook)]:
                    del hooks[number]
                    module._forward_hooks_always_called.pop(number, None)
        self._running.clear()
        self.path, self.stage, self.depth = "", "", 0

    def _is_own(self, hook: Any) -> bool:
        return isinstance(hook, UncopiedHook) and getattr(hook.func, "__self__", None) is self

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
        while self._running and left is not module:  # an exception may have skipped the hook of an inner one
            left, self.path, self.stage = self._running.pop()
        self.depth = len(self._running)
