"""Parameters as they are given to what keeps something beside each of them: a list of tensors, and nothing else."""

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["tensors_of"]


def tensors_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return ``params`` as a list.

    Raises:
        TypeError: a module, one tensor, or something in the list that is no tensor.

    Sync: none.
    """
    if isinstance(params, nn.Module):
        raise TypeError(f"params is a {type(params).__name__}: expected tensors; pass model.parameters().")
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params is a {type(params).__name__}: expected several tensors; pass a list of them.")
    listed = list(params)
    for index, param in enumerate(listed):
        if not isinstance(param, Tensor):
            raise TypeError(f"params[{index}]={param!r}: expected a tensor; pass model.parameters().")
    return listed
