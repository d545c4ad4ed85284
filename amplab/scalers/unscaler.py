"""Take the loss scale out of gradients in place, on the device, and say whether they were finite.

Which scale comes next is the rule's business (``rules.py``); gradients that go to float32 masters are in
``master_weights.py``.
"""

import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from amplab.kernels import ParameterList, refusal_naming, unscale_

__all__ = ["FlatGrads", "Unscaler", "inverse_scale", "strided_grad"]


def inverse_scale(scale: float | Tensor, device: torch.device) -> Tensor:
    """``1 / scale`` as a ``(1,)`` float32 tensor on ``device``, the reciprocal taken in float64.

    Raises:
        ValueError: ``scale`` is a number that is not finite and > 0. (A tensor is taken as it is: no sync.)

    Sync: none.
    """
    if isinstance(scale, Tensor):
        return scale.detach().to(device, torch.float64).reciprocal().float().reshape(1)
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale={scale}: expected a finite number > 0, the scale that the loss was multiplied by.")
    return torch.tensor([1.0 / scale], dtype=torch.float32, device=device)


class FlatGrads(NamedTuple):
    """Gradients in two cuts.

    Attributes:
        tensors: as few as they lie in; between them may be padding, which is zero and has to stay so.
        parts: strided, one for each gradient.
    """

    tensors: list[Tensor]
    parts: list[Tensor]


class Unscaler:
    """Unscale the gradients of a list of parameters, grouping the list by device once and not at every step.

    ::

        grad <- round(grad / scale);  found_inf <- 1.0 where a gradient or its quotient is inf or NaN

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
            params: parameters; those without a gradient are left out. Sparse gradients are coalesced first.
            scale: > 0, a number or a one-element tensor on the device.
            found_inf: ``(1,)`` float32, to go on with the verdict of an earlier call; None for a fresh one.

        Returns:
            ``(1,)`` float32: 1.0 where a gradient was not finite or overflowed, else 0.0.

        Raises:
            ValueError: a scale that is not finite and > 0.
            RuntimeError: a gradient that is integer, complex or expanded, or two that overlap in memory; names the
                parameter by its place.

        Sync: none.
        """
        params = list(params)
        if not self._knows(params):
            self._group(params)
        if found_inf is None:
            found_inf = torch.zeros(1, device=next(iter(self._by_device), None))
        for device, (group, known) in self._by_device.items():
            inverse = self._inverse_on(device, scale)
            here = found_inf if found_inf.device == device else torch.zeros(1, device=device)
            if known.unscale_grads_(here, inverse) is None:
                self._unscale_listed(group, here, inverse)
            if here is not found_inf:
                found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device, non_blocking=True)))
        return found_inf

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers that gradients lie in: none here; see `CombinedUnscaler`."""
        return ()

    def place(self, param: Tensor) -> Tensor:
        """Return where a new gradient of ``param`` is to be written: new memory. Sync: none."""
        return torch.empty_like(param)

    def settle(self, params: Iterable[Tensor]) -> None:
        """Put the gradients of ``params`` where they belong, once they are complete: they stay where they are."""

    def flat_grads(self, params: Iterable[Tensor]) -> FlatGrads:
        """Return the gradients of ``params`` in as few tensors as they lie in: here one for each. Sync: none."""
        grads = [strided_grad(param) for param in params if param.grad is not None]
        return FlatGrads(grads, grads)

    def _unscale_listed(self, group: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        """Make a list of the gradients for the general operator, and name the parameter of one that it refuses."""
        params = [param for param in group if param.grad is not None]
        try:
            unscale_([strided_grad(param) for param in params], found_inf, inverse)
        except RuntimeError as error:
            places = {id(param): index for index, param in enumerate(self._params)}
            names = [f"the gradient of parameter {places[id(param)]}" for param in params]
            raise refusal_naming(error, names) from None

    def _inverse_on(self, device: torch.device, scale: float | Tensor) -> Tensor:
        """The reciprocal on ``device``, made anew only when a number has changed."""
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
        self._params = params
        self._by_device = {device: (group, ParameterList(group)) for device, group in groups.items()}


def strided_grad(param: Tensor) -> Tensor:
    """The strided tensor of the numbers in ``param.grad``, which the kernels work on.

    A sparse gradient is coalesced first, and replaced by what came of it: the sum of duplicates may overflow.

    Sync: none for a strided one; coalescing waits for the device.
    """
    grad = param.grad
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        param.grad = grad = grad.coalesce()
    return grad._values()
