"""`writer_beside`: whether a thread of one's own may write to what the code of a step keeps.

A rerun of a step takes back what its code changes, and would take back what the thread has written meanwhile. Looked at
is the code of each `threading.Thread`, as far as the names in it lead. What a thread of a pool runs is not known.
"""

from __future__ import annotations

import dis
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from threading import Thread
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from amplab.lab.own_code import Followed, followed_from
from amplab.lab.own_objects import is_followed, names_of
from amplab.trace.random_states import GENERATORS

__all__ = ["Writer", "writer_beside"]

_OF_OBJECTS = "STORE_ATTR", "DELETE_ATTR"
_OF_VARIABLES = "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"
_WRITTEN_BY_CALLS = list, dict, set, deque, bytearray, array, np.ndarray, Tensor, nn.Module, *GENERATORS


class Writer(NamedTuple):
    """A thread, by name, and what it may write to."""

    thread: str
    what: str


def writer_beside(values: Iterable[Any]) -> Writer | None:
    """Return a thread that is alive, beside this one, and may write to what the code keeps that values lead to.

    Args:
        values: As for `own_code.followed_from`.

    Sync: none.
    """
    threads = [(each, code) for each in threading.enumerate() if (code := _code_of(each))]
    if not threads:
        return None
    step = followed_from(values)
    for thread, code in threads:
        other = followed_from(code)
        if what := next(_written_by(other, step), None):
            return Writer(thread.name, what)
    return None


def _code_of(thread: Thread) -> list[Any]:
    """Return the function that a thread runs, and its arguments; nothing for this thread."""
    if thread is threading.current_thread():
        return []
    given = vars(thread)
    target = [] if type(thread).run is Thread.run else [thread.run, *given.values()]
    return [*target, *filter(None, [given.get("_target")]), *given.get("_args", ()), *given.get("_kwargs", {}).values()]


def _written_by(other: Followed, step: Followed) -> Iterator[str]:
    """Yield the names of what code may write to, of all that other code leads to as well."""
    attributes = {name for each in other.functions for name in _bound(each.__code__, _OF_OBJECTS)}
    for value in [value for key, value in other.seen.items() if key in step.seen]:
        is_kept = is_followed(value) and any(attributes & {*names} for _, names in names_of("", value))
        if is_kept or isinstance(value, _WRITTEN_BY_CALLS):
            yield f"an object of class {type(value).__name__}"
    read = {place for each in step.functions for place in _variables(each, _named(each.__code__))}
    written = [_variables(each, _bound(each.__code__, _OF_VARIABLES)) for each in other.functions]
    yield from (f"the variable {name}" for each in written for place, name in each.items() if place in read)


def _variables(function: FunctionType, names: Iterable[str]) -> dict[Any, str]:
    """Return where variables of a function are that it shares with others, with their names."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    of_file = {(id(function.__globals__), name): name for name in names}
    return of_file | {id(cell): name for name, cell in cells.items() if name in names}


def _named(code: CodeType) -> set[str]:
    """Return the variables that a function, and those inside it, name."""
    inner = (_named(each) for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _bound(code: CodeType, ops: Iterable[str]) -> set[str]:
    """Return the names to which a function, and those inside it, give a value."""
    inner = (_bound(each, ops) for each in code.co_consts if isinstance(each, CodeType))
    return {each.argval for each in dis.get_instructions(code) if each.opname in ops}.union(*inner)
