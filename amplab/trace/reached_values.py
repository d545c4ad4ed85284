"""`reached_from`: the values that the code of a function leads to, by the names in it."""

import types
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import islice
from typing import Any
from weakref import ProxyTypes

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["cell_contents", "names_in", "reached_from"]

_MOST_ELEMENTS = 1_000  # of a container: a list of examples is long
_MOST_OBJECTS = 20_000
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_METHODS = (types.FunctionType, staticmethod, classmethod)
_DEPTH = 4
"""How many functions and objects away from the function the search goes."""


def reached_from(function: Callable[..., Any], names: Container[str] | None = None) -> Iterator[Any]:
    """What a function can reach by the names in its code, itself first: functions, and the contents of objects.

    Numbers and text are left out.

    Args:
        function: the function.
        names: the attributes of objects to follow; None for all.
    """
    seen: set[int] = set()
    waiting = [(function, 0)]
    while waiting and len(seen) < _MOST_OBJECTS:
        value, depth = waiting.pop()
        if type(value) in ProxyTypes:  # the object may be gone
            continue
        if id(value) not in seen:
            yield value
        if depth < _DEPTH and id(value) not in seen and not isinstance(value, LRScheduler):
            seen.add(id(value))
            waiting += [(each, depth + 1) for each in _named_in(value, names) if type(each) not in _PLAIN]


def _named_in(value: Any, names: Container[str] | None) -> Iterator[Any]:
    """What a function names, the object of a method, the contents of a container or of a plain object."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
        yield from _own_methods(value.__self__, {*names_in(getattr(value.__func__, "__code__", _NO_CODE))})
    elif isinstance(value, types.FunctionType):
        named = dict.fromkeys(names_in(value.__code__))  # in their order, as a set of words has another in each process
        found = [value.__globals__[name] for name in named if name in value.__globals__]
        yield from found
        yield from (method for each in found if isinstance(each, type) for method in _own_methods(each, named))
        yield from cell_contents(value)
    elif isinstance(value, list | tuple | set):
        yield from islice(value, _MOST_ELEMENTS)
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_ELEMENTS)
    elif _is_users(value):
        yield from _own_methods(value, {"__call__"})
        yield from (each for name, each in vars(value).items() if names is None or name in names)


def _own_methods(owner: Any, names: Container[str]) -> Iterator[Callable[..., Any]]:
    """The methods of a user's class, or of an object of one, that have some names."""
    for kind in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if not _is_librarys(kind):
            named = [name for name, each in vars(kind).items() if name in names and isinstance(each, _METHODS)]
            yield from (getattr(owner, name) for name in named)


_NO_CODE = compile("", "", "exec")


def cell_contents(function: types.FunctionType) -> Iterator[Any]:
    """The values of the variables that a function has from those around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names in the code of a function, and of the functions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from names_in(each)


def _is_users(value: Any) -> bool:
    """Whether it is a plain object of a class outside of torch and amplab, such as a trainer."""
    plain = not isinstance(value, type | types.ModuleType) and isinstance(getattr(value, "__dict__", None), dict)
    return plain and not _is_librarys(type(value))


def _is_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "amplab", "builtins")
