"""The class behind ``multi_tensor_applier``."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

__all__ = ["MultiTensorApply"]

_Result = TypeVar("_Result")


class MultiTensorApply:
    """Calls a function of ``amp_C`` with lists of tensors.

    Args:
        chunk_size: elements per block of a kernel; ignored by amplab's kernels.

    Attributes:
        available: whether the functions can be called: always True.

    >>> import torch
    >>> from amplab.multi_tensor_apply import amp_c
    >>> flag, tensors = torch.zeros(1, dtype=torch.int32), [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> MultiTensorApply(65536)(amp_c.multi_tensor_l2norm, flag, [tensors], False)[0]
    tensor([5.])
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: apex raises here without its extension."""

    def __call__(
        self,
        op: Callable[..., _Result],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: object,
    ) -> _Result:
        """Return ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
