"""StepReport: what a scaler's step did, read from the device on request. ScaleSubscribers: callbacks after updates.

A skipped step keeps one flag for each gradient. A fused step, which skips on the device, keeps its found_inf. Nothing
is read before `StepReport.outcome`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from amplab.amp.backward.added_losses import added_losses
from amplab.amp.backward.records import ScaledLoss, ScaleRecord, StepOutcome
from amplab.scalers import is_sharded, local_shard, to_device

__all__ = ["NO_STEP_YET", "STEPPED", "ScaleSubscribers", "StepReport"]

NO_STEP_YET = StepOutcome(False, "no step yet")
STEPPED = StepOutcome(True, "parameters updated")


class StepReport:
    """One call of ``step`` that skipped, or may have skipped, the update.

    Args:
        param_groups: the optimizer's, for the names of its parameters.
        params: its parameters, each once.
        found_inf: ``()`` float32 on the device; None if the step is known to be skipped.
        scale: ``()`` float32, the loss scale; copied.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], params: Sequence[Tensor], found_inf: Tensor | None, scale: Tensor
    ) -> None:
        self._groups, self._params = param_groups, params
        self._found_inf, self._scale = found_inf, scale.detach().clone()
        self._flags = _nonfinite_flags(params) if found_inf is None else None
        self._witness = _Witness(params)
        self._outcome: StepOutcome | None = None

    def outcome(self) -> StepOutcome:
        """Return what the step did. Sync: one for found_inf and two more after an overflow; none on later calls."""
        if self._outcome is None:
            self._outcome = self._read()
        return self._outcome

    def _read(self) -> StepOutcome:
        if self._found_inf is not None and not self._found_inf.item() > 0:
            return STEPPED
        first = self._first_nonfinite()
        where = f", first in the gradient of {first}" if first else ""
        if first is None and any(map(is_sharded, self._params)):
            where = ", in a shard of another rank"
        return StepOutcome(False, f"gradient overflow at loss scale {self._scale.item()}{where}", first)

    def _first_nonfinite(self) -> str | None:
        """The parameter nearest the loss whose gradient is not finite: the last one, in the order of the groups."""
        flags = self._flags
        if flags is None and self._witness.is_there():
            flags = _nonfinite_flags(self._params)  # the gradients of this step are still there
        if flags is None:
            return None
        reached = [param for param, flag in zip(self._params, flags.tolist(), strict=True) if flag]
        return _name_of(reached[-1], self._groups) if reached else None


class _Witness:
    """One gradient and its version counter. While it is unchanged, the others are assumed to be unchanged, too."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._param = next((param for param in reversed(params) if param.grad is not None), None)
        self._grad = None if self._param is None else self._param.grad
        self._version = -1 if self._grad is None else local_shard(self._grad)._version

    def is_there(self) -> bool:
        if self._param is None or self._grad is None:
            return False
        return self._param.grad is self._grad and local_shard(self._grad)._version == self._version


@torch.no_grad()
def _nonfinite_flags(params: Sequence[Tensor]) -> Tensor | None:
    """``(params,)`` bool: x * 0 sums to 0, or to NaN if an element is inf or NaN. Sync: none."""
    grads = [param.grad for param in params]
    device = next((grad.device for grad in grads if grad is not None), None)
    if device is None:
        return None
    return torch.stack([to_device(_zero_unless_nonfinite(grad), device) for grad in grads]) != 0


def _zero_unless_nonfinite(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros(())
    values = grad._values() if grad.is_sparse else local_shard(grad)
    return values.mul(0).sum(dtype=torch.float32)


def _name_of(param: Tensor, groups: list[dict[str, Any]]) -> str | None:
    """The parameter's name if the optimizer has names, else its place."""
    for number, group in enumerate(groups):
        for index, other in enumerate(group["params"]):
            if other is param:
                names = group.get("param_names")
                return names[index] if names else f"param_groups[{number}]['params'][{index}]"
    return None


_MOST = 256  # scales noted at most: a loop that never calls step would add more and more


