"""Run a step again with `first_nonfinite`, from the state in which it began.

A step that accumulates gradients has several batches. Each has its own random state; all start from the buffers before
the first one. Of what code of a step keeps, such as a count, all is kept for the first step, and for the others what
the first one or a rerun has changed: reading all of it before each step would take too long. A rerun that may not have
been the step is an error, no explanation.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amplab.amp import Session
from amplab.diagnose import FirstNonfinite, first_nonfinite
from amplab.display.numbers import short_text
from amplab.lab.forward_again import BegunForward, ForwardAgain, in_autocast, versions_of, with_own_containers
from amplab.lab.step_code import CannotRunAgain, StepCode
from amplab.parallel.ranks import NeedsOtherRanks, data_parallel, exchanges_in_forward, this_rank
from amplab.policies.nested_tensors import tensors_in
from amplab.trace.as_found import Undo, leaves_as_found, remove_hook
from amplab.trace.handed_step import Loss, Scaler
from amplab.trace.modules import UncopiedHook
from amplab.trace.stand_ins import apart
from amplab.trace.tensor_copies import write_value
from amplab.trace.untouched import unless_undone

__all__ = ["StepBeginning", "StepRerun"]

_HAS_CUDA = torch.backends.cuda.is_built()
_BATCHES = 64  # kept of one step at most, since a loop may never step
_ANOTHER_LOSS = "Pass step=, a function of the batch that computes the loss of the loop."
_ANOTHER_STEP = (
    "The function step= must compute the loss of the loop. What its code keeps from step to step is restored only as "
    "far as amplab.watch says."
)
_SAME = 2**-7  # of a loss that runs again: a rerun follows the step op by op, which may round differently


@dataclass(frozen=True, eq=False)
class StepBeginning:
    """The state in which a step began.

    Attributes:
        begun: The batch and the random state of each forward.
        buffers: Copies of the model's buffers.
    """

    begun: tuple[BegunForward, ...]
    buffers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        held = [*self.buffers, *(tensor for each in self.begun for tensor in (*tensors_in(each.batch), *each.random))]
        return sum(tensor.nbytes for tensor in held)


class StepRerun:
    """Keeps the state in which a step began, and runs the step again.

    Args:
        model: the model.
        loss, step: as `first_nonfinite` takes them; if both are None, steps cannot run again.
        scaler: as `first_nonfinite` takes it.
        keeps: whether to take back what a rerun changes in code of one's own; else the caller does.

    Attributes:
        is_possible: whether a step can run again: there is a loss or a step, and batches are known.
        at_work: whether a step is running again now.
        wrappers: DistributedDataParallel around the model, as far as the loop has shown it.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, step: Loss | None, scaler: Scaler | None, *, keeps: bool = True
    ) -> None:
        self._model, self._loss, self._step, self._scaler = model, loss, step, scaler
        self._code = StepCode(model, [each for each in (loss, step) if each is not None], keeps=keeps)
        self._runs_again = loss is not None or step is not None
        self._kept: list[Tensor] = []  # the buffers as the step began
        if self._runs_again:
            self._keep_buffers()
        self._begun: deque[BegunForward] = deque(maxlen=_BATCHES)
        self.is_possible = False
        self.at_work = False
        self._loop_in_autocast: bool | None = None  # around the model's forward, as far as it is known
        casts_itself = isinstance(scaler, Session)  # a session casts when a step runs again too
        self._sees_loop = self._runs_again and (not casts_itself or this_rank() is not None)
        self.wrappers: list[DistributedDataParallel] = []  # around the model that the watch got
        self._hook = UncopiedHook(unless_undone(self._see_loop))

    def begin(self) -> None:
        """The loop begins: look at its first forward."""
        if self._sees_loop:
            self._model.register_forward_pre_hook(self._hook)

    def end(self) -> None:
        """Remove the hook; a second call does nothing."""
        remove_hook(self._hook, self._model._forward_pre_hooks)

    def remember(self, batch: Any) -> None:
        """Keep the batch, whose tensors are not copied, and copies of random states and buffers. Sync: none."""
        if not self._runs_again:
            return
        if not self._begun:
            self._keep_buffers()
        code = self._code.before()
        versions = versions_of(batch), self._weights_now()
        self._begun.append(BegunForward(with_own_containers(batch), *versions, _random_states(), code))
        self.is_possible = True

    def _weights_now(self) -> list[int]:
        return versions_of([*self._model.parameters()])

    def _keep_buffers(self) -> None:
        # Not under `torch.no_grad`: an interrupt where that ends would leave grad mode off in the loop.
        buffers = [buffer.detach() for buffer in self._model.buffers()]
        if list(map(_kind_of, buffers)) != list(map(_kind_of, self._kept)):  # a forward may resize or replace them
            self._kept = [buffer.clone() for buffer in buffers]
        elif buffers:
            torch._foreach_copy_(self._kept, buffers)

    def restore_buffers(self) -> bool:
        """Give the buffers the values with which the step began; return False if they are others now. Sync: none."""
        buffers = list(self._model.buffers())
        if list(map(_kind_of, buffers)) != list(map(_kind_of, self._kept)):
            return False
        for buffer, value in zip(buffers, self._kept, strict=True):
            write_value(buffer, value)
        return True

    @property
    def is_taken_back(self) -> bool:
        """Whether all that reruns have changed was taken back."""
        return self._code.is_taken_back

    @property
    def is_batch_written(self) -> bool:
        """Whether a kept batch was written to since its step began, so that the step cannot run again."""
        return any(each.is_written for each in self._begun)

    def renew(self, batch: Any) -> None:
        """Keep the batch of the last forward as it was, read anew."""
        self._begun.append(self._begun.pop()._replace(batch=batch, versions=versions_of(batch)))

    @property
    def has_begun(self) -> bool:
        """Whether batches of a step are kept."""
        return bool(self._begun)

    def drop(self, number: int = _BATCHES) -> None:
        """Drop the last batches of a step that is not over: the loop has not used them."""
        for _ in range(min(number, len(self._begun))):
            self._begun.pop()

    def forget(self) -> None:
        """Drop the batches: their step is over."""
        if self._begun:
            self._code.step_ends()
        self._begun.clear()

    def beginning(self) -> StepBeginning:
        """Return the state in which the step of the kept batches began. Sync: none."""
        return StepBeginning(tuple(self._begun), tuple(each.clone() for each in self._kept))

    def begin_as(self, beginning: StepBeginning) -> None:
        """Keep the batches of another step, and give the buffers the values that they had at its beginning."""
        self._begun = deque(beginning.begun, maxlen=_BATCHES)
        for each, buffer, value in zip(self._kept, self._model.buffers(), beginning.buffers, strict=True):
            write_value(each, value)
            write_value(buffer, value)
        self.is_possible = bool(beginning.begun)

    @leaves_as_found
    def first_nonfinite(self, loss_scale: float, loss: float | None = None) -> FirstNonfinite | None:
        """Run the kept step again, batch by batch; return None if every batch is finite.

        The report is about the whole step. A batch that no scale mends comes before those with too large a scale; of
        these the first one is reported, with the largest scale at which all batches are finite. So the first batch runs
        at the scale of the step, and each later one at the scale that fits all before. Their gradients are not added: a
        sum of float16 gradients that overflows alone is not found.

        Of several ranks each runs its own batches, without the others. It takes as long as 3 to 7 steps, and up to 6
        more after a double backward, or 25 if a step takes microseconds.

        Args:
            loss_scale: the scale of the step.
            loss: its loss; None if unknown.

        Raises:
            CannotRunAgain: The loop calls the model in an autocast region, and this run did not; the batch was written
                to; the loss is another one, or may be, since code has changed what it keeps; a thread may write to it.
            NeedsOtherRanks: It waits for other ranks, which may not run the step again.

        Sync: as many as several steps, for each batch up to the first that no scale mends.
        """
        if exchanging := exchanges_in_forward(self._model):
            raise NeedsOtherRanks(
                f"{exchanging} exchanges values with the other ranks in its forward. On one rank alone it would wait."
            )
        self._code.check_is_alone([each.batch for each in self._begun])
        first: FirstNonfinite | None = None
        fits = loss_scale
        for begun in tuple(self._begun):
            found = self._batch_again(begun, fits, loss)
            if found is None:
                continue
            if found.cause not in ("scale", "state"):
                return found
            fits = found.fitting_scale or fits
            first = found if first is None or first.cause == "state" else first
        return first if first is None or first.cause == "state" else replace(first, fitting_scale=fits)

    def _batch_again(self, begun: BegunForward, loss_scale: float, loss: float | None) -> FirstNonfinite | None:
        """Run one batch again at a scale; arguments and exceptions as for `first_nonfinite`."""
        if begun.is_written:
            raise CannotRunAgain(
                "its batch was written to after the loop got it, as x.div_(255) writes to x, so that it is not as "
                "it was. Write x = x / 255."
            )
        run = ForwardAgain(begun, self._code.now(begun.batch))
        begun.code.check_kept(run.now)
        with Undo() as undo:
            self._begin_again(begun, run, undo)
            found = self._first_nonfinite(run, loss_scale)
        if self._loop_in_autocast and run.in_autocast is False:
            raise CannotRunAgain(self._outside())
        is_comparable = len(self._begun) == 1 and this_rank() is None  # a forward may use values of other ranks
        self._check_is_the_step(run, loss if is_comparable else None, is_finite=found is None)
        return found

    def _check_is_the_step(self, run: ForwardAgain, loss: float | None, *, is_finite: bool) -> None:
        """Raise CannotRunAgain if a run was not that of the loop, as far as its loss and its code show."""
        again = None if loss is None or run.loss is None or run.loss.numel() != 1 else run.loss.detach().item()
        if loss is not None and again is not None:
            if not _is_near(loss, again) and run.begun.weights != self._weights_now():
                raise CannotRunAgain(
                    f"its loss was {short_text(loss)} in the loop, and is {short_text(again)} when it runs again: "
                    "another optimizer has changed the model's weights since its batch was read."
                )
            if not _is_near(loss, again):
                raise CannotRunAgain(
                    f"its loss was {short_text(loss)} in the loop, and is {short_text(again)} when it runs again. "
                    f"{_ANOTHER_LOSS if self._step is None else _ANOTHER_STEP} Read w.batches(loader) in the loop: a "
                    "reader in between that is one batch ahead gives each step the batch of the next one."
                )
            if math.isfinite(loss):
                return
        if is_finite:  # "finite when it runs again" says as much
            return
        code, changed = run.begun.code, run.now.changed
        if code.known is not None and (changed.keys() - code.known or (run.draws and code.host is None)):
            raise CannotRunAgain(
                "its code has changed what it keeps, such as a count or a random generator, so that it may not run "
                "as it did. From now on this is kept for each step, and the next one can run again."
            )

    def _see_loop(self, model: nn.Module, _args: object) -> None:
        """Note once whether the loop calls the model in an autocast region, and by which wrapper."""
        if not self.at_work and model.training and torch.is_grad_enabled():
            self._loop_in_autocast = not isinstance(self._scaler, Session) and in_autocast(model)
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

    def _first_nonfinite(self, run: ForwardAgain, loss_scale: float) -> FirstNonfinite | None:
        step = None if self._step is None else run.beginning_again(self._step)
        loss = None if self._loss is None else run.seeing_loss(self._loss)
        return first_nonfinite(self._model, run.batch, loss=loss, step=step, scaler=self._scaler, loss_scale=loss_scale)

    def _begin_again(self, begun: BegunForward, run: ForwardAgain, undo: Undo) -> None:
        """Set the state in which the step began, until `undo`."""
        undo.add(partial(setattr, self, "at_work", False))
        undo.add(lambda: self._code.take_back(run.now, draws=run.draws))
        undo.enter_block(partial(apart, self._model))
        buffers = list(self._model.buffers())
        if len(buffers) != len(self._kept):
            raise CannotRunAgain("the forward has added or removed buffers of the model, so they are not as they were.")
        undo.add(partial(self._set, _random_states(), buffers, [buffer.detach().clone() for buffer in buffers]))
        undo.add(run.host.restore)
        first = partial(self._model.register_forward_pre_hook, prepend=True)
        undo.register(first, run.see_forward, self._model._forward_pre_hooks)
        self.at_work = True
        self._set(begun.random, buffers, self._kept)
        if begun.code.host is not None:
            begun.code.host.restore()

    def _set(self, random: list[Tensor], buffers: list[Tensor], values: list[Tensor]) -> None:
        torch.set_rng_state(random[0])
        if len(random) > 1:
            torch.cuda.set_rng_state_all(random[1:])
        for buffer, value in zip(buffers, values, strict=True):
            write_value(buffer, value)


def _is_near(loss: float, again: float) -> bool:
    if not (math.isfinite(loss) and math.isfinite(again)):
        return not math.isfinite(loss) and not math.isfinite(again)
    return abs(loss - again) <= _SAME * max(abs(loss), abs(again), 2**-20)


def _kind_of(buffer: Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.dtype, buffer.layout, buffer.device


def _random_states() -> list[Tensor]:
    on_host = torch.get_rng_state()
    return [on_host, *torch.cuda.get_rng_state_all()] if _HAS_CUDA and torch.cuda.is_initialized() else [on_host]
