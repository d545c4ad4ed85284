"""`kept_property`: a property that is computed once, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["kept_property"]

T = TypeVar("T")


class kept_property(Generic[T]):  # named as functools.cached_property
    """As functools.cached_property of Python 3.12: two threads may both compute the value.

    In Python 3.11 all objects of a class share one lock. A process that is forked while another thread holds it would
    wait for that thread, which it does not have.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        """Store the name that the value is kept under."""
        self._name = name

    @overload
    def __get__(self, owned: None, owner: type) -> kept_property[T]: ...
    @overload
    def __get__(self, owned: object, owner: type) -> T: ...
    def __get__(self, owned: object | None, owner: type) -> kept_property[T] | T:
        """Compute the value and keep it in the instance, where later reads find it."""
        if owned is None:
            return self
        return vars(owned).setdefault(self._name, self._compute(owned))  # type: ignore[no-any-return]
