"""Why a value overflowed in float32, where no dtype and no loss scale fixes it: the weights, the batch or the op.

undefined             a mean over no elements
constant              a large number in the code: the values are large because of it
weights               large weights: earlier steps made them so, with a learning rate that is too large
batch                 a batch with large numbers, which was not normalized
exp…, power           the op: exp of 89 is larger than any float32 number
"""

from __future__ import annotations

import math
from typing import Any

from amplab.diagnose.first_nonfinite import FirstNonfinite
from amplab.diagnose.observed_step.dataflow import nearest_constant, short_name
from amplab.diagnose.observed_step.tensor_summary import TensorSummary
from amplab.diagnose.remedies.users_code import with_smaller_number
from amplab.trace import OpRecord

__all__ = ["large_batch", "why_out_of_float32"]

LARGE = 1e3
"""Weights above this come from earlier steps, and a batch above this was not normalized: both are usually about 1."""

LARGE_NUMBER = 1e6
"""A number in the user's code of at least this size may overflow float32 when it is squared or multiplied."""

OTHER_FACTORS = 1e4
"""A number is not the cause if the non-finite op read values larger than the number times this factor."""

_LIMITS = {"exp": 88.72, "expm1": 88.72, "exp2": 128.0, "sinh": 89.42, "cosh": 89.42}
_POWERS = ("pow", "square", "mul", "prod", "cumprod")


def why_out_of_float32(found: FirstNonfinite, record: OpRecord) -> tuple[str, dict[str, Any]]:
    """Return the case of `nonfinite-in-float32` for a value, and the fields of its sentences."""
    name = short_name(record)
    if found.output.nans and not found.output.infs:
        return "undefined", {}
    constant = nearest_constant(found.step, record.index, lambda op: _explains(found, op))
    if constant is not None and found.phase == "forward":
        at = found.step.trace.records[constant[0]]
        by = f"{at.op}{f', {at.line},' if at.line is not None else ''}"
        return "constant", {"constant": constant[1], "by": by, "code": with_smaller_number(at.line, at.op)}
    weights, batch = _largest(found, "parameter"), _largest(found, "batch")
    if weights > LARGE:
        return "weights", {"weights": weights}
    if name in _LIMITS and found.phase == "forward":
        limit = _LIMITS[name]
        fine = f" The weights are not the cause: they are at most {weights:.4g}." if weights else ""
        return _exponential(found, record), {"limit": limit, "most": limit * 0.9, "weights_are_fine": fine}
    if batch > LARGE:
        return "batch", {"batch": batch}
    if name in _POWERS and found.phase == "forward":
        return "power", {"weights": weights}
    return "", {}


def large_batch(found: FirstNonfinite) -> float | None:
    """Return the largest number of the batch if it, and no weight, is too large to be normalized; else None."""
    weights, batch = _largest(found, "parameter"), _largest(found, "batch")
    return batch if batch > LARGE >= weights else None


def _explains(found: FirstNonfinite, op: int) -> float | None:
    """A number of an op that is large itself, and about as large as what the non-finite op read."""
    read = max((each.absmax for each in found.inputs), default=0.0)
    numbers = (abs(each) for each in found.step.ops[op].numbers)
    return next((each for each in numbers if LARGE_NUMBER <= each < math.inf and read <= OTHER_FACTORS * each), None)


def _exponential(found: FirstNonfinite, record: OpRecord) -> str:
    """The case for an exponential, by the ops that follow it."""
    later = [short_name(each) for each in found.chain[1:]]
    if "log1p" in later:
        return "exp-log1p"
    if "log" in later:
        return "exp-log"
    return "exp-ratio" if "div" in later and record.op == "exp" else "exp"


def _largest(found: FirstNonfinite, kind: str) -> float:
    return max((_size(value.summary) for value in found.step.values if value.kind == kind), default=0.0)


def _size(statistics: TensorSummary) -> float:
    return statistics.absmax if statistics.is_finite else 0.0
