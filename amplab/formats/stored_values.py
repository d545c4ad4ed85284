"""The elements of a tensor that are in memory, for whatever measures values.

has_values       whether there are any elements to measure
stored_values    them, of a tensor of any layout
"""

import torch
from torch import Tensor

__all__ = ["has_values", "stored_values"]


def has_values(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor can be read; torch would crash where they cannot.

    They cannot on the meta device, and where the storage was resized below them, as FSDP frees gathered weights. A
    tensor without elements can be read, and so can a ZeroTensor of forward-mode AD by `stored_values`. Sync: none.

    >>> freed = torch.ones(2)
    >>> _ = freed.untyped_storage().resize_(0)
    >>> has_values(freed), has_values(torch.ones(2, device="meta")), has_values(torch.ones(2))
    (False, False, True)
    """
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return True
    tensor = tensor.values() if tensor.is_nested else tensor
    return tensor.untyped_storage().nbytes() >= _last_byte(tensor)


def _last_byte(tensor: Tensor) -> int:
    """Return where the last element of a strided tensor ends in its storage, 0 if there is none."""
    numel = tensor.numel()
    if numel and not tensor.is_contiguous():
        numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + numel) * tensor.itemsize if numel else 0


def stored_values(tensor: Tensor) -> Tensor:
    """Return the elements that are in memory, of a sparse or nested tensor too; none where `has_values` is False.

    Of a ZeroTensor, which has no memory, zeros of its shape.

    >>> stored_values(torch.tensor([0.0, 2.0]).to_sparse())
    tensor([2.])
    """
    if not has_values(tensor):
        return torch.empty(0, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.values()
    if tensor._is_zerotensor():  # a mode would read it like any other tensor
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return tensor
