"""One look at a forward: the first module whose output is inf or NaN, for loops whose steps cannot be run again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from amplab.trace.batch_step import floating_tensors

__all__ = ["ForwardCheck"]


class ForwardCheck:
    """Looks at the outputs of every module in the next forward, then takes its hooks off.

    Sync: one, when `first` is read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[str, Tensor]] = []
        self._hooks = [module.register_forward_hook(self._look(path)) for path, module in model.named_modules()]

    def first(self) -> str | None:
        """Path of the first module whose output was not finite, the model's own as "(model)"; None: all were."""
        self.end()
        if not self._seen:
            return None
        flags = torch.stack([flag.to("cpu") for _, flag in self._seen]).tolist()
        return next((path or "(model)" for (path, _), good in zip(self._seen, flags, strict=True) if not good), None)

    def end(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            for tensor in floating_tensors(output):
                self._seen.append((path, torch.isfinite(tensor.detach()).all()))

        return hook
