"""Unscale gradients in place, on the device, and report whether they were finite.

The rule decides which scale comes next (``rules.py``); unscaling into float32 masters is in ``master_weights.py``,
into flat buffers in ``combined_unscaler.py``.
"""

import operator
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amplab.kernels import ParameterList, is_refusal, refusal_naming, unscale_
from amplab.scalers.to_device import to_device

__all__ = [
    "FlatGrads",
    "Unscaler",
    "gathered_found_inf",
    "inverse_scale",
    "is_sharded",
    "local_shard",
    "strided_grad",
    "summed_values",
    "tensors_of",
]

_PLAIN = (Tensor, nn.Parameter)


def gathered_found_inf(found: Mapping[torch.device, Tensor], found_inf: Tensor | None) -> Tensor:
    """Return found_inf of all devices on one device.

    Args:
        found: ``(1,)`` float32 of each device.
        found_inf: ``(1,)`` float32 of an earlier call, to be updated; None for a new one on the first device.

    Sync: none.
    """
    if found_inf is None:
        found_inf = torch.zeros(1, dtype=torch.float32, device=next(iter(found), None))
    for here in found.values():
        found_inf.copy_(torch.maximum(found_inf, to_device(here, found_inf.device)))
    return found_inf


def inverse_scale(scale: float | Tensor, device: torch.device) -> Tensor:
    """``1 / scale`` as a ``(1,)`` float32 tensor on ``device``, the reciprocal taken in float64.

    Raises:
        ValueError: ``scale`` is a number that is not finite and > 0. (The value of a tensor is not checked: no sync.)

    Sync: none.
    """
    if isinstance(scale, Tensor):
        return to_device(scale.detach(), device, torch.float64).reciprocal().float().reshape(1)
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale={scale}: expected a finite number > 0, the scale that multiplied the loss.")
    return torch.full((1,), 1.0 / scale, dtype=torch.float32, device=device)


class FlatGrads(NamedTuple):
    """The same gradients as few tensors and one by one.

    Attributes:
        tensors: as few as possible; they may include padding, which is zero and has to stay zero.
        parts: strided, one for each gradient.
        summed: what a norm is taken of: `tensors`, but of sparse gradients with duplicates copies with their sums.
    """

    tensors: list[Tensor]
    parts: list[Tensor]
    summed: list[Tensor]


