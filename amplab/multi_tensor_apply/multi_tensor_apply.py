"""The class behind ``multi_tensor_applier``."""

from typing import Any

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """What applied an ``amp_C`` kernel to lists of tensors, in chunks; without these kernels it says so.

    Args:
        chunk_size: elements that one block of a kernel works on.

    >>> MultiTensorApply(65536).available
    False
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise RuntimeError: there is no ``amp_C``."""
        raise RuntimeError(
            "multi_tensor_applier needs the kernels of apex's amp_C, which amplab does not have: ask "
            "multi_tensor_applier.available first, and use torch._foreach_* or amplab.kernels instead."
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise RuntimeError: there is no ``amp_C``."""
        self.check_avail()
