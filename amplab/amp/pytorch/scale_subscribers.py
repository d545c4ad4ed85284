"""Whom a GradScaler tells what became of each update, and what it notes for them until then.

    scale     notes the loss, and the scale that it is multiplied by
    update    tells a `ScaleRecord` for each loss that had gradients

A scale on the host is noted as a number, which costs less there than a copy; one on a device as a copy, so that nothing
waits before `ScaleSubscribers.tell` reads all in one go.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from amplab.amp.backward.records import ScaleRecord, StepOutcome

__all__ = ["ScaleSubscribers"]

_MOST = 256  # scales that are noted: a loop that never calls step would add up more and more of them


class ScaleSubscribers:
    """The callbacks of one scaler; true while there is one."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[ScaleRecord], object]] = []
        self._loss: Tensor | None = None
        self._scale: float | Tensor | None = None  # of the last loss since the last update
        self._scales: deque[float | Tensor] = deque(maxlen=_MOST)  # of each loss since the last step

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: Callable[[ScaleRecord], object]) -> Callable[[], None]:
        """Take one more; return the function that ends this."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
            if not self._callbacks:
                self._loss = self._scale = None
                self._scales.clear()

        return unsubscribe

    def note(self, loss: Tensor, scale: Tensor) -> None:
        """Take note of a loss that is scaled. Sync: none."""
        self._loss, self._scale = loss.detach(), _kept(scale)
        self._scales.append(self._scale)

    def scales_before(self, scale: Tensor, further: Iterable[Tensor | None]) -> list[float | Tensor]:
        """What the scale of each loss was in this iteration, before an update moves it. Sync: none.

        Args:
            scale: ``()``, of the losses that were noted.
            further: of the others, None where none was used yet.
        """
        own = _kept(scale) if self._scale is None else self._scale
        return [own, *(_kept(each) for each in further if each is not None)]

    def tell(
        self,
        loss_ids: Sequence[int],
        scales: Iterable[float | Tensor],
        last: StepOutcome,
        *,
        stepped: bool,
    ) -> None:
        """Call everybody with a record for each loss.

        Args:
            loss_ids: the losses that had gradients.
            scales: for each of them its scale before the update, its scale after it, and its found_inf: numbers, or
                tensors of shape ``()``.
            last: what the last step did.
            stepped: whether there was one since the last update; it has used up the backwards that were noted.

        Sync: one where the scales lie on a device.
        """
        values = _read([*scales, *(self._scales if stepped else ())])
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
    """A scale as it is now, whatever becomes of the tensor. Sync: none."""
    return scale.item() if scale.is_cpu else scale.clone()


def _read(values: list[float | Tensor]) -> list[float]:
    """Bring numbers to the host: one by one where nothing waits for it, since stacking takes longer."""
    device = values[1].device
    if device.type != "cpu":
        return torch.stack([torch.as_tensor(value, device=device) for value in values]).tolist()
    return [value if isinstance(value, float) else value.item() for value in values]
