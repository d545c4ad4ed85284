"""found_inf of one iteration of a `GradScaler`: of its optimizers, and of each loss that had a `scale_loss`.

    of an optimizer    "found_inf_per_device" in the scaler's row of the optimizer: device -> ``()`` float32
    of a loss          `FoundByLoss`: ``()`` float32 for each optimizer that the backward of the loss reached

A value > 0 means an overflow. Nothing here waits for a device, but a result for the CPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.scalers import to_device

__all__ = ["FoundByLoss", "found_inf_of", "larger", "verdict_of"]

Row = dict[str, Any]  # what a scaler keeps of one optimizer


class FoundByLoss:
    """found_inf of the losses that had a `GradScaler.scale_loss` in this iteration; true if there are any."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, Tensor]] = {}  # by the id of an optimizer, then by the number of a loss

    def __bool__(self) -> bool:
        return bool(self._found)

    def has(self, optimizer: int) -> bool:
        """Return whether a `scale_loss` has unscaled gradients of the optimizer with this id."""
        return optimizer in self._found

    def note(self, optimizer: Optimizer, loss_id: int, found_inf: Tensor) -> None:
        """Note ``()`` found_inf of one backward of a loss; an overflow before stays one. Sync: none."""
        losses = self._found.setdefault(id(optimizer), {})
        losses[loss_id] = larger(losses.get(loss_id), found_inf)

    def scale_at_fault(self, optimizer: Optimizer, scales: Sequence[Tensor | None], otherwise: Tensor) -> Tensor:
        """Return the scale of the first loss that overflowed under an optimizer.

        Args:
            optimizer: any optimizer.
            scales: ``()`` float32, the scale of each loss; None for one that does not exist yet.
            otherwise: ``()`` float32, returned if no loss overflowed.

        Sync: none.
        """
        scale = otherwise
        for loss_id, found_inf in sorted(self._found.get(id(optimizer), {}).items(), reverse=True):
            own = scales[loss_id]
            if own is not None:
                scale = torch.where(to_device(found_inf, scale.device) > 0, own, scale)
        return scale

    def of_losses(self, found_inf: Tensor, rows: Mapping[int, Row]) -> dict[int, Tensor]:
        """Return found_inf of each loss of this iteration; what `GradScaler.scale` has scaled is loss 0.

        Args:
            found_inf: ``()`` float32 of all optimizers, on the device of the results.
            rows: the scaler's row of each optimizer, by its id.

        Sync: none.
        """
        if not self._found:
            return {0: found_inf}
        plain = [each for key, row in rows.items() if key not in self._found for each in _verdicts(row)]
        of_blocks = [pair for losses in self._found.values() for pair in losses.items()]
        found: dict[int, Tensor] = {}
        for loss_id, each in [*((0, each) for each in plain), *of_blocks]:
            here = to_device(each, found_inf.device).reshape(())
            found[loss_id] = larger(found.get(loss_id), here)
        return found


def found_inf_of(rows: Iterable[Row], device: torch.device) -> Tensor:
    """Return ``()`` float32 on ``device``: > 0 if found_inf of one optimizer is; 0 for none. Sync: none."""
    verdicts = [to_device(each, device).reshape(()) for row in rows for each in _verdicts(row)]
    if len(verdicts) == 1:
        return verdicts[0]
    return torch.stack(verdicts).sum() if verdicts else torch.zeros((), dtype=torch.float32, device=device)


def verdict_of(rows: Iterable[Row]) -> bool | None:
    """Return whether an optimizer overflowed; None if the step of one has not read its found_inf. Sync: none."""
    verdicts = [row.get("verdict") for row in rows if row["found_inf_per_device"]]
    return None if None in verdicts else any(verdicts)


def larger(known: Tensor | None, found_inf: Tensor) -> Tensor:
    """Return the larger of two, on the device of ``known``; ``found_inf`` if nothing is known yet. Sync: none."""
    return found_inf if known is None else torch.maximum(known, to_device(found_inf, known.device))


def _verdicts(row: Row) -> Iterable[Tensor]:
    verdicts: dict[torch.device, Tensor] = row["found_inf_per_device"]
    return verdicts.values()