class ScaleSubscribers:
    """The callbacks of one scaler; true if there are any.

    `GradScaler.scale` records each loss and its scale: a number on the CPU, a copy on other devices. `tell` then reads
    all of them with one sync.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[ScaleRecord], object]] = []
        self._at_loss: list[Callable[[ScaledLoss], object]] = []
        self._loss: Tensor | None = None  # the sum of the losses since the last step
        self._has_stepped = False  # since the last loss
        self._scale: float | Tensor | None = None  # of the last loss since the last update
        self._scales: deque[float | Tensor] = deque(maxlen=_MOST)  # of each loss since the last step

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(
        self, callback: Callable[[ScaleRecord], object], at_loss: Callable[[ScaledLoss], object] | None
    ) -> Callable[[], None]:
        """Add a callback, and one for losses or None; return a function that removes them."""
        self._callbacks.append(callback)
        if at_loss is not None:
            self._at_loss.append(at_loss)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
            if at_loss in self._at_loss:
                self._at_loss.remove(at_loss)
            if not self._callbacks:
                self._loss = self._scale = None
                self._scales.clear()

        return unsubscribe

    def tell_of_loss(self, loss: ScaledLoss) -> None:
        """Call the callbacks for losses."""
        for callback in self._at_loss.copy():
            callback(loss)

    def note(self, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        """Record a loss that is scaled by `GradScaler.scale`. Sync: none."""
        self.tell_of_loss(ScaledLoss(loss, scaled))
        before, self._has_stepped = None if self._has_stepped else self._loss, False
        self._loss, self._scale = cast(Tensor, added_losses(before, loss.detach())), _kept(scale)
        self._scales.append(self._scale)

    def note_step(self) -> None:
        """Record that an optimizer has stepped: the next loss is none of its step."""
        self._has_stepped = True

    def begin_after_interrupt(self) -> None:
        """Forget the losses of an iteration that an interrupt has ended."""
        self._loss = None

    def scales_before(self, scales: Sequence[Tensor | None]) -> list[float | Tensor | None]:
        """Return the scale of each loss in this iteration, before an update moves it. Sync: none.

        Args:
            scales: ``()``, one for each loss; None for a loss not used yet. The recorded losses belong to the first.
        """
        first, *others = [None if each is None else _kept(each) for each in scales]
        return [first if self._scale is None else self._scale, *others]

    def tell(
        self,
        loss_ids: Sequence[int],
        scales: Iterable[float | Tensor | None],
        last: StepOutcome,
        *,
        stepped: bool,
    ) -> None:
        """Call every callback with a record for each loss.

        Args:
            loss_ids: the losses that had gradients.
            scales: for each of them its scale before the update, its scale after it, and its found_inf: numbers, or
                tensors of shape ``()``.
            last: what the last step did.
            stepped: whether there was one since the last update; the next step then starts with no recorded backwards.

        Sync: one if the scales are on a device.
        """
        values = _read([each for each in (*scales, *(self._scales if stepped else ())) if each is not None])
        scaled_by = tuple(values[3 * len(loss_ids) :])
        self._scale = None
        if stepped:
            self._scales.clear()
        for place, loss_id in enumerate(loss_ids):
            scale, next_scale, found_inf = values[3 * place : 3 * place + 3]
            skipped = found_inf > 0 and not last.stepped
            first = last.first_nonfinite if skipped else None
            record = ScaleRecord(loss_id, scale, next_scale, found_inf > 0, skipped, first, self._loss, scaled_by)
            for callback in self._callbacks.copy():
                callback(record)


def _kept(scale: Tensor) -> float | Tensor:
    """Return the current value of a scale. Sync: none."""
    return scale.item() if scale.is_cpu else scale.clone()


def _read(values: list[float | Tensor]) -> list[float]:
    """Return the values as numbers; with one sync for all tensors on a device other than the CPU."""
    device = next((value.device for value in values if isinstance(value, Tensor) and not value.is_cpu), None)
    if device is None:
        return [float(value) for value in values]
    numbers: list[float] = torch.stack([torch.as_tensor(value, device=device) for value in values]).tolist()
    return numbers
