"""interrupted_everywhere: run a step once for each point of amplab that it reaches, with a KeyboardInterrupt there.

    for interrupt in interrupted_everywhere(step):
        ...             # what must hold after an interrupted step; `interrupt` says where it was
        prepare()       # for the next one

A point is the beginning of a call, the beginning of a line, and the instruction after a call of a function written in
C: CPython handles signals where a function written in Python begins, where one written in C has returned, and where a
loop begins again. It handles none between the end of a `with` block and the call of `__exit__`, and none where a
function written in Python has returned, nor where a generator gets an exception, so there is no point there either.

A trace function, such as a debugger's, can also raise where a `with` block ends: ``ends=True`` has these points alone.
"""

import dis
import functools
import itertools
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import amplab

__all__ = ["Interrupt", "PACKAGE", "interrupted", "interrupted_everywhere"]

PACKAGE = str(Path(amplab.__file__).parent)

_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}
_NOP = dis.opmap["NOP"]


class Interrupt(NamedTuple):
    """An interrupt that a step has met.

    Attributes:
        at: the number of the point, from 1.
        where: "file.py:line, function".
        escaped: whether the step raised KeyboardInterrupt; code that runs in a destructor cannot raise.
    """

    at: int
    where: str
    escaped: bool

    def __str__(self) -> str:
        return f"after an interrupt at point {self.at}, {self.where}"


class _Injector:
    """A trace function that raises KeyboardInterrupt at point number `at` of the files under `folders`.

    Attributes:
        points: how many points have been passed.
        where: where the interrupt was; None before.
    """

    def __init__(self, at: int, folders: Collection[str], functions: Collection[str], ends: bool) -> None:
        self.at, self.points, self.where, self._ends = at, 0, None, ends
        self._folders, self._functions = tuple(folders), functions
        self._after_call: dict[int, bool] = {}  # by id: a frame that is kept would keep its variables

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "call" and frame.f_back is not None:
            self._after_call[id(frame.f_back)] = False  # what it calls is written in Python
        code = frame.f_code
        if not code.co_filename.startswith(self._folders) or (self._functions and code.co_name not in self._functions):
            return self if event == "call" else None
        if self.where is None and self._is_point(frame, event):
            self.points += 1
            if self.points == self.at:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}, {code.co_qualname}"
                sys.settrace(None)
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # raises KeyboardInterrupt, or lets it wait
                return None
        return self

    def _is_point(self, frame: FrameType, event: str) -> bool:
        if self._ends:
            frame.f_trace_opcodes = True
            return event == "opcode" and frame.f_lasti in _ends_of_blocks(frame.f_code)
        if event == "call":
            frame.f_trace_opcodes = True
            self._after_call.pop(id(frame), None)
            return frame.f_lasti not in _yields(frame.f_code)  # else it goes on, perhaps with an exception
        if event == "line":
            is_instruction = frame.f_code.co_code[frame.f_lasti] != _NOP  # as a line `try:` is
            return is_instruction and frame.f_lasti not in _ends_of_blocks(frame.f_code)
        if event == "opcode":
            after_call = self._after_call.get(id(frame), False)
            self._after_call[id(frame)] = frame.f_lasti in _calls(frame.f_code)
            in_block = frame.f_lasti not in _ends_of_blocks(frame.f_code)
            return (after_call and in_block) or frame.f_lasti in _resumes(frame.f_code)
        return False


@functools.cache
def _yields(code: CodeType) -> frozenset[int]:
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname == "YIELD_VALUE")


@functools.cache
def _resumes(code: CodeType) -> frozenset[int]:
    """Return where a generator goes on without an exception; the beginning of a function has the argument 0."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME" and each.arg)


@functools.cache
def _calls(code: CodeType) -> frozenset[int]:
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname in _CALLS)


@functools.cache
def _ends_of_blocks(code: CodeType) -> frozenset[int]:
    """Return where a `with` block ends: where its `__exit__` gets three times None, or an exception."""
    rows = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOP")]
    ends = {row.offset for row, after in itertools.pairwise(rows) if after.opname == "WITH_EXCEPT_START"}
    for before, first, second, third in zip(rows, rows[1:], rows[2:], rows[3:], strict=False):
        if all(each.opname.startswith("LOAD_CONST") and each.argval is None for each in (first, second, third)):
            ends.add(first.offset)
            if before.opname == "SWAP":  # a `return` in the block
                ends.add(before.offset)
    return frozenset(ends)


def interrupted(
    step: Callable[[], object],
    at: int,
    *,
    folders: Collection[str] = (PACKAGE,),
    functions: Collection[str] = (),
    ends: bool = False,
) -> Interrupt | None:
    """Call `step` with an interrupt at point number `at`; return None if it has fewer points.

    Args:
        step: the code to interrupt. Other exceptions propagate.
        at: from 1.
        folders: the prefixes of the names of the files that are interrupted.
        functions: the names of the functions that are interrupted; empty for all.
        ends: whether the points are the ends of `with` blocks, before `__exit__` is called.
    """
    injector, escaped = _Injector(at, folders, functions, ends), False
    before = sys.gettrace()
    sys.settrace(injector)
    try:
        step()
    except KeyboardInterrupt:
        escaped = True
    finally:
        sys.settrace(before)
    return None if injector.where is None else Interrupt(at, injector.where, escaped)


def interrupted_everywhere(
    step: Callable[[], object], *, first: int = 1, every: int = 1, most: int = 20_000, **where: Any
) -> Iterator[Interrupt]:
    """Call `step` again and again, each time with an interrupt at a later point, until it ends without one.

    Args:
        step: as for `interrupted`, and so are the arguments in `where`.
        first: the first point.
        every: the distance to the next one; 1 for every point.
        most: the number of points after which the step is taken to have no end.

    Yields:
        Each interrupt, after the step.
    """
    for at in range(first, most, every):
        interrupt = interrupted(step, at, **where)
        if interrupt is None:
            return
        yield interrupt
    raise AssertionError(f"the step has not ended after {most} points")
