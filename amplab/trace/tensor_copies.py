"""A tensor and the value that it is to have again."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["TensorCopy"]


class TensorCopy(NamedTuple):
    """A tensor and its value; `alias` is the same memory, with a version of its own that autograd does not watch."""

    tensor: Tensor
    alias: Tensor
    value: Tensor
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorCopy":
        """Copy a tensor's value."""
        return cls(tensor, tensor.data, tensor.detach().clone(), tensor.requires_grad)

    def restore(self) -> None:
        """Give the tensor its memory, its value and its requires_grad back."""
        self.alias.copy_(self.value)
        if self.tensor.data_ptr() != self.alias.data_ptr():
            self.tensor.data = self.alias
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
