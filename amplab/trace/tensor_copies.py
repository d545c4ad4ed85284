"""`TensorCopy`: the value of a tensor at one moment, to restore into the same tensor, past its version counter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TensorCopy", "restore_all", "write_value"]


class TensorCopy(NamedTuple):
    """A tensor and its value; `alias` is the same storage, with a version counter that autograd does not check."""

    tensor: Tensor
    alias: Tensor
    value: Tensor
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorCopy:
        """Copy the value of a tensor."""
        return cls(tensor, tensor.data, tensor.detach().clone(), tensor.requires_grad)

    def restore(self) -> None:
        """Restore the storage, the value and `requires_grad`."""
        if self.alias.layout is not torch.strided or self.alias.is_nested:
            write_value(self.tensor, self.value)
        else:
            write_value(self.alias, self.value)
            if not self.is_in_place:
                self.tensor.data = self.alias
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)

    @property
    def is_in_place(self) -> bool:
        """Whether the tensor has the storage and the shape that it had."""
        now, before = self.tensor, self.alias
        is_same = now.layout is before.layout and now.shape == before.shape and now.stride() == before.stride()
        return is_same and now.data_ptr() == before.data_ptr()


def write_value(tensor: Tensor, value: Tensor) -> None:
    """Write a value of the same layout into a tensor, whose version does not count it."""
    # An alias of a sparse tensor gets new storage when it is written to.
    if tensor.layout is torch.sparse_coo or tensor.shape != value.shape:
        tensor.data = value.clone()
    elif tensor.layout is torch.strided and not tensor.is_nested:
        alias = tensor.data
        _once(alias, alias).copy_(_once(value, alias))
    else:
        tensor.data.copy_(value)


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` without those that `like` repeats in memory, as an expanded tensor does."""
    if 0 not in like.stride():
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in like.stride())]


def restore_all(copies: Iterable[TensorCopy]) -> None:
    """Restore copies. An exception of one propagates after the others are restored."""
    failure = None
    for copy in copies:
        try:
            copy.restore()
        except Exception as error:  # noqa: BLE001  raised below
            failure = error
    if failure is not None:
        raise failure
