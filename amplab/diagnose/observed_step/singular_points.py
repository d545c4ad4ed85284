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

`met_point` names an op as the cause only with a proof: computed in float32 from an element that the op read, its result
is not the point, and it is the point once rounded to float16. Where float32 gives the same result, the search goes on
with the element that was read. Ops that read several tensors prove nothing.
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

Why = Literal["bound", "factor", "eps", "end", "rounded", "cast", "saturated", "given", "unknown"]


class Origin(NamedTuple):
    """What moved a value onto a singular point.

    Args:
        why: "bound", "factor" or "eps": a number in the code that is different from the point, and equal to it (or
            without effect) in the dtype of its op; "end": a bound that is the point itself; "rounded": an op whose
            result rounds to the point in float16; "cast": a cast to float16; "saturated": an op whose result rounds
            to the point in float32 too; "given": none of these is proved, and the step is not finite in float32 either;
            "unknown": none is proved, and it is finite in float32.
        op: the number of that op; None if it is no op of the step.
        number: the number in the code.
        between: numbers of the ops from there to the singular one, in order of execution.
        ends: what that op wrote there; it need not be the singular point, as in log(1 - sigmoid(x)).
    """

    why: Why
    op: int | None = None
    number: float = 0.0
    between: tuple[int, ...] = ()
    ends: tuple[float, ...] = ()


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
    otherwise: Why = "given" if in_float32_too else "unknown"
    for _ in range(_FARTHEST):
        above = next((each for each in writers(step, place) if _wrote(step, each, points)), None)
        between = tuple(reversed(passed))
        if above is None:
            return Origin(otherwise, None, 0.0, between)
        points = tuple(each for each in points if _has(step.outputs(above)[0].summary, each))
        record = step.trace.records[above]
        if not (record.is_cast and not step.outputs(above)[0].summary.is_half):
            passed.append(above)
        if (bound := _bound(step, above, points)) is not None:
            return Origin(bound[0], above, bound[1], between)
        rounds, passes = _computed_again(step, above, points)
        if rounds and not (in_float32_too and passes):
            return Origin(*_rounding(step, above, points), between, points)
        if not passes or short_name(record) in _SATURATE:
            return Origin("saturated" if passes else otherwise, above, 0.0, between, points)
        place, points = step.ops[above].inputs[-1 if record.is_cast else 0], passes
    return Origin(otherwise, None, 0.0, tuple(reversed(passed)))


_FARTHEST = 6
_EXACT = frozenset(("clone", "clamp", "clamp_min", "clamp_max", "hardtanh"))
_CLAMPS = frozenset(("clamp", "clamp_min", "clamp_max", "hardtanh"))
_WITH_NUMBER = frozenset(("add", "sub", "rsub", "mul", "div", "pow"))
_SATURATE = frozenset(("sigmoid", "tanh", "erf", "exp", "special_ndtr"))
"""Ops whose result rounds to an end of its range for large inputs, in every dtype."""


def _wrote(step: ObservedStep, op: int, points: tuple[float, ...]) -> bool:
    return any(_has(each.summary, point) for each in step.outputs(op)[:1] for point in points)


def _computed_again(
    step: ObservedStep, op: int, points: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The elements that an op read whose results round to a point in its dtype only, and those that do in float32 too.

    Both are empty for an op that does not compute its result from one element and at most one number.
    """
    read, dtype = step.inputs(op), step.outputs(op)[0].summary.dtype
    if len(read) != 1 or torch.finfo(dtype).bits > _BITS_OF_FLOAT32:
        return (), ()
    rounds, passes = [], []
    for each in dict.fromkeys((read[0].summary.lowest, read[0].summary.highest)):
        result = _result(step, op, each, torch.float32)
        if result in points:
            passes.append(each)
        elif result is not None and (_rounded(result, dtype) in points or _result(step, op, each, dtype) in points):
            rounds.append(each)
    return tuple(rounds), tuple(passes)


_BITS_OF_FLOAT32 = 32


def _result(step: ObservedStep, op: int, element: float, dtype: torch.dtype) -> float | None:
    """The result of an op for one element, in a dtype; None if the op needs more than the element and one number."""
    record, numbers = step.trace.records[op], step.ops[op].numbers
    name = short_name(record)
    if record.is_cast or name in _EXACT:
        return _rounded(element, dtype)
    _, base, overload = record.aten.split(".")
    function = getattr(getattr(torch.ops.aten, base), overload)
    seeded = torch.Tag.nondeterministic_seeded in function.tags
    fits = len(numbers) == 1 if name in _WITH_NUMBER else not numbers
    if seeded or torch.Tag.pointwise not in function.tags or not fits:
        return None
    try:
        return float(function(torch.tensor([element], dtype=dtype), *numbers))
    except (RuntimeError, TypeError):  # it takes more arguments
        return None


def _rounding(step: ObservedStep, op: int, points: tuple[float, ...]) -> tuple[Why, int, float]:
    """What is said of an op whose result rounds to a point."""
    record = step.trace.records[op]
    if record.is_cast:
        return "cast", op, 0.0
    name, dtype = short_name(record), step.outputs(op)[0].summary.dtype
    number = next(iter(step.ops[op].numbers), 0.0)
    if name in ("mul", "div") and number != 1 and _rounded(number, dtype) == 1:
        return "factor", op, number
    if name in ("add", "sub", "rsub") and abs(number) < torch.finfo(dtype).eps and _ends(points):
        return "eps", op, number
    return "rounded", op, 0.0


def _bound(step: ObservedStep, op: int, points: tuple[float, ...]) -> tuple[Why, float] | None:
    """The bound of a clamp that is a point, in the dtype that the op computes in; None if there is none."""
    if short_name(step.trace.records[op]) not in _CLAMPS:
        return None
    wrote = step.outputs(op)[0].summary
    for number in step.ops[op].numbers:
        equal = _rounded(number, wrote.dtype)
        if equal in points and _has(wrote, equal):
            return "end" if number == equal else "bound", number
    return None


def _ends(points: tuple[float, ...]) -> bool:
    return any(point != 0 for point in points)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()
