"""`WeightCasts`: which calls got the cast of a weight from the weight cache.

An engine casts a Parameter for the first call that reads it. A later call that reads the same tensor got it from the
cache, amplab's or torch.autocast's: no op ran and no byte moved, so there is no record of a cast.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["WeightCasts"]


@dataclass
class _Made:
    """One cast of a Parameter by an engine.

    Attributes:
        event: its number in the trace.
        tensor: its result, as long as that exists.
        reader: number of the call that read it last; 0 before the first.
    """

    event: int
    tensor: weakref.ref[Tensor]
    reader: int = 0


class WeightCasts:
    """The casts of Parameters that engines made in one step, and the calls that read them."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._memory: dict[int, weakref.ref[Tensor]] = {}

    def made(self, event: int, result: Tensor) -> None:
        """Record that an engine has cast a Parameter to `result` in `event`."""
        self._made[id(result)] = _Made(event, weakref.ref(result))
        self._memory[result.untyped_storage().data_ptr()] = weakref.ref(result)

    def read_from_cache(self, tensors: Iterable[object], call: int) -> tuple[int, ...]:
        """Return the events of the casts that `call` reads from the cache, each once for a call."""
        if not self._made:
            return ()
        return tuple(made.event for tensor in tensors if (made := self._read(tensor, call)) is not None)

    def owns(self, address: int) -> bool:
        """Return whether the storage at `address` is that of a cast weight."""
        tensor = self._memory.get(address)
        return tensor is not None and tensor() is not None

    def _read(self, tensor: object, call: int) -> _Made | None:
        made = self._made.get(id(tensor))
        if made is None or made.reader == call or made.tensor() is not tensor:
            return None
        first, made.reader = made.reader == 0, call
        return None if first else made
