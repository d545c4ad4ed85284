"""Run a step again with `first_nonfinite`, from the state in which it began.

A step that accumulates gradients has several batches. Each has its own random state; all start from the buffers before
the first one.
"""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amplab.amp import Session, is_autocast_enabled
from amplab.diagnose import FirstNonfinite, first_nonfinite
from amplab.parallel.ranks import NeedsOtherRanks, data_parallel, exchanges_in_forward, this_rank
from amplab.policies.nested_tensors import tensors_in
from amplab.trace.as_found import Undo, leaves_as_found, remove_hook
from amplab.trace.handed_step import Loss, Scaler
from amplab.trace.modules import UncopiedHook
from amplab.trace.stand_ins import apart
from amplab.trace.tensor_copies import write_value
from amplab.trace.untouched import unless_undone

__all__ = ["CannotRunAgain", "StepBeginning", "StepRerun"]

_HAS_CUDA = torch.backends.cuda.is_built()
_BATCHES = 64  # kept of one step at most, since a loop may never step


class _Begun(NamedTuple):
    """The batch and the random state of one forward."""

    batch: Any
    random: list[Tensor]


@dataclass(frozen=True, eq=False)
class StepBeginning:
    """The state in which a step began.

    Attributes:
        begun: The batch and the random state of each forward.
        buffers: Copies of the model's buffers.
    """

    begun: tuple[_Begun, ...]
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        held = [*self.buffers, *(tensor for each in self.begun for tensor in (*tensors_in(each.batch), *each.random))]
        return sum(tensor.nbytes for tensor in held)


class CannotRunAgain(RuntimeError):
    """A step cannot run again as the loop ran it; the message says why."""


