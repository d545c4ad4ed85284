"""ClearMark: whether ``zero_grad`` was called while gradients are still scaled, which only the model's parameters have.

``optimizer.zero_grad()`` clears what is in its groups: masters, not the model's half parameters. torch has no hook for
it, so one master has a gradient meanwhile, and is looked at before the next backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amplab.scalers import local_shard
from amplab.scalers.master_weights import MasterPair

__all__ = ["ClearMark"]

_MADE = 1e-30  # of the gradient of a master that had none: clipping keeps it, and no norm has it


class ClearMark(NamedTuple):
    """The gradient of one master.

    Attributes:
        master: the master.
        grad: its gradient.
        version: of the gradient, which counts the writes to it.
        is_made: whether the master had none.
    """

    master: Tensor
    grad: Tensor
    version: int
    is_made: bool

    @classmethod
    def on(cls, pairs: Sequence[MasterPair]) -> "ClearMark | None":
        """Mark the smallest master whose half parameter has a gradient; return None if there is none. Sync: none."""
        reached = [pair.master for pair in pairs if pair.model.grad is not None]
        if not reached:
            return None
        master = min(reached, key=Tensor.numel)
        made = master.grad is None
        grad = torch.full_like(master, _MADE, requires_grad=False) if master.grad is None else master.grad
        master.grad = grad
        return cls(master, grad, local_shard(grad)._version, made)

    @property
    def is_cleared(self) -> bool:
        """Whether ``zero_grad`` was called since. Sync: one if the gradient was written to, as by clipping."""
        if self.master.grad is not self.grad:
            return True
        return local_shard(self.grad)._version != self.version and not local_shard(self.grad).any()

    def remove(self) -> None:
        """Take back the gradient that `on` has made."""
        if self.is_made and self.master.grad is self.grad:
            self.master.grad = None
