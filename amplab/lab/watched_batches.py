"""`WatchedBatches`: the batches of a loader, between two calls that tell a watch where each body begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["WatchedBatches"]

T = TypeVar("T")


class WatchedBatches(Iterator[T]):
    """Reads a loader. No generator: that would end with the first error of a loader, which a loop may go on after.

    Args:
        loader: what to read, from its beginning.
        begins: called with each batch, before the body of the loop.
        ends: called after each body; also before the first one, and twice after one.
        end: called once no batch is to come, or the loop has dropped this iterator.
    """

    def __init__(
        self, loader: Iterable[T], *, begins: Callable[[T], None], ends: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._is_open = False  # until it is read
        self._loader, self._begins, self._ends, self._end = loader, begins, ends, end
        self._read: Iterator[T] | None = None  # a loader starts its workers when the loop begins
        self._is_exhausted = False

    def __iter__(self) -> WatchedBatches[T]:
        """Return itself; after the last batch it reads the loader anew, in the next epoch of a loop."""
        if self._is_exhausted:
            self._read, self._is_exhausted = None, False
        return self

    def __next__(self) -> T:
        """Return the next batch."""
        self._ends()
        if self._read is None:
            self._read = iter(self._loader)
        try:
            batch = next(self._read)
        except StopIteration:
            self._is_exhausted = True
            self.close()
            raise
        self._is_open = True
        self._begins(batch)
        return batch

    def close(self) -> None:
        """The last body has ended; a second call does nothing."""
        if self._is_open:
            self._ends()
            self._is_open = False
            self._end()

    def __del__(self) -> None:
        """After a `break`, `return` or exception in the body."""
        self.close()
