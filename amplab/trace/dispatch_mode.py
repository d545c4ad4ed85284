"""`DispatchMode`: the base of the modes that intercept every aten op, also those of autograd's backward."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that can be entered without importing the compiler, which takes seconds.

    A subclass implements ``__torch_dispatch__``.

    Reference: torch.utils._python_dispatch.TorchDispatchMode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for True torch wraps the mode by a function of the compiler
