"""The loss that `scale_loss` is given: what is refused at once, and what a backward that fails says of it.

A loss may have any shape and need no gradient, as in apex, while nobody calls backward on it. torch's own words, when
somebody does, name neither.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["checked_loss", "explaining_backward"]

_NEEDS_NO_GRADIENT = "does not require grad"
_NO_SCALAR = "grad can be implicitly created only for scalar outputs"


def checked_loss(loss: Any) -> Tensor:
    """Return the loss.

    Raises:
        TypeError: no tensor, or one of integers, booleans or complex numbers.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"scale_loss got a loss of type {type(loss).__name__}: expected the tensor to run backward from."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"scale_loss got a loss of {loss.dtype}: expected a floating tensor, since no gradient flows through "
            "others; pass the loss before it is rounded or counted, not an accuracy."
        )
    return loss


@contextlib.contextmanager
def explaining_backward(loss: Tensor) -> Iterator[None]:
    """Say of a backward in the block that torch refuses what is the matter with ``loss``.

    Raises:
        RuntimeError: the loss needs no gradient, or is of several elements; from torch's own.
    """
    try:
        yield
    except RuntimeError as error:
        said = _explanation(loss, str(error))
        if said is None:
            raise
        raise RuntimeError(said) from error


def _explanation(loss: Tensor, said: str) -> str | None:
    if not loss.requires_grad and _NEEDS_NO_GRADIENT in said:
        return (
            "scale_loss got a loss that requires no gradient: expected one computed from parameters that do; look for "
            "detach(), torch.no_grad(), torch.tensor(...) around a loss, or parameters that are all frozen."
        )
    if loss.numel() != 1 and _NO_SCALAR in said:
        return (
            f"scale_loss got a loss of shape {tuple(loss.shape)}: expected one element to run backward from; call "
            "scaled_loss.mean().backward() or scaled_loss.sum().backward()."
        )
    return None
