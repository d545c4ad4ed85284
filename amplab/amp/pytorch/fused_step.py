"""The step of optimizers that unscale gradients themselves (``fused=True``).

    optimizer.grad_scale, optimizer.found_inf     set during ``step``, which unscales and skips by itself

torch's fused SGD allocates its momentum buffers uninitialized. After an overflow it returns before it has written
them, and the next step uses the uninitialized values as momentum. Therefore a step that would create such buffers is
not run after an overflow: see `makes_momentum`.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.pytorch.optimizer_gradients import OptimizerGradients
from amplab.optimizers import FusedOptimizer

__all__ = ["lend_scale", "leaves_gradients_unscaled", "makes_momentum", "take_back_scale", "wants_scaler"]


def wants_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``step`` takes the scaler as a keyword argument; warn, as torch does, that this is deprecated."""
    if "grad_scaler" not in inspect.signature(optimizer.step).parameters:
        return False
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near future "
        "GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and let the "
        "optimizer use them directly.",
        FutureWarning,
        stacklevel=5,
    )
    return True


@contextlib.contextmanager
def lend_scale(optimizer: Any, scale: Tensor | None, found_inf: Tensor) -> Iterator[None]:
    """Set ``grad_scale`` and ``found_inf`` on an optimizer for the duration of a block.

    Args:
        optimizer: an optimizer whose step reads both. If it has a ``grad_scale`` already, the two are multiplied, and
            the attribute is deleted afterwards.
        scale: ``()`` float32; None if the gradients are unscaled.
        found_inf: ``()`` float32; the step is skipped if it is > 0.

    Sync: none.
    """
    preset = getattr(optimizer, "grad_scale", None)
    try:
        optimizer.grad_scale = preset if scale is None else scale if preset is None else scale * preset
        optimizer.found_inf = found_inf
        yield
    finally:
        take_back_scale(optimizer)


def take_back_scale(optimizer: Any) -> None:
    """Delete ``grad_scale`` and ``found_inf``, of a block that has ended or was interrupted."""
    vars(optimizer).pop("grad_scale", None)
    vars(optimizer).pop("found_inf", None)


def leaves_gradients_unscaled(optimizer: Optimizer) -> bool:
    """Return whether its fused step leaves gradients unscaled, except after an overflow."""
    if isinstance(optimizer, FusedOptimizer):
        return not optimizer.keeps_grads_scaled
    return isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad))


def makes_momentum(optimizer: Optimizer, known: OptimizerGradients) -> bool:
    """Return whether a step would create a momentum buffer.

    Args:
        optimizer: any optimizer.
        known: the record of this optimizer. It stores that every parameter has its buffer.

    Sync: none.
    """
    if not isinstance(optimizer, torch.optim.SGD) or isinstance(optimizer, FusedOptimizer):
        return False
    if known.momentum_of is optimizer.state:
        return False
    with_momentum = [param for group in optimizer.param_groups if group["momentum"] != 0 for param in group["params"]]
    without = [param for param in with_momentum if optimizer.state.get(param, {}).get("momentum_buffer") is None]
    if not without:
        known.momentum_of = optimizer.state
    return any(param.grad is not None for param in without)
