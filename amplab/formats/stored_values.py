"""`stored_values`: the elements of a tensor that are in memory, for whatever measures values."""

import torch
from torch import Tensor

__all__ = ["stored_values"]


def stored_values(tensor: Tensor) -> Tensor:
    """Return the elements that are in memory, of a sparse or jagged tensor too; none of another nested one.

    >>> stored_values(torch.tensor([0.0, 2.0]).to_sparse())
    tensor([2.])
    """
    if tensor.layout is torch.strided:
        return torch.empty(0) if tensor.is_nested else tensor
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
