"""What a float32 rule costs: the share of a step's 16-bit multiply-adds that it moves to float32.

product (rows, inner) @ (inner, columns)    rows * inner * columns
convolution                                 outputs * inputs of one output
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from amplab.display.numbers import count, percent
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.trace import OpRecord, Trace

__all__ = ["cost_of_modules", "cost_of_ops", "is_half_product", "multiply_adds", "sides"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_CONVOLUTION = "convolution"


def cost_of_modules(trace: Trace, modules: Iterable[str]) -> str:
    """Return, as a comment, what a rule for these modules and those inside of them costs."""
    paths = tuple(modules)
    return _cost(trace, lambda each: any(each.module == path or each.module.startswith(f"{path}.") for path in paths))


def cost_of_ops(trace: Trace, ops: Iterable[str]) -> str:
    """Return, as a comment, how many calls a rule for these ops concerns, and what it costs."""
    names = tuple(ops)
    calls = sum(each.op in names and each.phase == "forward" and not each.is_view for each in trace)
    return f"{_cost(trace, lambda each: each.op in names)}; {count(calls, 'call')} of the op in a step"


def _cost(trace: Trace, is_ruled: Callable[[OpRecord], bool]) -> str:
    work = [(multiply_adds(each), is_ruled(each)) for each in trace if is_half_product(each)]
    total, moved = sum(size for size, _ in work), sum(size for size, ruled in work if ruled)
    if not moved:
        return "# costs little: no matrix product moves to float32"
    return f"# costs: {percent(moved / total)} of the 16-bit multiply-adds of a step move to float32"


def is_half_product(record: OpRecord) -> bool:
    """Whether an op is a matrix product or a convolution that writes 16-bit numbers."""
    kind = record.aten.split(".")[1]
    return kind in (*_PRODUCTS, _CONVOLUTION) and all(info.dtype in LOW_PRECISION_DTYPES for info in record.outputs)


def sides(record: OpRecord) -> tuple[int, ...]:
    """Rows, inner size and columns of a product; channels in and out of a convolution."""
    kind = record.aten.split(".")[1]
    if kind == _CONVOLUTION:
        return record.inputs[1].shape[1], record.inputs[1].shape[0]
    place = 1 if kind.startswith(("addmm", "baddbmm")) else 0
    left, right = (info.shape for info in record.inputs[place : place + 2])
    return left[-2], left[-1], right[-1]


def multiply_adds(record: OpRecord) -> int:
    """The number of outputs times the number of inputs that each of them sums."""
    if record.aten.split(".")[1] == _CONVOLUTION:
        return record.outputs[0].numel * math.prod(record.inputs[1].shape[1:])
    return record.outputs[0].numel * sides(record)[1]
