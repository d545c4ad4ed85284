"""The random generators that data have themselves, as a DataLoader, its sampler or its dataset may.

They go on where the last reader left them. Here each epoch has states of its own: the first one those that the data
were given with, a later one states that depend on these, on the seed and on the epoch. Outside of a read they are as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from amplab.trace.as_found import Undo
from amplab.trace.random_states import generators_of, reseed, restorers

__all__ = ["DataGenerators"]


class DataGenerators:
    """The generators of data that are read by several runs; the states at the first read are noted.

    What a function returns has none, unless it was in what its first call returned.
    """

    def __init__(self) -> None:
        self._found: tuple[Any, ...] = ()
        self._given: tuple[Callable[[], object], ...] | None = None  # restore the states that were noted

    def begin(self, data: Any, epoch: int, seed: int) -> None:
        """Set the states in which an epoch begins."""
        if self._given is None:
            self._found = tuple(generators_of(data))
            self._given = self.states()
        for generator, restore in zip(self._found, self._given, strict=True):
            restore()
            if epoch:
                reseed(generator, seed)

    def states(self) -> tuple[Callable[[], object], ...]:
        """Return what restores the present states."""
        return restorers(self._found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run a block and restore the states after it; of generators that are found in it, those that were noted."""
        is_first, before = self._given is None, self.states()
        with Undo() as undo:
            undo.add(lambda: [restore() for restore in (self._given or () if is_first else before)])
            yield
