"""apex's compiled module ``apex_C``: several tensors as one flat tensor, and back.

``import apex_C`` finds this module while amplab is in place of apex.
"""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype and device one after the other.

    Returns:
        ``(elements,)``.

    >>> import torch
    >>> flatten([torch.zeros(2), torch.ones(1, 1)])
    tensor([0., 0., 1.])
    """
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of ``flat``, ``(elements,)``, in the shapes of ``tensors``."""
    views: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, tensors)
    return views


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"apex_C.{name}: amplab, which is in place of apex here, does not have it: expected flatten or unflatten."
    )
