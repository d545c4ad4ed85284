"""The bytes of the tensors that a forward saves for its backward, by module.

Each storage is counted once, even if several ops save it, and in full, since a saved view keeps all of its base. The
model's own parameters and buffers are not counted. Casts of weights are counted separately from activations. Of a
checkpointed block only the inputs count, not the tensors that it saves when it runs again in backward.

Reference: torch.autograd.graph.saved_tensors_hooks.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, islice

import torch
from torch import Tensor, nn

from amplab.policies.casting.function_modes import without_function_modes
from amplab.trace.weight_casts import WeightCasts

__all__ = ["KeptBytes", "KeptTensors", "memory_of"]

_Change = tuple[str, bool, int, int]
"""Module, whether it is a cast of a weight, bytes, negative once they are freed; number of the storage."""


@dataclass(frozen=True)
class KeptBytes:
    """Bytes kept for backward at their peak.

    Attributes:
        activations: by path of the module whose forward saved them first.
        weight_casts: 16-bit copies of weights, by path of the module that used them first.
    """

    activations: dict[str, int] = field(default_factory=dict)
    weight_casts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum over all modules."""
        return sum(self.activations.values()) + sum(self.weight_casts.values())

    def of(self, module: str) -> int:
        """Return the bytes that one module keeps."""
        return self.activations.get(module, 0) + self.weight_casts.get(module, 0)


class KeptTensors:
    """Counts what is saved for backward inside `following()`.

    Args:
        model: the model whose parameters and buffers are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        with without_function_modes():
            tensors = (each for module in model.modules() for each in _own_tensors(module))
            self._owned = {memory_of(tensor)[0] for tensor in tensors}
        self._live: dict[int, weakref.ref[_Kept]] = {}
        self._numbers = count()
        self._changes: dict[_Change, object] = {}  # the keys, in order

    @contextmanager
    def following(self, keeper: Callable[[], str | None], casts: WeightCasts) -> Iterator[None]:
        """Count the tensors that the block saves for backward.

        Args:
            keeper: returns the path of the running module, or None to not count a tensor.
            casts: the casts of weights.
        """

        def keep(tensor: Tensor) -> tuple[_Kept | None, Tensor]:
            with without_function_modes():
                address, size = memory_of(tensor)
            if address in self._owned:
                return None, tensor
            known = self._live.get(address)
            kept = None if known is None else known()
            # A dead reference means that the memory was freed and now belongs to another tensor.
            if kept is None and (module := keeper()) is not None:
                kept, side, number = _Kept(), casts.owns(address), next(self._numbers)
                # A callback that is written in C: Python discards an interrupt that comes in one written in Python.
                freed = partial(self._changes.setdefault, (module, side, -size, number))
                self._live[address] = weakref.ref(kept, freed)
                self._changes[module, side, size, number] = None
            return kept, tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, _tensor_of):
            yield

    def peak(self) -> KeptBytes:
        """Return what was kept at the peak; call it after the step."""
        sums = list(accumulate(size for _, _, size, _ in self._changes))
        changes = sums.index(max(sums)) + 1 if sums else 0
        sides: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for module, is_cast, size, _ in islice(self._changes, changes):
            sides[is_cast][module] += size
        return KeptBytes(*({module: size for module, size in side.items() if size} for side in sides))


class _Kept:
    """One storage, for as long as an op keeps it."""

    __slots__ = ("__weakref__",)


def _tensor_of(kept: tuple[_Kept | None, Tensor]) -> Tensor:
    return kept[1]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of one module; `model.parameters()` would walk all modules again."""
    for each in (*module._parameters.values(), *module._buffers.values()):
        if each is not None:
            yield each


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address and bytes of a tensor's storage; of a sparse tensor, which has none, its id and own size."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or storage._cdata, storage.nbytes()  # the meta device has no address
    except (NotImplementedError, RuntimeError):
        return id(tensor), tensor.numel() * tensor.element_size()
