"""The class behind ``multi_tensor_applier``."""

from typing import Any

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Applies an ``amp_C`` kernel to lists of tensors in apex; here these kernels are unavailable.

    Args:
        chunk_size: elements per block of a kernel.

    >>> MultiTensorApply(65536).available
    False
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise RuntimeError: ``amp_C`` is unavailable."""
        raise RuntimeError(
            "multi_tensor_applier needs the kernels of apex's amp_C, which are unavailable in amplab: check "
            "multi_tensor_applier.available first, and use torch._foreach_* or amplab.kernels instead."
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise RuntimeError: ``amp_C`` is unavailable."""
        self.check_avail()
