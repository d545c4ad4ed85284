"""The points at which an op, or its slope, is infinite; which of them a step reached, and why a value is there.

    op                      domain       infinite at      infinite slope at
    log, log2, log10        [0, inf)     0                0
    log1p                   [-1, inf)    -1               -1
    logit, ndtri            [0, 1]       0, 1             0, 1
    atanh, erfinv           [-1, 1]      -1, 1            -1, 1
    acos, asin              [-1, 1]                       -1, 1
    acosh                   [1, inf)                      1
    sqrt, x^p (0 < p < 1)   [0, inf)                      0
    rsqrt                   [0, inf)     0                0

All points are ends of a domain, so the smallest and the largest element of an input show whether it contains one.
All functions are pure functions of an `ObservedStep`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from amplab.diagnose.observed_step.dataflow import short_name, writers
from amplab.diagnose.observed_step.tensor_summary import TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep

__all__ = ["DOMAINS", "Domain", "Met", "Origin", "domain_of", "forward_op_of", "met_point"]


class Domain(NamedTuple):
    """Where an op is defined, and at which ends it and its slope are infinite."""

    lowest: float
    highest: float
    infinite_at: tuple[float, ...] = ()
    steep_at: tuple[float, ...] = ()

    def __str__(self) -> str:
        closing = "inf)" if math.isinf(self.highest) else f"{self.highest:g}]"
        return f"[{self.lowest:g}, {closing}"


_LOG = Domain(0, math.inf, (0,), (0,))
_ROOT = Domain(0, math.inf, (), (0,))
_PROBABILITY = Domain(0, 1, (0, 1), (0, 1))
_TO_LINE = Domain(-1, 1, (-1, 1), (-1, 1))
_ARC = Domain(-1, 1, (), (-1, 1))
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10"), _LOG),
    "log1p": Domain(-1, math.inf, (-1,), (-1,)),
    **dict.fromkeys(("logit", "special_ndtri"), _PROBABILITY),
    **dict.fromkeys(("atanh", "erfinv"), _TO_LINE),
    **dict.fromkeys(("acos", "asin"), _ARC),
    "acosh": Domain(1, math.inf, (), (1,)),
    "sqrt": _ROOT,
    "rsqrt": _LOG,
}
"""Op of the dispatcher -> its domain."""

Why = Literal["bound", "factor", "eps", "end", "rounded", "cast", "saturated", "given"]


class Origin(NamedTuple):
    """What moved a value onto a singular point.

    Args:
        why: "bound", "factor" or "eps": a number in the code that is different from the point, and equal to it (or
            without effect) in the dtype of its op; "end": a bound that is the point itself; "rounded": an op whose
            result rounds to the point in float16; "cast": a cast to float16; "saturated": an op whose result rounds
            to the point in float32 too; "given": no op moved it, or another op computed exactly this value.
        op: the number of that op; None if it is no op of the step.
        number: the number in the code.
        between: numbers of the ops from there to the singular one, in order of execution.
    """

    why: Why
    op: int | None = None
    number: float = 0.0
    between: tuple[int, ...] = ()


class Met(NamedTuple):
    """A singular point that a step met.

    Args:
        op: the number of the op, in forward.
        points: the points that its input contains.
        origin: what moved the values onto it.
    """

    op: int
    points: tuple[float, ...]
    origin: Origin


def domain_of(step: ObservedStep, op: int) -> Domain | None:
    """The domain of an op; None for an op that is defined everywhere."""
    name = short_name(step.trace.records[op])
    if name != "pow":
        return DOMAINS.get(name)
    exponent = next(iter(step.ops[op].numbers), 1.0)
    return _ROOT if 0 < exponent < 1 else None


def forward_op_of(step: ObservedStep, op: int) -> Iterator[int]:
    """The forward ops whose gradient an op of the backward computes: those with its name, line and module."""
    record = step.trace.records[op]
    if record.phase == "forward":
        yield op
        return
    for number in range(op):
        each = step.trace.records[number]
        if each.phase == "forward" and (each.op, each.module, each.line) == (record.op, record.module, record.line):
            yield number


def met_point(step: ObservedStep, op: int, *, in_float32_too: bool) -> Met | None:
    """Return the singular point that made the output of an op infinite, or its gradient; None if there is none.

    Args:
        step: the step.
        op: the op that wrote the first non-finite value, in forward or in backward.
        in_float32_too: whether the step is not finite in float32 either.
    """
    backward = step.trace.records[op].phase == "backward"
    for number in forward_op_of(step, op):
        domain = domain_of(step, number)
        if domain is None or not step.ops[number].inputs:
            continue
        read = step.inputs(number)[0].summary
        points = tuple(each for each in (domain.steep_at if backward else domain.infinite_at) if _has(read, each))
        points = points or tuple(each for each in domain.infinite_at if _has_after_eps(step, number, each))
        if points:
            return Met(number, points, _origin(step, number, points, in_float32_too))
    return None


def _has(summary: TensorSummary, point: float) -> bool:
    return point in (summary.lowest, summary.highest)


def _has_after_eps(step: ObservedStep, op: int, point: float) -> bool:
    """Whether the eps of a logit, which clamps to [eps, 1 - eps], is without effect at a point."""
    read = step.inputs(op)[0].summary
    numbers = step.ops[op].numbers
    if short_name(step.trace.records[op]) != "logit" or not numbers:
        return False
    bound = numbers[0] if point == 0 else 1 - numbers[0]
    outside = read.lowest < point if point == 0 else read.highest > point
    return outside and _rounded(bound, read.dtype) == point


def _origin(step: ObservedStep, op: int, points: tuple[float, ...], in_float32_too: bool) -> Origin:
    """Search from the input of an op backward through the graph for the op that moved a value onto the points."""
    if step.ops[op].numbers and short_name(step.trace.records[op]) == "logit":
        return Origin("eps", op, step.ops[op].numbers[0])
    place, passed = step.ops[op].inputs[0], [op]
    for _ in range(_FARTHEST):
        above = next(writers(step, place), None)
        if above is None:
            return Origin("given", None, 0.0, tuple(reversed(passed)))
        record, between = step.trace.records[above], tuple(reversed(passed))
        read = step.inputs(above)
        if record.is_cast and not step.outputs(above)[0].summary.is_half:
            place = step.ops[above].inputs[-1]
            continue
        passed.append(above)
        if (lost := _lost_number(step, above, points)) is not None:
            return Origin(*lost[:1], above, lost[1], between)
        if record.is_cast:
            rounds = not in_float32_too and read and not read[-1].summary.is_half
            return Origin("cast" if rounds else "given", above, 0.0, between)
        if short_name(record) not in _PASS or not read:
            half = step.outputs(above)[0].summary.is_half if step.ops[above].outputs else False
            if half and not in_float32_too:
                return Origin("rounded", above, 0.0, between)
            return Origin("saturated" if short_name(record) in _SATURATE else "given", above, 0.0, between)
        place = step.ops[above].inputs[0]
    return Origin("given", None, 0.0, tuple(reversed(passed)))


_FARTHEST = 6
_PASS = frozenset(("neg", "rsub", "add", "sub", "clone", "clamp", "clamp_min", "clamp_max", "hardtanh"))
_CLAMPS = frozenset(("clamp", "clamp_min", "clamp_max", "hardtanh"))
_SATURATE = frozenset(("sigmoid", "tanh", "softmax", "erf", "exp", "special_ndtr"))
"""Ops whose result rounds to an end of its range for large inputs, in every dtype."""


def _lost_number(step: ObservedStep, op: int, points: tuple[float, ...]) -> tuple[Why, float] | None:
    """A number of an op that equals a point, or has no effect, in the dtype that the op computes in."""
    name, written = short_name(step.trace.records[op]), step.outputs(op)
    if not written:
        return None
    dtype = written[0].summary.dtype
    for number in step.ops[op].numbers:
        equal = _rounded(number, dtype)
        if name in _CLAMPS and any(equal == _rounded(sign * point, dtype) for point in points for sign in (1, -1)):
            exact = any(number == sign * point for point in points for sign in (1, -1))
            if exact and any(number == point for point in (written[0].summary.lowest, written[0].summary.highest)):
                return "end", number
            if not exact and equal in (written[0].summary.lowest, written[0].summary.highest):
                return "bound", number
        if name in ("mul", "div") and number != 1 and equal == 1:
            return "factor", number
        if name in ("add", "sub", "rsub") and number and abs(number) < torch.finfo(dtype).eps and _ends(points):
            return "eps", number
    return None


def _ends(points: tuple[float, ...]) -> bool:
    return any(point != 0 for point in points)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()
