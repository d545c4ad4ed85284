"""One flat buffer: the gradients of some parameters on one device, in one dtype, one behind the other.

    arrivals()            what the gradients are now: where they lie, new ones, none; None where one does not fit
    unscale_(arrivals)    part <- round(gradient / scale), be it new or in its place, and every gradient its part

A gradient fresh from backward is read once and written once, unscaled on its way into the buffer. Were backward to add
to a cleared buffer instead, it would be read and written twice, -0.0 become 0.0, and no gradient stay None.
Which buffers there are, and what broke a view, is in ``flat_gradients.py``.
"""

import contextlib
import operator
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amplab.kernels import unscale_, unscale_copy

__all__ = ["Arrivals", "FlatBuffer", "aligned_size"]

_ALIGN, _PADDING = 16, 32
_KIND = operator.attrgetter("dtype", "is_cpu", "requires_grad")  # which GPU it is the kernel looks at
_SHAPE = operator.attrgetter("shape")


def aligned_size(numel: int) -> int:
    """Return the elements that a gradient takes in a buffer: its own up to a multiple of 16, and 32 of padding.

    >>> aligned_size(1), aligned_size(17)
    (48, 64)

    Reference: ``get_aligned_storage_size`` of Ascend's apex.
    """
    return -(-numel // _ALIGN) * _ALIGN + _PADDING


class Arrivals(NamedTuple):
    """What the gradients of a buffer are at one moment.

    Attributes:
        whole: every parameter has its gradient in its place, so that the buffer can be worked on as one tensor.
        kept: else the gradients that lie in their places.
        new: and those that lie elsewhere.
        indices: the numbers of the parameters of ``new``.
    """

    whole: bool
    kept: list[Tensor]
    new: list[Tensor]
    indices: Sequence[int]

    def __bool__(self) -> bool:
        """Whether there is any gradient."""
        return self.whole or bool(self.kept) or bool(self.new)


class FlatBuffer:
    """A buffer with a part for each of some parameters.

    Args:
        params: each has a gradient, all on one device and in one dtype; their values are not copied here.

    Attributes:
        tensor: ``(elements,)``, zeros.
        params: as given.
        views: the part of each in its shape, and in its order in memory, such as channels-last.
    """

    def __init__(self, params: list[Tensor]) -> None:
        sizes = [aligned_size(param.numel()) for param in params]
        first = params[0].grad
        self.tensor = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.params = params
        parts = self.tensor.split(sizes)
        self.views = [_view_like(part[: param.numel()], param) for param, part in zip(params, parts, strict=True)]
        self._shapes = [param.shape for param in params]
        self._addresses = [view.data_ptr() for view in self.views]
        self._lent = [view.detach() for view in self.views]
        self._kind = (first.dtype, first.is_cpu, False)
        self._start = self.tensor.data_ptr()
        self._end = self._start + self.tensor.nbytes

    def arrivals(self, only: Collection[int] | None = None) -> Arrivals | None:
        """Look where the gradients are.

        Args:
            only: look at these parameters alone, by ``id``; None for all.

        Returns:
            None where one does not fit its part as it is: it was converted, is sparse, carries a graph, or lies in the
            part of another.

        Sync: none.
        """
        grads = [param.grad for param in self.params]
        if only is None:
            with contextlib.suppress(RuntimeError, TypeError):  # a sparse one has no address, nor has None
                return self._sort(range(len(grads)), grads, list(map(Tensor.data_ptr, grads)))
        chosen = (index for index, param in enumerate(self.params) if only is None or id(param) in only)
        indices = [index for index in chosen if grads[index] is not None]
        grads = [grads[index] for index in indices]
        try:
            return self._sort(indices, grads, list(map(Tensor.data_ptr, grads)))
        except RuntimeError:
            return None

    def unscale_(self, arrivals: Arrivals, found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply the gradients by ``inverse``, and let those that lie elsewhere become parts of this buffer.

        A buffer that is whole is left as it is, and ``found_inf`` raised, where ``inverse`` is not finite.

        Args:
            arrivals: of this moment.
            found_inf: ``(1,)`` or ``()`` float32, on this device; 1.0 where something is not finite.
            inverse: as ``found_inf``.

        Sync: none.
        """
        if arrivals.whole:
            unscale_([self.tensor], found_inf, _finite(inverse, found_inf))
            return
        if arrivals.new:
            outputs = [self.views[index] for index in arrivals.indices]
            unscale_copy(arrivals.new, outputs, found_inf, inverse)
            self._lend(arrivals.indices)
        if arrivals.kept:
            unscale_(arrivals.kept, found_inf, inverse)

    def lent(self, index: int) -> Tensor:
        """The tensor to put into ``.grad`` of a parameter: its part, and the same object as long as it stays so.

        Whoever gave ``.grad.data`` other memory, or had it require a gradient, keeps that tensor. Sync: none.
        """
        tensor = self._lent[index]
        if tensor.data_ptr() != self._addresses[index] or tensor.requires_grad:
            tensor = self._lent[index] = self.views[index].detach()
        return tensor

    @torch.no_grad()
    def settle(self) -> bool:
        """Clear the parts of the gradients that are None; return whether all others lie in their places. Sync: none."""
        arrivals = self.arrivals()
        if arrivals is None or arrivals.new:
            return False
        if not arrivals.whole:
            torch._foreach_zero_([v for v, param in zip(self.views, self.params, strict=True) if param.grad is None])
        return True

    def _lend(self, indices: Sequence[int]) -> None:
        """Let the parts be the gradients of their parameters."""
        lent = [self._lent[index] for index in indices]
        if list(map(Tensor.data_ptr, lent)) != [self._addresses[index] for index in indices]:
            lent = [self.lent(index) for index in indices]
        for index, tensor in zip(indices, lent, strict=True):
            self.params[index].grad = tensor

    def _sort(self, indices: Sequence[int], grads: list[Tensor], addresses: list[int]) -> Arrivals | None:
        if addresses == self._addresses:
            return Arrivals(True, [], [], [])
        if set(map(_KIND, grads)) - {self._kind}:
            return None
        if list(map(_SHAPE, grads)) != [self._shapes[index] for index in indices]:
            return None
        start, end = self._start, self._end
        if not any(start <= address < end for address in addresses):
            return Arrivals(False, [], grads, indices)
        kept, new, of_new = [], [], []
        for index, grad, address in zip(indices, grads, addresses, strict=True):
            if address == self._addresses[index]:
                kept.append(grad)
            elif start <= address < end:
                return None
            else:
                new.append(grad)
                of_new.append(index)
        return Arrivals(False, kept, new, of_new)


def _finite(factor: Tensor, found_inf: Tensor) -> Tensor:
    """``factor``, or 1 and ``found_inf`` raised where it is not finite: padding would be NaN from there on."""
    finite = factor.isfinite()
    found_inf.masked_fill_(~finite.reshape(found_inf.shape), 1.0)
    return factor.where(finite, 1.0)


def _view_like(part: Tensor, param: Tensor) -> Tensor:
    """``part`` ``(elements,)`` in the shape of ``param`` and in its order in memory, such as channels-last."""
    dense = torch.empty_like(param)  # the strides that autograd gives a gradient
    return part.as_strided(param.shape, dense.stride(), part.storage_offset())
