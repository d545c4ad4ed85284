"""What a forward writes into a dict or a list of inputs reaches the caller's, though forward was given a cast copy."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

__all__ = ["input_edits"]


@contextmanager
def input_edits(given: Any, cast: Any, outward: Callable[[Any], Any]) -> Iterator[None]:
    """Carry what the block adds to, changes in and takes from ``cast`` over to ``given``.

    Args:
        given: inputs as the caller passed them, containers in containers.
        cast: the same, as `amplab.policies.cast_tree` returned them.
        outward: applied to what is carried over.

    Sync: none.
    """
    pairs = [(old, new, copy.copy(old), copy.copy(new)) for old, new in _copied(given, cast)]
    try:
        yield
    finally:
        for old, new, old_items, new_items in pairs:
            if isinstance(old, list):
                _carry_list(old, new, old_items, new_items, outward)
            else:
                _carry_mapping(old, new, new_items, outward)


def _copied(given: Any, cast: Any) -> Iterator[tuple[Any, Any]]:
    """The containers that can be written into and that ``cast`` has a copy of."""
    if cast is given:
        return
    if isinstance(given, MutableMapping):
        yield given, cast
        for key in given:
            yield from _copied(given[key], cast[key])
    elif isinstance(given, list | tuple):
        if isinstance(given, list):
            yield given, cast
        for old, new in zip(given, cast, strict=True):
            yield from _copied(old, new)


def _carry_mapping(old: MutableMapping, new: MutableMapping, before: MutableMapping, outward: Callable) -> None:
    for key, value in new.items():
        if key not in before or value is not before[key]:
            old[key] = outward(value)
    for key in before:
        if key not in new:
            old.pop(key, None)


def _carry_list(old: list, new: list, old_items: list, new_items: list, outward: Callable) -> None:
    if len(new) == len(new_items) and all(a is b for a, b in zip(new, new_items, strict=True)):
        return
    originals = {id(cast): given for cast, given in zip(new_items, old_items, strict=True)}
    old[:] = [originals[id(item)] if id(item) in originals else outward(item) for item in new]
