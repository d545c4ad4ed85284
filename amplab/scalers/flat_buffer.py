"""One flat buffer: the gradients of some parameters on one device, in one dtype, one after the other.

    arrivals()            the gradients at this moment: in their places, new, or missing; None if one does not fit
    unscale_(arrivals)    part <- round(gradient / scale), for kept and new ones; the part becomes .grad

A new gradient of backward is read once and written once: it is unscaled while it is copied into the buffer. If backward
added to a cleared buffer instead, it would be read and written twice, -0.0 would become 0.0, and no gradient could stay
None. Which buffers there are, and what broke a view, is in ``flat_gradients.py``.
"""

import contextlib
import itertools
import operator
from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from amplab.kernels import GradientPlaces, Whereabouts, unscale_, unscale_copy

__all__ = ["Arrivals", "FlatBuffer", "aligned_size"]

_ALIGN, _PADDING = 16, 32
_KIND = operator.attrgetter("dtype", "is_cpu", "requires_grad")  # the kernel checks which GPU
_SHAPE = operator.attrgetter("shape")


def aligned_size(numel: int) -> int:
    """Return the elements of a part: those of its gradient, rounded up to a multiple of 16, and 32 of padding.

    >>> aligned_size(1), aligned_size(17)
    (48, 64)

    Reference: ``get_aligned_storage_size`` of Ascend's apex.
    """
    return -(-numel // _ALIGN) * _ALIGN + _PADDING


class Arrivals(NamedTuple):
    """The gradients of a buffer at one moment.

    Attributes:
        whole: every parameter has its gradient in its place, so that the buffer is unscaled as one tensor.
        kept: if not ``whole``, the gradients in their places.
        new: if not ``whole``, the gradients elsewhere.
        indices: the indices of the parameters of ``new``.
    """

    whole: bool
    kept: list[Tensor]
    new: list[Tensor]
    indices: Sequence[int]

    def __bool__(self) -> bool:
        """Return whether there is any gradient."""
        return self.whole or bool(self.kept) or bool(self.new)


class FlatBuffer:
    """One flat tensor that holds the gradients of several parameters, one part for each.

    Args:
        params: their gradients are, or will be, all on one device and in one dtype; the values are not copied.

    Attributes:
        tensor: ``(elements,)``, zeros.
        params: as given.
        views: the part of each in its shape and its memory format, such as channels-last.
        ends: where the part of each ends, in elements.
    """

    def __init__(self, params: list[Tensor]) -> None:
        sizes = [aligned_size(param.numel()) for param in params]
        first = params[0] if params[0].grad is None else params[0].grad
        self.tensor = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.params = params
        self.ends = list(itertools.accumulate(sizes))
        parts: tuple[Tensor, ...] = self.tensor.split(sizes)
        self.views = [_view_like(part[: param.numel()], param) for param, part in zip(params, parts, strict=True)]
        self._shapes = [param.shape for param in params]
        self._addresses = [view.data_ptr() for view in self.views]
        self._lent = [view.detach() for view in self.views]
        starts = [end - size for end, size in zip(self.ends, sizes, strict=True)]
        self._places = GradientPlaces(params, self.tensor, starts, self._lent)
        self._kind = (first.dtype, first.is_cpu, False)
        self._start = self.tensor.data_ptr()
        self._end = self._start + self.tensor.nbytes

    def find(self) -> Whereabouts | None:
        """Return where the gradients are; None if the kernels are not built or cannot take them. Sync: none."""
        return self._places.find()

    def bring_in_(self, found_inf: Tensor, inverse: Tensor, *, moves: bool) -> Whereabouts | None:
        """Do `unscale_` for all gradients by the kernels.

        Args:
            found_inf: as for `unscale_`.
            inverse: as for `unscale_`.
            moves: whether new gradients move into this buffer; False: if there is a new one, nothing is written.

        Returns:
            Where the gradients were; None, with nothing written, if the kernels are not built or cannot take them.

        Sync: none.
        """
        return self._places.unscale_(found_inf, inverse, moves=moves)

    def clip_(self, norm: Tensor, max_norm: float) -> bool:
        """Clip the gradients as one tensor; see `GradientPlaces.clip_`. Sync: none."""
        return self._places.clip_(norm, max_norm)

    def arrivals(self, only: Collection[int] | None = None) -> Arrivals | None:
        """Sort the gradients into those inside this buffer and those stored elsewhere.

        Args:
            only: the parameters to consider, by ``id``; None for all.

        Returns:
            The `Arrivals`; None if a gradient cannot be stored in its part of the buffer: its dtype changed, it is
            sparse, it has a graph, or it is stored in another parameter's part.

        Sync: none.
        """
        every = [param.grad for param in self.params]
        if only is None:
            present = cast("list[Tensor]", every)
            with contextlib.suppress(RuntimeError, TypeError):  # a sparse one has no address, nor has None
                return self._sort(range(len(every)), present, list(map(Tensor.data_ptr, present)))
        indices: list[int] = []
        grads: list[Tensor] = []
        for index, (param, grad) in enumerate(zip(self.params, every, strict=True)):
            if grad is not None and (only is None or id(param) in only):
                indices.append(index)
                grads.append(grad)
        try:
            return self._sort(indices, grads, list(map(Tensor.data_ptr, grads)))
        except RuntimeError:  # a sparse one has no address
            return None

    def unscale_(self, arrivals: Arrivals, found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply the gradients by ``inverse``; those that are elsewhere move into this buffer.

        If ``inverse`` is not finite, ``found_inf`` becomes 1.0 and a whole buffer stays unchanged.

        Args:
            arrivals: of this moment.
            found_inf: ``(1,)`` or ``()`` float32, on this device; becomes 1.0 if anything is not finite.
            inverse: ``(1,)`` or ``()`` float32, on this device.

        Sync: none.
        """
        if arrivals.whole:
            unscale_([self.tensor], found_inf, _finite(inverse, found_inf))
            return
        if arrivals.new:
            outputs = [self.views[index] for index in arrivals.indices]
            unscale_copy(arrivals.new, outputs, found_inf, inverse)
            self.lend(arrivals.indices)
        if arrivals.kept:
            unscale_(arrivals.kept, found_inf, inverse)

    def lent(self, index: int) -> Tensor:
        """Return the tensor for ``.grad`` of a parameter: a view of its part of the buffer.

        Returns the same object each time, unless ``.grad.data`` was replaced or requires_grad was set. Sync: none.
        """
        tensor = self._lent[index]
        if tensor.data_ptr() != self._addresses[index] or tensor.requires_grad:
            tensor = self._lent[index] = self.views[index].detach()
            self._places = self._places.lending(self._lent)
        return tensor

    @torch.no_grad()
    def settle(self) -> bool:
        """Clear the parts of gradients that are None; return whether all others are in their places. Sync: none."""
        if self.find() == Whereabouts.KEPT:
            return True
        arrivals = self.arrivals()
        if arrivals is None or arrivals.new:
            return False
        if not arrivals.whole:
            torch._foreach_zero_([v for v, param in zip(self.views, self.params, strict=True) if param.grad is None])
        return True

    def lend(self, indices: Sequence[int]) -> None:
        """Set the gradients of parameters, by index, to their parts. Sync: none."""
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
    """Return ``factor``; if it is not finite, return 1 and set ``found_inf``, because padding would become NaN."""
    finite = factor.isfinite()
    found_inf.masked_fill_(~finite.reshape(found_inf.shape), 1.0)
    return factor.where(finite, 1.0)


def _view_like(part: Tensor, param: Tensor) -> Tensor:
    """Return ``part`` ``(elements,)`` in the shape and memory format of ``param``, such as channels-last."""
    dense = torch.empty_like(param)  # the strides that autograd gives a gradient
    return part.as_strided(param.shape, dense.stride(), part.storage_offset())
