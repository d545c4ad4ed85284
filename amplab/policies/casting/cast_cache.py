"""The weight-cast cache: a Parameter used twice is cast once, and an edited one is cast again.

An entry is used only while all of this is unchanged: the Parameter object, its version counter
(in-place edits), its data pointer (`p.data = …`), its requires_grad, and the requested dtype.
Edits through an alias that shares no version counter (`p.data.clamp_()`, `p.detach().numpy()`)
leave all of these as they were, so a Parameter whose memory was handed out that way is not
cached until the next `clear`. What cannot be seen from here: an alias taken before the casting
region began and written to between two uses inside it; `clear` is for that.

The cast is made with grad enabled and outside inference mode whatever the caller's mode, so that
a later forward that needs gradients can use an entry made under no_grad.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

__all__ = ["CastCache", "NoCastCache"]

_functorch_active = torch._C._are_functorch_transforms_active

_Entry = tuple[weakref.ref[Tensor], int, int, bool, Tensor]
"""Weak identity, version, data pointer and requires_grad of a Parameter, and its cast."""


class CastCache:
    """Lower-precision copies of Parameters, keyed by weak identity and dtype.

    >>> cache, weight = CastCache(), torch.nn.Parameter(torch.ones(2))
    >>> cache.cast(weight, torch.float16) is cache.cast(weight, torch.float16), len(cache)
    (True, 1)
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._exposed: set[int] = set()

    def __len__(self) -> int:
        """How many copies are kept."""
        return len(self._entries)

    def clear(self) -> None:
        """Drop every copy. Sync: none."""
        self._entries.clear()
        self._exposed.clear()

    def expose(self, tensor: Tensor) -> None:
        """Note that `tensor`'s memory can now be edited unseen: it is not cached until `clear`."""
        if not torch.compiler.is_compiling() and tensor.layout is torch.strided and not _functorch_active():
            self._exposed.add(tensor.untyped_storage().data_ptr())

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight.to(dtype)`, from the cache where it may be.

        Args:
            weight: a Parameter, any shape, any device.
            dtype: the dtype to cast to.

        Returns:
            A tensor of `weight`'s shape in `dtype`, linked to `weight` by autograd.
            Sync: none.
        """
        # Under compile the graph itself is the cache; under functorch casts belong to one transform level.
        if torch.compiler.is_compiling() or _functorch_active():
            return weight.to(dtype)
        key = (id(weight), dtype)
        entry = self._entries.get(key)
        if entry is not None:
            identity, version, pointer, requires_grad, copy = entry
            if (
                identity() is weight
                and version == weight._version
                and pointer == weight.data_ptr()
                and requires_grad == weight.requires_grad
                and not self._is_exposed(weight)
            ):
                return copy
        return self._make(key, weight, dtype)

    def _make(self, key: tuple[int, torch.dtype], weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.is_inference() or self._is_exposed(weight):
            self._entries.pop(key, None)
            return weight.to(dtype)
        with torch.inference_mode(False), torch.enable_grad():
            copy = weight.to(dtype)
        self._entries[key] = (weakref.ref(weight), weight._version, weight.data_ptr(), weight.requires_grad, copy)
        return copy

    def _is_exposed(self, weight: Tensor) -> bool:
        return bool(self._exposed) and weight.untyped_storage().data_ptr() in self._exposed


class NoCastCache(CastCache):
    """A cache that keeps nothing: every use of a Parameter is a cast of its own."""

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight.to(dtype)`. Sync: none."""
        return weight.to(dtype)
