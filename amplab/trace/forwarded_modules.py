"""The buffers of the modules that a block runs: a loss may run others than the model, as a criterion or a teacher."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.as_found import Undo, rebind
from amplab.trace.tensor_copies import TensorCopy, restore_all

__all__ = ["buffers_kept"]


class _Buffers(NamedTuple):
    """The buffers of one module before its first forward."""

    module: nn.Module
    names: dict[str, Tensor | None]
    copies: list[TensorCopy]

    @classmethod
    def of(cls, module: nn.Module) -> "_Buffers":
        is_scripted = isinstance(module, torch.jit.ScriptModule)  # whose children have no hooks
        names: dict[str, Tensor | None] = {} if is_scripted else dict(module._buffers)
        buffers = [each for each in module.buffers(recurse=is_scripted) if not is_lazy(each) and not each.is_nested]
        return cls(module, names, [TensorCopy.of(each) for each in buffers])

    def restore(self) -> None:
        if self.names:
            rebind(self.module._buffers, self.names)
        restore_all(self.copies)


@contextmanager
def buffers_kept(model: nn.Module | None = None) -> Iterator[None]:
    """Restore the buffers of each module whose forward this thread begins in the block.

    Those of ``model`` are left out. Not seen are modules whose ``forward`` is called in place of themselves, and all if
    ``model`` is compiled: torch warns of global hooks then.

    Sync: none.

    >>> norm = nn.BatchNorm1d(2)
    >>> with buffers_kept():
    ...     _ = norm(torch.ones(4, 2))
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0], 0)
    """
    thread, known = get_ident(), set(map(id, model.modules() if model is not None else ()))
    seen: list[_Buffers] = []

    def remember(module: nn.Module, _inputs: object) -> None:
        if get_ident() == thread and id(module) not in known:
            known.add(id(module))
            # These copies are not ops of the step, so they are neither cast nor recorded.
            with without_function_modes(), _disable_current_modes():
                seen.append(_Buffers.of(module))

    def restore() -> None:
        with without_function_modes():
            for each in seen:
                each.restore()

    with Undo() as undo:
        undo.add(restore)
        if model is None or not any("_orig_mod" in each._modules for each in model.modules()):
            undo.register(register_module_forward_pre_hook, remember, nn.modules.module._global_forward_pre_hooks)
        yield
