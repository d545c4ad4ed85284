"""Threads and processes beside a step that runs again: one may write to what the code of the step keeps.

A rerun takes back what the code of the step changes, and would take back what they have written meanwhile. Looked at is
the code of the step and of each `threading.Thread`, as far as the names in it lead. What a thread of a pool runs is not
known.
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
from torch import Tensor, nn, strided

from amplab.lab.own_code import Followed
from amplab.lab.own_objects import is_followed, names_of
from amplab.trace.random_states import GENERATORS
from amplab.trace.reached_values import names_in

__all__ = ["Writer", "writer_beside"]

_OF_OBJECTS = "STORE_ATTR", "DELETE_ATTR"
_OF_VARIABLES = "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"
_WRITTEN_BY_CALLS = list, dict, set, deque, bytearray, array, np.ndarray, Tensor, nn.Module, *GENERATORS
_DRAWS = "normal_", "uniform_", "exponential_", "shuffle", "choice", "choices", "sample", "gauss", "dropout"


class Writer(NamedTuple):
    """Who may write, and to what."""

    who: str
    what: str


def writer_beside(values: Iterable[Any]) -> Writer | None:
    """Return who may write to what the code keeps that values lead to: a thread, or a process by shared memory.

    Args:
        values: As for `own_code.Followed`.

    Sync: none.
    """
    step = Followed(values)
    if any(map(_is_shared, step.seen.values())):
        return Writer("another process", "a tensor in shared memory")
    for thread, code in [(each, code) for each in threading.enumerate() if (code := _code_of(each))]:
        other = Followed(code)
        if any(_draws(each.__code__) for each in other.functions):
            return Writer(f"the thread {thread.name}", "the state of random generators")
        if what := next(_written_by(other, step), None):
            return Writer(f"the thread {thread.name}", what)
    return None


def _is_shared(value: Any) -> bool:
    """Whether it is a tensor to which other processes may write. (Those of the model have stand-ins in a rerun.)"""
    return type(value) is Tensor and value.device.type == "cpu" and value.layout is strided and value.is_shared()


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


def _draws(code: CodeType) -> bool:
    """Whether a function names one that draws random numbers."""
    return any(name in _DRAWS or "rand" in name for name in _named(code))


def _variables(function: FunctionType, names: Iterable[str]) -> dict[Any, str]:
    """Return where variables of a function are that it shares with others, with their names."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    of_file = {(id(function.__globals__), name): name for name in names}
    return of_file | {id(cell): name for name, cell in cells.items() if name in names}


def _named(code: CodeType) -> set[str]:
    """Return the variables that a function, and those inside it, name."""
    return {*names_in(code), *code.co_freevars}


def _bound(code: CodeType, ops: Iterable[str]) -> set[str]:
    """Return the names to which a function, and those inside it, give a value."""
    inner = (_bound(each, ops) for each in code.co_consts if isinstance(each, CodeType))
    return {each.argval for each in dis.get_instructions(code) if each.opname in ops}.union(*inner)
