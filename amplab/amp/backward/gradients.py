"""Gradients of several backwards kept apart, so that only the new ones are unscaled.

aside = set_aside(params)              before the backward: every .grad becomes None
put_back(aside)                        after an exception: as it was, new gradients dropped
add_unscaled(aside, scale)             after the backward: .grad <- old + new / scale
add_scaled(aside, factor)              the same, left scaled:  .grad <- old * factor + new
"""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amplab.kernels import unscale_add
from amplab.scalers import Unscaler, inverse_scale

__all__ = ["SetAside", "add_scaled", "add_unscaled", "bookkeeping", "put_back", "reached_first", "set_aside"]


class SetAside(NamedTuple):
    """A parameter, and the gradient that it had."""

    param: Tensor
    grad: Tensor


def bookkeeping() -> contextlib.AbstractContextManager[Any]:
    """Let the block pass by every function mode: under an engine each look at a ``.grad`` would go through Python."""
    return torch._C.DisableTorchFunction()


def set_aside(params: Iterable[Tensor], *, copy_shared: bool = False) -> list[SetAside]:
    """Take the gradients off ``params``. Sync: none.

    Args:
        params: any.
        copy_shared: copy a gradient that is a part of larger memory: where that is one of DistributedDataParallel's
            buckets the next backward writes there. Not for buffers of our own, which no backward writes.
    """
    aside = [SetAside(param, grad) for param in params if (grad := param.grad) is not None]
    for param, _ in aside:
        param.grad = None
    return [SetAside(param, _copied(grad)) for param, grad in aside] if copy_shared else aside


def _copied(grad: Tensor) -> Tensor:
    """The gradient, or a copy where its memory holds more than it."""
    shares = grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes
    return grad.clone() if shares else grad


def put_back(aside: Iterable[SetAside]) -> None:
    """Give the parameters back the gradients that they had, in the place of any newer ones. Sync: none."""
    for param, grad in aside:
        param.grad = grad


def add_unscaled(
    params: list[Tensor],
    aside: list[SetAside],
    scale: float | Tensor,
    unscaler: Unscaler,
    found_inf: Tensor | None,
) -> Tensor:
    """Divide the new gradients of ``params`` by ``scale``, then add those that were set aside.

    Args:
        params: everything that the backward may have reached.
        aside: what `set_aside` took off them.
        scale: that of the new gradients, a number or a one-element tensor on the device.
        unscaler: kept from call to call, for its grouping of ``params``; it may leave gradients in flat buffers.
        found_inf: ``(1,)`` float32 to go on with; None for a fresh one.

    Returns:
        ``(1,)`` float32: 1.0 where a new gradient is inf or NaN.

    Sync: none.
    """
    found_inf = _add_unscaled(params, aside, scale, unscaler, found_inf)
    unscaler.settle(params)
    return found_inf


def _add_unscaled(
    params: list[Tensor],
    aside: list[SetAside],
    scale: float | Tensor,
    unscaler: Unscaler,
    found_inf: Tensor | None,
) -> Tensor:
    if not aside:
        return unscaler.unscale_(params, scale, found_inf=found_inf)
    # One pass over the gradients that have something to be added to, unless they are sparse.
    sums = [old for old in aside if old.param.grad is not None and not (old.grad.is_sparse or old.param.grad.is_sparse)]
    summed = {id(old.param) for old in sums}
    found_inf = unscaler.unscale_([param for param in params if id(param) not in summed], scale, found_inf=found_inf)
    for device, here in _by_device(sums).items():
        found_here = torch.zeros(1, device=device)
        inverse = inverse_scale(scale, device)
        unscale_add([old.param.grad for old in here], [old.grad for old in here], found_here, inverse)
        found_inf = torch.maximum(found_inf, found_here.to(found_inf.device))
    put_back(sums)
    add_scaled([old for old in aside if id(old.param) not in summed], 1.0)
    return found_inf


def add_scaled(aside: Iterable[SetAside], factor: float) -> None:
    """Add the gradients that were set aside, times ``factor``, to the new ones, whatever the scale of these.

    Sync: none.
    """
    for param, old in aside:
        if factor != 1.0:
            old.mul_(factor)
        new = param.grad
        if new is None:
            param.grad = old
        else:
            param.grad = (
                new + old if old.is_sparse else old.add_(new)
            )  # torch adds sparse to dense, not dense to sparse


def reached_first(params: Iterable[Tensor]) -> Tensor | None:
    """Return the parameter nearest the loss whose gradient is not finite: the last one, in the order of the model.

    Sync: one for each parameter that is looked at.
    """
    for param in reversed(list(params)):
        grad = param.grad
        if grad is not None and grad.is_sparse:
            grad = grad.coalesce().values()
        if grad is not None and not grad.isfinite().all():
            return param
    return None


def _by_device(aside: list[SetAside]) -> dict[torch.device, list[SetAside]]:
    groups: dict[torch.device, list[SetAside]] = {}
    for old in aside:
        groups.setdefault(old.grad.device, []).append(old)
    return groups
