"""The weights before a step: whether its forward has written to them, and those that a forward writes, as they were.

A forward may write to weights that no optimizer steps: a teacher that follows the weights of its student, as in MoCo
and BYOL. A step that fails after that is taken back with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor, nn

from amplab.trace.tensor_copies import TensorCopy, restore_all

__all__ = ["KeptWeights"]

_MOST_BYTES = 2**28  # of weights of which it is not known yet whether a forward writes to them


class KeptWeights:
    """The weights of an experiment before a step.

    Args:
        weights: All of them.
        unstepped: Those that no optimizer steps.
        written: What `written` returned after earlier steps: these are copied. None for the first steps: all that are
            not stepped are copied, up to 256 MiB. An edit of a weight's `.data` is noticed in a copy alone.

    >>> teacher = nn.Parameter(torch.ones(2), requires_grad=False)
    >>> kept = KeptWeights([teacher], [teacher], written=None)
    >>> _ = teacher.data.mul_(0.5)
    >>> kept.restore(), teacher.tolist()
    (True, [1.0, 1.0])
    """

    def __init__(
        self, weights: Iterable[Tensor], unstepped: Sequence[Tensor] = (), written: Set[int] | None = frozenset()
    ) -> None:
        plain = (each for each in weights if type(each) in (Tensor, nn.Parameter))  # others may have no place
        self._versions = {id(each): (each, _version(each)) for each in plain if each.layout is torch.strided}
        if written is None and sum(each.nbytes for each in unstepped) > _MOST_BYTES:
            written = frozenset()
        self._unstepped = unstepped
        self._copies = {id(each): TensorCopy.of(each) for each in unstepped if written is None or id(each) in written}

    def restore(self) -> bool:
        """Restore what a forward writes to, as far as that is known; return whether all weights are as before."""
        if any(self._has_other_version(key) for key in self._versions.keys() - self._copies.keys()):
            return False
        self.restore_copies()
        return True

    def restore_copies(self) -> None:
        """Restore what a forward writes to, as far as that is known."""
        restore_all(self._copies.values())

    def written(self) -> Set[int]:
        """Return the ids of the unstepped weights to which the step has written."""
        return {id(each) for each in self._unstepped if self._is_other(each)}

    def _is_other(self, weight: Tensor) -> bool:
        copy = self._copies.get(id(weight))
        return self._has_other_version(id(weight)) or not (copy is None or torch.equal(weight, copy.value))

    def _has_other_version(self, key: int) -> bool:
        weight, before = self._versions.get(key, (None, None))
        return weight is not None and _version(weight) != before


def _version(weight: Tensor) -> tuple[int, int]:
    """Return numbers that change when a weight is written in place, or gets another storage. Sync: none."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