class StepRerun:
    """Keeps the state in which a step began, and runs the step again.

    Args:
        model: the model.
        loss, step: as `first_nonfinite` takes them; if both are None, steps cannot run again.
        scaler: as `first_nonfinite` takes it.

    Attributes:
        is_possible: whether a step can run again: there is a loss or a step, and batches are known.
        at_work: whether a step is running again now.
        wrappers: DistributedDataParallel around the model, as far as the loop has shown it.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, step: Loss | None, scaler: Scaler | None) -> None:
        self._model, self._loss, self._step, self._scaler = model, loss, step, scaler
        self._runs_again = loss is not None or step is not None
        self._kept: list[Tensor] = []  # the buffers as the step began
        if self._runs_again:
            self._keep_buffers()
        self._begun: deque[_Begun] = deque(maxlen=_BATCHES)
        self.is_possible = False
        self.at_work = False
        self._loop_in_autocast: bool | None = None  # around the model's forward, as far as it is known
        casts_itself = isinstance(scaler, Session)  # a session casts when a step runs again too
        self._sees_loop = self._runs_again and (not casts_itself or this_rank() is not None)
        self.wrappers: list[DistributedDataParallel] = []  # around the model that the watch got
        self._hook = UncopiedHook(unless_undone(self._see_loop))

    @property
    def code(self) -> list[Loss]:
        """The functions of the user that run in a step, without what wraps them."""
        return [inspect.unwrap(each) for each in (self._loss, self._step) if each is not None]

    def begin(self) -> None:
        """The loop begins: look at its first forward."""
        if self._sees_loop:
            self._model.register_forward_pre_hook(self._hook)

    def end(self) -> None:
        """Remove the hook; a second call does nothing."""
        remove_hook(self._hook, self._model._forward_pre_hooks)

    def remember(self, batch: Any) -> None:
        """Keep a reference to the batch, and copies of the random state and of the buffers. Sync: none."""
        if not self._runs_again:
            return
        if not self._begun:
            self._keep_buffers()
        self._begun.append(_Begun(batch, _random_states()))
        self.is_possible = True

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        buffers = list(self._model.buffers())
        if list(map(_kind_of, buffers)) != list(map(_kind_of, self._kept)):  # a forward may resize or replace them
            self._kept = [buffer.detach().clone() for buffer in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    @torch.no_grad()
    def restore_buffers(self) -> bool:
        """Give the buffers the values with which the step began; return False if they are others now. Sync: none."""
        buffers = list(self._model.buffers())
        if list(map(_kind_of, buffers)) != list(map(_kind_of, self._kept)):
            return False
        for buffer, value in zip(buffers, self._kept, strict=True):
            write_value(buffer, value)
        return True

    def forget(self) -> None:
        """Drop the batches: their step is over."""
        self._begun.clear()

    def beginning(self) -> StepBeginning:
        """Return the state in which the step of the kept batches began. Sync: none."""
        return StepBeginning(tuple(self._begun), tuple(each.clone() for each in self._kept))

    @torch.no_grad()
    def begin_as(self, beginning: StepBeginning) -> None:
        """Keep the batches of another step, and give the buffers the values that they had at its beginning."""
        self._begun = deque(beginning.begun, maxlen=_BATCHES)
        for each, buffer, value in zip(self._kept, self._model.buffers(), beginning.buffers, strict=True):
            write_value(each, value)
            write_value(buffer, value)
        self.is_possible = bool(beginning.begun)

    @leaves_as_found
    def first_nonfinite(self, loss_scale: float) -> FirstNonfinite | None:
        """Run the kept step again at its scale, batch by batch; return None if every batch is finite.

        Of several ranks each runs its own batches, without the others. It takes as long as 3 to 6 steps, or 25 if a
        step takes microseconds.

        Raises:
            CannotRunAgain: The loop calls the model in an autocast region, and this run did not.
            NeedsOtherRanks: It waits for other ranks, which may not run the step again.

        Sync: as many as several steps, for each batch up to the first that is not finite.
        """
        if exchanging := exchanges_in_forward(self._model):
            raise NeedsOtherRanks(
                f"{exchanging} exchanges values with the other ranks in its forward. On one rank alone it would wait."
            )
        for begun in tuple(self._begun):
            seen: list[bool] = []  # whether each forward is in an autocast region
            with Undo() as undo:
                self._begin_again(begun.random, undo)
                see = partial(_see_autocast, seen)
                undo.register(self._model.register_forward_pre_hook, see, self._model._forward_pre_hooks)
                found = self._first_nonfinite(begun.batch, loss_scale)
            if self._loop_in_autocast and seen and not seen[0]:
                raise CannotRunAgain(self._outside())
            if found is not None:
                return found
        return None

    def _see_loop(self, model: nn.Module, _args: object) -> None:
        """Note once whether the loop calls the model in an autocast region, and by which wrapper."""
        if not self.at_work and model.training and torch.is_grad_enabled():
            self._loop_in_autocast = not isinstance(self._scaler, Session) and _in_autocast(model)
            self.wrappers = data_parallel(model)
            self.end()

    def _outside(self) -> str:
        name = getattr(self._step or self._loss, "__name__", "")
        if self._step is None:
            return (
                "the loop calls the model in an autocast region, and loss= calls it outside of one; pass step=, a "
                "function that enters the region and returns the loss."
            )
        called = f"step={name}" if name.isidentifier() else "the function step="
        return (
            f"{called} does not enter autocast, but the loop does, so it ran in another precision; enter the region "
            f"in {name if name.isidentifier() else 'it'}, around the forward and the loss."
        )

    def _first_nonfinite(self, batch: Any, loss_scale: float) -> FirstNonfinite | None:
        return first_nonfinite(
            self._model, batch, loss=self._loss, step=self._step, scaler=self._scaler, loss_scale=loss_scale
        )

    def _begin_again(self, random: list[Tensor], undo: Undo) -> None:
        """Set the random state and the buffers with which the step began, until `undo`."""
        undo.add(partial(setattr, self, "at_work", False))
        undo.enter_block(partial(apart, self._model))
        buffers = list(self._model.buffers())
        if len(buffers) != len(self._kept):
            raise CannotRunAgain("the forward has added or removed buffers of the model, so they are not as they were.")
        undo.add(partial(self._set, _random_states(), buffers, [buffer.detach().clone() for buffer in buffers]))
        self.at_work = True
        self._set(random, buffers, self._kept)

    @torch.no_grad()
    def _set(self, random: list[Tensor], buffers: list[Tensor], values: list[Tensor]) -> None:
        torch.set_rng_state(random[0])
        if len(random) > 1:
            torch.cuda.set_rng_state_all(random[1:])
        for buffer, value in zip(buffers, values, strict=True):
            write_value(buffer, value)


def _kind_of(buffer: Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.dtype, buffer.layout, buffer.device


def _see_autocast(seen: list[bool], model: nn.Module, _args: object) -> None:
    seen.append(_in_autocast(model))


def _in_autocast(model: nn.Module) -> bool:
    device = next((each.device.type for each in model.parameters()), "cpu")
    return torch.is_autocast_enabled(device) or is_autocast_enabled(device)  # torch's regions, or amplab's


def _random_states() -> list[Tensor]:
    on_host = torch.get_rng_state()
    return [on_host, *torch.cuda.get_rng_state_all()] if _HAS_CUDA and torch.cuda.is_initialized() else [on_host]