class Unscaler:
    """Unscale the gradients of a list of parameters; the list is grouped by device once, not at every step.

    ::

        grad <- round(grad / scale);  found_inf <- 1.0 if a gradient or its quotient is inf or NaN

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([256.0, 512.0])
    >>> found_inf = Unscaler().unscale_([weight], 128.0)
    >>> weight.grad.tolist(), found_inf.item()
    ([2.0, 4.0], 0.0)
    """

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._by_device: dict[torch.device, tuple[list[Tensor], ParameterList]] = {}
        self._inverse: dict[torch.device, Tensor] = {}
        self._scale: float | None = None

    def unscale_(self, params: Iterable[Tensor], scale: float | Tensor, *, found_inf: Tensor | None = None) -> Tensor:
        """Divide every ``param.grad`` by ``scale`` in place, each gradient once however often its parameter is listed.

        Args:
            params: parameters; those without a gradient are skipped; for sparse gradients see `strided_grad`.
            scale: > 0, a number or a one-element tensor on the device.
            found_inf: ``(1,)`` float32 of an earlier call, to be updated; None for a new one.

        Returns:
            ``(1,)`` float32: 1.0 if a gradient was not finite or its quotient overflowed, else 0.0.

        Raises:
            ValueError: a scale that is not finite and > 0.
            RuntimeError: a gradient that is integer, complex or expanded, or two that overlap in memory; the message
                gives the index of the parameter.

        Sync: none; one for sparse float16 gradients that are not coalesced.
        """
        params = list(params)
        if not self._knows(params):
            self._group(params)
        if found_inf is None:
            found_inf = torch.zeros(1, dtype=torch.float32, device=next(iter(self._by_device), None))
        for device, (group, known) in self._by_device.items():
            inverse = self._inverse_on(device, scale)
            here = found_inf if found_inf.device == device else torch.zeros(1, dtype=torch.float32, device=device)
            if known.unscale_grads_(here, inverse) is None:
                self._unscale_listed(group, here, inverse)
            if here is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, to_device(here, found_inf.device)))
        return found_inf

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers of the gradients: none here; see `CombinedUnscaler`."""
        return ()

    def place(self, param: Tensor) -> Tensor:
        """Return the memory for a new gradient of ``param``: here new memory. Sync: none."""
        return torch.empty_like(param)

    def settle(self, params: Iterable[Tensor]) -> None:
        """Move complete gradients of ``params`` to their buffers: here there are none, and nothing moves."""

    def flat_grads(self, params: Iterable[Tensor]) -> FlatGrads:
        """Return the gradients of ``params`` in as few tensors as possible: here one for each.

        Sync: none; one for sparse gradients that are not coalesced.
        """
        params = list(params)
        grads = [strided_grad(param) for param in params if param.grad is not None]
        summed = [summed_values(param.grad) for param in params if param.grad is not None]
        return FlatGrads(grads, grads, summed)

    def _unscale_listed(self, group: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        """Pass a list of the gradients to the general operator; name the parameter if it refuses one."""
        params = [param for param in group if param.grad is not None]
        try:
            unscale_([strided_grad(param) for param in params], found_inf, inverse)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            places = {id(param): index for index, param in enumerate(self._params)}
            names = [f"the gradient of parameter {places[id(param)]}" for param in params]
            raise refusal_naming(error, names) from None

    def _inverse_on(self, device: torch.device, scale: float | Tensor) -> Tensor:
        """Return the reciprocal on ``device``, computed again only when a number has changed."""
        if isinstance(scale, Tensor):
            return inverse_scale(scale, device)
        if scale != self._scale:
            self._inverse, self._scale = {}, scale
        if device not in self._inverse:
            self._inverse[device] = inverse_scale(scale, device)
        return self._inverse[device]

    def _knows(self, params: list[Tensor]) -> bool:
        return len(params) == len(self._params) and all(map(operator.is_, params, self._params))

    def _group(self, params: list[Tensor]) -> None:
        groups: dict[torch.device, list[Tensor]] = {}
        for param in {id(param): param for param in params}.values():
            groups.setdefault(param.device, []).append(param)
        self._by_device = {device: (group, ParameterList(group)) for device, group in groups.items()}
        self._params = params  # last: an interrupt before it groups again


def strided_grad(param: Tensor) -> Tensor:
    """Return the strided tensor with the values of ``param.grad``, which is what `unscale_` writes to.

    A sparse gradient is replaced by a copy, as it may share its values with the gradient of another embedding. As in
    ``torch.amp.GradScaler``, a float16 one is coalesced, because the sum of duplicates may overflow, and others keep
    their duplicates, so that an optimizer adds them in the order in which it would without a scaler. Of a DTensor it is
    the shard of this rank.

    Raises:
        ValueError: ``param`` has no gradient.

    Sync: none, except for a sparse float16 gradient: coalescing waits for the device.
    """
    grad = param.grad
    if grad is None:
        raise ValueError("param.grad is None: expected a parameter with a gradient; leave this one out.")
    if not grad.is_sparse:
        return local_shard(grad)
    with torch.no_grad():
        sums = grad.dtype is torch.float16 and not grad.is_coalesced()
        param.grad = own = grad.coalesce() if sums else grad.clone()
    return own._values()


def summed_values(grad: Tensor) -> Tensor:
    """Return the elements of a gradient, of a sparse one the sums of duplicates; of a DTensor the shard of this rank.

    Sync: none; one for sparse gradients that are not coalesced.
    """
    return grad.coalesce()._values() if grad.is_sparse else local_shard(grad)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, as the parameters of FSDP2 (``fully_shard``) are. Sync: none."""
    if type(tensor) in _PLAIN:
        return False
    dtensors = sys.modules.get("torch.distributed.tensor")  # its import takes longer than that of amplab
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` that this rank holds, in the same memory: of a DTensor its shard, else all.

    Sync: none.
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    return shard


def tensors_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return ``params`` as a list.

    Raises:
        TypeError: a module, a single tensor, or an item that is not a tensor.

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
