"""UnscaledGradients: which gradients are unscaled in this iteration of a `GradScaler`, by parameter.

    unscale_, step     the gradients of the optimizer's parameters are unscaled
    scaled backward    a gradient that it writes is scaled, if there was none before, or zeros; else it is mixed: a sum
                       of unscaled and scaled values
    update             the next iteration: all gradients count as scaled

Most loops run no backward between `unscale_` or `step` and `update`, and cost nothing here: a scaled loss gets a hook
only if it still exists when an optimizer is unscaled, or if it is scaled later.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.autograd import Variable
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amplab.amp.backward.optimizer_params import params_of
from amplab.scalers import is_sharded, local_shard, summed_values, to_device

__all__ = ["UnscaledGradients"]

_MOST = 256  # scaled losses remembered: a loop that never calls `update` would add more and more


class _Before(NamedTuple):
    """A gradient at the start of a scaled backward, its version counter, and whether an element is not 0."""

    param: Tensor
    grad: Tensor | None
    version: int
    is_nonzero: Tensor | None

    def has_changed(self) -> bool:
        now = self.param.grad
        return now is not None and (now is not self.grad or local_shard(now)._version != self.version)


class UnscaledGradients:
    """The parameters whose gradients are unscaled; true if there are any.

    A parameter of several optimizers is unscaled once, and a gradient that arrives after `GradScaler.unscale_` of its
    optimizer is unscaled by the step.

    Attributes:
        has_changed: whether a scaled backward has run since the first optimizer of this iteration was unscaled.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self._losses: deque[weakref.ref[Tensor]] = deque(maxlen=_MOST)  # scaled in this iteration, without a hook
        self._begun: list[tuple[Optimizer, dict[str, Any]]] = []  # with the scaler's record of the optimizer
        self._unscaled: dict[int, tuple[Tensor, Tensor | None]] = {}  # by id: the parameter, found_inf of a fused step
        self._mixed: dict[int, Tensor] = {}  # by id: `is_nonzero` of the gradient that a scaled backward has added to
        self._before: dict[int, _Before] = {}  # by id, while a scaled backward runs
        self._hooks: list[RemovableHandle] = []
        self._task = -1  # of autograd

    def __bool__(self) -> bool:
        return bool(self._unscaled)

    # -- what the scaler does ----------------------------------------------------------------------

    def note_loss(self, loss: Tensor) -> None:
        """Note a scaled loss, whose backward may run after an optimizer is unscaled. Sync: none."""
        if self._begun or self._unscaled:
            self._follow(loss)
        else:
            self._losses.append(weakref.ref(loss))

    def begin(self, optimizer: Optimizer, row: dict[str, Any], *, is_last: bool) -> None:
        """Note that the gradients of an optimizer are about to be unscaled. Sync: none.

        Args:
            optimizer: the optimizer.
            row: the scaler's record of it.
            is_last: whether no other gradients will be needed in this iteration.
        """
        self._begun.append((optimizer, row))
        while self._losses and not is_last:
            loss = self._losses.popleft()()
            if loss is not None:
                self._follow(loss)

    def add(self, params: Sequence[Tensor], *, unless: Tensor | None = None) -> None:
        """Record that the gradients of ``params`` are unscaled; with ``unless``, found_inf of a step, only if it is 0.

        Needed for the parameters of several optimizers, and for all after a scaled backward: `has_changed`.
        """
        for param in params:
            self._unscaled[id(param)] = param, unless

    def add_begun(self, *, interrupted: bool = False) -> None:
        """Record all gradients that are unscaled: before a backward, and before a new optimizer may use them again."""
        for optimizer, row in self._begun:
            if (interrupted or row["stage"] is not OptState.READY) and not row.get("is_added"):
                row["is_added"] = True
                fresh = [param for param in params_of(optimizer) if id(param) not in self._unscaled]
                self.add(fresh, unless=row.get("unless"))

    def clear(self) -> None:
        """Begin the next iteration, after an update: every gradient counts as scaled."""
        self._losses.clear()
        self._begun.clear()
        if self._unscaled or self.has_changed or self._before:
            self._end_backward()
            self._unscaled.clear()
            self._mixed.clear()
            self.has_changed = False

    def continue_after_interrupt(self) -> list[Optimizer]:
        """Begin the next iteration, without an update: every gradient that was begun counts as unscaled.

        Returns:
            The optimizers that were begun.
        """
        self.add_begun(interrupted=True)
        begun = [optimizer for optimizer, _ in self._begun]
        self._begun.clear()
        return begun

    # -- what the scaler asks ----------------------------------------------------------------------

    def factor_left(self, param: Tensor, inv_scale: Tensor) -> tuple[Tensor, int | None]:
        """Return the factor that a gradient still needs: 1, or the inverse scale if it is scaled; and the factor's key.

        Sync: none.
        """
        seen = self._unscaled.get(id(param))
        if seen is None:
            return inv_scale, None
        one, unless = torch.ones_like(inv_scale), seen[1]
        if unless is None:
            return one, 0
        return torch.where(to_device(unless, inv_scale.device) > 0, inv_scale, one), id(unless)

    def holds_any(self, params: Sequence[Tensor]) -> bool:
        """Whether a gradient of ``params`` is unscaled."""
        return bool(self._unscaled) and any(id(param) in self._unscaled and param.grad is not None for param in params)

    def late(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return those of an unscaled optimizer's parameters whose gradients have arrived since. Sync: none."""
        if not self.has_changed:
            return []
        return [param for param in params if id(param) not in self._unscaled and param.grad is not None]

    def refuse_mixed(self, params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raise RuntimeError if a gradient of ``params`` is a sum of unscaled and scaled ones.

        Args:
            params: of an optimizer.
            name: returns the name of a parameter's gradient.

        Sync: none, except after a backward that has added to unscaled gradients.
        """
        for param in params if self._mixed else ():
            was_nonzero = self._mixed.get(id(param))
            if was_nonzero is None or param.grad is None:
                continue
            if not was_nonzero.item():  # the backward has added to zeros
                del self._mixed[id(param)], self._unscaled[id(param)]
            elif summed_values(param.grad).any().item():
                raise RuntimeError(
                    f"{name(param)} was unscaled, and then a backward of a scaled loss has added to it: run every "
                    "backward that reaches an optimizer's parameters before its unscale_() or step(), or call "
                    "optimizer.zero_grad() in between."
                )

    # -- what the backwards do ---------------------------------------------------------------------

    def _follow(self, loss: Tensor) -> None:
        if loss.grad_fn is not None and not is_compiling():
            loss.grad_fn.register_prehook(self._see_backward)

    def _see_backward(self, _gradients: object) -> None:
        """Called when a backward reaches a scaled loss, before it writes gradients."""
        task = torch._C._current_graph_task_id()
        if task == self._task:  # it has reached another scaled loss already
            return
        self._end_backward()  # of one that raised
        self.add_begun()
        params = [param for param, _ in self._unscaled.values() if param.requires_grad]
        self._task, self._before = task, {id(each.param): each for each in _states(params)}
        self._hooks = [param.register_post_accumulate_grad_hook(self._see_gradient) for param in params]
        Variable._execution_engine.queue_callback(self._end_backward)

    def _see_gradient(self, param: Tensor) -> None:
        """Called when a backward has written the gradient of a parameter that is unscaled."""
        before = self._before.get(id(param))
        if before is None:
            return
        self.has_changed = True
        if before.is_nonzero is None:
            self._unscaled.pop(id(param), None)
            self._mixed.pop(id(param), None)
        else:
            known = self._mixed.get(id(param))
            self._mixed[id(param)] = before.is_nonzero if known is None else known & before.is_nonzero

    def _end_backward(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for each in self._before.values():
            if is_sharded(each.param) and each.has_changed():  # FSDP2 assigns gradients itself
                self._see_gradient(each.param)
        self._hooks, self._before, self._task = [], {}, -1


@torch.no_grad()
def _states(params: list[Tensor]) -> list[_Before]:
    """Return the state of each gradient. Sync: none; one for sparse gradients that are not coalesced."""
    values = [summed_values(param.grad) for param in params if param.grad is not None]
    filled = [each for each in values if each.numel()]
    norms = iter(torch._foreach_norm(filled, torch.inf) if filled else ())
    nonzero = iter([next(norms) != 0 if each.numel() else each.any() for each in values])
    return [
        _Before(param, None, -1, None)
        if (grad := param.grad) is None
        else _Before(param, grad, local_shard(grad)._version, next(nonzero))
        for param in params
    ]
