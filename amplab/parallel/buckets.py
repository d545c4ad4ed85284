"""Buckets: slices of the flat gradient buffers, each of which is all-reduced as one tensor.

    flat buffer   [ part | flag, notes | part | flag | … ]   cut into buckets, never inside a part
    fill          part <- gradient * factor;  flag <- 1 if this rank has the gradient, else 0
    lend          the parts become the gradients of the parameters whose flag is > 0

The flags are in the padding between the parts and travel with the gradients: a parameter that only some ranks reached
gets the average in which the others count as zero, and one that no rank reached keeps None. The first padding of a
bucket also has the notes of the rank (``rank_notes.py``). ``combined_reducer.py`` decides when a bucket is sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from amplab.kernels import GradientPlaces, Whereabouts, unscale_copy
from amplab.parallel.rank_notes import NOTE_COUNT
from amplab.scalers.flat_buffer import FlatBuffer

__all__ = ["Bucket", "bucket_ends"]

_FEWEST = 2**20
_MOST_BYTES = 24 * 2**20 * 4


def bucket_ends(ends: Sequence[int], itemsize: int, replica_count: int) -> list[int]:
    """Cut a flat buffer into buckets.

    A bucket has ``elements / replica_count`` elements, at least 2^20 and at most 96 MiB, and ends with a part.

    Args:
        ends: where each part ends, in elements.
        itemsize: bytes of an element.
        replica_count: the requested number of buckets.

    Returns:
        For each bucket the number of parts up to its end.

    >>> bucket_ends([2**20, 2**21, 3 * 2**20], 4, replica_count=2)
    [2, 3]

    Reference: ``ddp_replica_count`` of Ascend's apex.
    """
    target = min(max(ends[-1] // replica_count, _FEWEST), _MOST_BYTES // itemsize)
    cuts, start = [], 0
    for count, end in enumerate(ends, 1):
        if end - start >= target:
            cuts.append(count)
            start = end
    return cuts if cuts and cuts[-1] == len(ends) else [*cuts, len(ends)]


class Bucket:
    """A slice of a flat buffer that is all-reduced as one tensor.

    Args:
        buffer: the flat buffer.
        first, last: its parameters are ``buffer.params[first:last]``.

    Attributes:
        params: its parameters.
        tensor: ``(elements,)``, the slice.
        notes: ``(NOTE_COUNT,)``, the numbers of the rank's `Notes`, in the padding of its first part.
    """

    def __init__(self, buffer: FlatBuffer, first: int, last: int) -> None:
        self._buffer, self._first = buffer, first
        self.params = buffer.params[first:last]
        start = 0 if first == 0 else buffer.ends[first - 1]
        self.tensor = buffer.tensor[start : buffer.ends[last - 1]]
        self._views = buffer.views[first:last]
        starts = [start, *buffer.ends[first : last - 1]]
        flags = [begin - start + param.numel() for begin, param in zip(starts, self.params, strict=True)]
        self._flags = torch.tensor(flags, device=buffer.tensor.device)
        self.notes = self.tensor[flags[0] + 1 :][:NOTE_COUNT]  # the padding of a part has 32 elements
        lent = [buffer.lent(index) for index in range(first, last)]
        self._places = GradientPlaces(self.params, self.tensor, [begin - start for begin in starts], lent)
        self._all_here = False
        self._found_inf = torch.zeros(1, dtype=torch.float32, device=buffer.tensor.device)

    def is_complete(self) -> bool:
        """Return whether every parameter has a gradient. Sync: none."""
        seen = self._places.find()
        if seen is not None:
            return Whereabouts.MISSING not in seen
        return all(param.grad is not None for param in self.params)

    def misfit(self) -> Tensor | None:
        """Return the first parameter whose gradient cannot be stored in its part; None if all can. Sync: none."""
        if self._places.find() is not None:
            return None
        for param, view in zip(self.params, self._views, strict=True):
            grad = param.grad
            if grad is not None and (
                grad.layout is not torch.strided or grad.dtype != view.dtype or grad.shape != view.shape
            ):
                return param
        return None

    @torch.no_grad()
    def fill_with_zeros(self) -> None:
        """Send no gradient of this rank; each stays where it is. Sync: none."""
        self.tensor.zero_()
        self._all_here = False

    @torch.no_grad()
    def fill(self, factor: Tensor) -> None:
        """Move the gradients of this rank, times ``factor``, to the slice; each ``.grad`` becomes None. Sync: none."""
        if self.is_complete() and self._places.unscale_(self._found_inf, factor, lends=False) is not None:
            self._all_here = True
            self.tensor.index_fill_(0, self._flags, 1.0)
            return
        grads = [param.grad for param in self.params]
        here = [index for index, grad in enumerate(grads) if grad is not None]
        self._all_here = len(here) == len(grads)
        inputs = [grad for grad in grads if grad is not None]
        outputs = self._views if self._all_here else [self._views[index] for index in here]
        unscale_copy(inputs, outputs, self._found_inf, factor)
        if self._all_here:
            self.tensor.index_fill_(0, self._flags, 1.0)
        else:
            missing = sorted(set(range(len(grads))) - set(here))
            torch._foreach_zero_([self._views[index] for index in missing])
            self.tensor.index_fill_(0, self._flags, 1.0)
            self.tensor.index_fill_(0, self._flags[torch.tensor(missing)], 0.0)
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Remove the flags and the notes: norms are taken of whole buffers. Sync: none."""
        self.tensor.index_fill_(0, self._flags, 0.0)
        self.notes.zero_()

    @torch.no_grad()
    def lend(self) -> None:
        """Make the parts the gradients of all parameters that a rank has reached.

        Sync: none if this rank has reached them all, else one.
        """
        indices: Sequence[int] = range(self._first, self._first + len(self.params))
        if not self._all_here:
            reached = (self.tensor[self._flags] > 0).tolist()
            indices = [index for index, is_reached in zip(indices, reached, strict=True) if is_reached]
        self.clear_padding()
        if not (self._all_here and self._places.lend()):
            self._buffer.lend(indices)
