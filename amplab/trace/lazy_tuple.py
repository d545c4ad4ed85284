"""`LazyTuple`: a tuple whose items are made when they are first read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

__all__ = ["LazyTuple"]

Item = TypeVar("Item")


class LazyTuple(Sequence[Item]):
    """The tuple of ``make(items, 0) … make(items, length - 1)``, each made at most once; pickled as a tuple.

    Args:
        length: the number of items.
        make: returns the item at a place, always the same one; it may read other items. They are passed to it, so that
            it holds no reference to them, which would form a cycle.

    >>> sums = LazyTuple(5, lambda items, place: place + (items[place - 1] if place else 0))
    >>> sums[-1], sums == (0, 1, 3, 6, 10), sums
    (10, True, (0, 1, 3, 6, 10))
    """

    def __init__(self, length: int, make: "Callable[[LazyTuple[Item], int], Item]") -> None:
        self._make = make
        self._made: list[Item | None] = [None] * length

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        item = self._made[place]
        if item is None:
            item = self._made[place] = self._make(self, place if place >= 0 else len(self) + place)
        return item

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Item]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, LazyTuple | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type, tuple[tuple[Item, ...]]]:
        return tuple, (tuple(self),)
