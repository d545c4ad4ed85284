"""`to_device`: a tensor on another device, as soon as what runs there can read it."""

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None, *, copy: bool = False) -> Tensor:
    """Return ``tensor`` on ``device``, waiting for the copy only where what runs next would not.

    Work on a CUDA device begins after the copies that were enqueued before it. The CPU runs an op at once: there
    ``non_blocking=True`` gives it memory that is not written yet.

    Args:
        tensor: a tensor on any device.
        device: where it is needed.
        dtype: convert to it as well.
        copy: return another tensor even if nothing has to change.

    Sync: none; one from a CUDA device to the CPU.

    Reference: ``torch.Tensor.to``.

    >>> to_device(torch.ones(1), torch.device("cpu"), torch.float64)
    tensor([1.], dtype=torch.float64)
    """
    return tensor.to(device, tensor.dtype if dtype is None else dtype, non_blocking=device.type != "cpu", copy=copy)
