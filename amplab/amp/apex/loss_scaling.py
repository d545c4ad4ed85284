"""What happens around one backward: scale the loss, unscale the gradients, move the scale, have the step skipped.

    enter    gradients of earlier backwards are set aside           yields loss.float() * scale
    leave    new gradients are divided by the scale and added       found_inf: the scale backs off, the step is skipped

One `LossScaling` lives from one `initialize` to the next. What each optimizer does is in `hooked_optimizer`, how a
scale moves in `loss_scaler`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.collapse import CollapseWatch, OnCollapse
from amplab.amp.apex.hooked_optimizer import HookedOptimizer
from amplab.amp.apex.hooks import Hooks
from amplab.amp.apex.initialize_arguments import as_list
from amplab.amp.backward.gradients import SetAside, bookkeeping
from amplab.amp.backward.loss_scaler import LossScaler
from amplab.amp.backward.records import ScaleRecord

__all__ = ["LossScaling", "scaled_grad"]


class LossScaling:
    """The loss scalers of one `initialize`, and what they do to its optimizers.

    Args:
        hooks: what the session knows about its optimizers.
        scalers: one for each ``loss_id``.
        subscribers: called with each `ScaleRecord`; the session's own list.
        on_collapse: as `CollapseWatch`.
        master_weights: optimizers step masters, so gradients have work to be done at every scale.
    """

    def __init__(
        self,
        hooks: Hooks,
        scalers: Sequence[LossScaler],
        subscribers: list[Callable[[ScaleRecord], object]],
        *,
        on_collapse: OnCollapse,
        master_weights: bool,
    ) -> None:
        self.scalers = tuple(scalers)
        self._hooks, self._subscribers, self._master_weights = hooks, subscribers, master_weights
        self._unchecked: dict[int, Tensor] = {}
        self._watches = [CollapseWatch(on_collapse) for _ in self.scalers]

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of ``loss_id``.

        Raises:
            TypeError: no whole number.
            IndexError: there is none of that number.
        """
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(f"loss_id={loss_id!r}: expected a whole number; they are numbered from 0.")
        if not 0 <= loss_id < len(self.scalers):
            raise IndexError(
                f"loss_id={loss_id}: there are {len(self.scalers)} loss scalers, numbered from 0; "
                "pass num_losses to amp.initialize to have more."
            )
        return self.scalers[loss_id]

    @contextlib.contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, loss_id: int, *, delay_unscale: bool, delay_overflow_check: bool
    ) -> Iterator[Tensor]:
        """Do what `Session.scale_loss` promises, casts of weights aside."""
        scaler = self.scaler(loss_id)
        hooked = self._hooked(optimizers, scaler)
        scale = scaler.scale
        if scale == 1.0 and self._nothing_to_do(scaler, hooked):
            yield loss.float()
            return
        with bookkeeping():
            asides = [(each, each.set_grads_aside()) for each in hooked]
        with _put_back_on_failure(asides):
            yield loss.float() * scale
        if delay_unscale:
            for each, aside in asides:
                each.keep_scaled(aside, scale)
            return
        with bookkeeping():
            found_inf = _unscale(asides, scale, self._unchecked.pop(loss_id, None))
        if delay_overflow_check and found_inf is not None:
            self._unchecked[loss_id] = found_inf
        else:
            self._check(found_inf, loss_id, scaler, hooked, loss)

    def take_unchecked(self, loss_id: int) -> Tensor | None:
        """Hand over the verdict that ``delay_overflow_check`` has left waiting. Sync: none."""
        return self._unchecked.pop(loss_id, None)

    def _hooked(self, optimizers: Any, scaler: LossScaler) -> list[HookedOptimizer]:
        if optimizers is None or (isinstance(optimizers, list | tuple) and not optimizers):
            raise TypeError(
                f"scale_loss got optimizers={optimizers}: expected the optimizer, or a list of the optimizers, whose "
                "parameters this backward reaches; for the gradients of inputs alone use amp.scaled_grad."
            )
        chosen = as_list(optimizers)
        if scaler.scale == 1.0 and not (scaler.dynamic or self._master_weights):
            # Nothing is unscaled here, and scripts rely on it with an optimizer of their own for the inputs.
            chosen = [each for each in chosen if not isinstance(each, Optimizer) or self._hooks.knows(each)]
        return list(dict.fromkeys(self._hooks.hooked(each) for each in chosen))

    def _nothing_to_do(self, scaler: LossScaler, hooked: Sequence[HookedOptimizer]) -> bool:
        quiet = not (scaler.dynamic or self._subscribers)
        return quiet and all(each.passes_gradients_through for each in hooked)

    def _check(
        self,
        found_inf: Tensor | None,
        loss_id: int,
        scaler: LossScaler,
        hooked: Sequence[HookedOptimizer],
        loss: Tensor,
    ) -> None:
        """Read the verdict on the gradients, move the scale, and see to it that an overflow skips the step."""
        scale = scaler.scale
        found = (scaler.dynamic or bool(self._subscribers)) and found_inf is not None and bool(found_inf)
        skipped = found and scaler.dynamic
        first = self._hooks.first_nonfinite(hooked) if found else None
        scaler.update(skipped)
        record = ScaleRecord(loss_id, scale, scaler.scale, found, skipped, first, loss.detach())
        for each in hooked if skipped else ():
            each.skip_next_step(loss_id, scaler, scale, first)
        for callback in list(self._subscribers):
            callback(record)
        with bookkeeping():
            self._watches[loss_id].see(record, loss)


@contextlib.contextmanager
def _put_back_on_failure(asides: Sequence[tuple[HookedOptimizer, list[SetAside]]]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for hooked, aside in asides:
            hooked.put_grads_back(aside)
        raise


def scaled_grad(outputs: Tensor, inputs: Any, scale: float, **options: Any) -> tuple[Tensor | None, ...]:
    """Return ``torch.autograd.grad(outputs * scale, inputs)``, divided by ``scale`` in float32."""
    grads = torch.autograd.grad(outputs.float() * scale, inputs, **options)
    return tuple(None if grad is None else grad.float() / scale for grad in grads)


def _unscale(
    asides: Sequence[tuple[HookedOptimizer, list[SetAside]]], scale: float, found_inf: Tensor | None
) -> Tensor | None:
    for hooked, aside in asides:
        found_inf = hooked.unscale(aside, scale, found_inf)
    return found_inf
