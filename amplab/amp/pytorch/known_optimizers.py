"""The optimizers that one scaler has met: the parameters of each, and which of them another one steps, too."""

import weakref
from collections import Counter

from torch.optim import Optimizer

from amplab.amp.pytorch.optimizer_gradients import OptimizerGradients

__all__ = ["KnownOptimizers"]


class KnownOptimizers:
    """What a scaler keeps of each optimizer; it keeps none of them alive.

    Args:
        combine: keep the gradients of each in flat buffers.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self._combine = combine
        self._known: weakref.WeakKeyDictionary[Optimizer, OptimizerGradients] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> OptimizerGradients:
        """Return what is kept of ``optimizer``, its parameters as its groups list them now. Sync: none."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = OptimizerGradients(combine=self._combine)
        known.refresh(optimizer)
        return known

    def kept(self, optimizer: Optimizer) -> OptimizerGradients:
        """Return what `of` returned last, without another look at the groups. Sync: none."""
        return self._known[optimizer]

    def find_shared(self) -> None:
        """Between two iterations: find out which parameters several optimizers step, where somebody is new."""
        everyone = list(self._known.values())
        if all(known.shared is not None for known in everyone):
            return
        steppers = Counter(id(param) for known in everyone for param in known.params)
        for known in everyone:
            known.shared = [param for param in known.params if steppers[id(param)] > 1]
