"""Rules about results that are wrong in float16 although the loss may look right.

Pure functions from an `ObservedStep`, measured in detail, to findings:

    overflow-in-half      an op wrote inf from finite numbers; a number divided by it is 0
    variance-in-half      E[x^2] - E[x]^2 of nearly equal float16 numbers: the difference is rounding error
    exponential-in-half   exp or a power came close to 65504, or became 0
    logarithm-in-half     a logarithm read subnormal float16 numbers, which have few bits

If inf or NaN reaches the loss or a gradient, `rules.nonfinite` reports it. Reductions, casts and large constants are in
`rules.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.dataflow import (
    computes_in_half,
    forward_ops,
    place_of,
    short_name,
    squares,
    upstream,
)
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX, TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.remedies.float32 import kept_in_float32, variance_in_float32
from amplab.diagnose.remedies.float32_function import body_in_float32
from amplab.diagnose.rules.nonfinite import LOGARITHMS, REDUCTIONS
from amplab.trace import OpRecord

__all__ = ["ARITHMETIC_RULES", "arithmetic_findings", "cancellations"]

CANCELLED = 2.0**-7
"""A difference this much smaller than its operands keeps at most 4 of the 11 bits of float16."""

NEAR = 8.0
"""An exp within this factor of 65504 overflows when its input grows by about 2."""

SUBNORMAL = 2.0**-14
"""The smallest normal float16 number; below it each halving loses a bit."""

_EXPONENTIALS = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "pow"))
_LOGARITHMS = frozenset(("log", "log2", "log10"))
_MEANT = (
    REDUCTIONS | LOGARITHMS | frozenset(("div", "true_divide", "reciprocal", "rsqrt", "masked_fill", "where", "fill"))
)
"""Ops whose inf another rule reports, or is intended: 1 / 0, a mask."""


def arithmetic_findings(step: ObservedStep, api: Api | None = None) -> list[Finding]:
    """Apply every rule of this file; arguments as of `value_findings`."""
    return [found for rule in ARITHMETIC_RULES for found in rule(step, api or Api())]


def overflows_that_do_not_show(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """An op that wrote inf in float16 from finite numbers. A square does harm: its root or mean is a divisor.

    Elsewhere inf may do no harm: a sigmoid returns 0 or 1 for it. If the loss is not finite, `rules.nonfinite` has
    already named the first op.
    """
    if not step.values[step.loss].summary.is_finite:
        return
    for record in forward_ops(step):
        written = step.outputs(record.index)[0].summary
        if not (written.is_half and written.infs) or record.is_cast or short_name(record) in _MEANT:
            continue
        read = [value.summary for value in step.inputs(record.index)]
        constants = step.ops[record.index].numbers
        if read and all(each.is_finite for each in read) and all(abs(number) <= HALF_MAX for number in constants):
            harms = squares(step, record.index)
            note = "or F.rms_norm, F.normalize: they compute in float32 internally" if harms else ""
            yield finding(
                "overflow-in-half",
                severity="warning" if harms else "note",
                **place_of(record),
                evidence={"input_absmax": max(e.absmax for e in read), "infs": written.infs, "elements": written.numel},
                code=body_in_float32(step, record, note, api=api)
                or kept_in_float32(record, note, api=api, trace=step.trace),
            )


def variances_that_cancel(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A difference in float16 of a mean of squares and the square of a mean, far smaller than both."""
    for record, largest, left in cancellations(step):
        if _of_squares(step, record.index):
            yield finding(
                "variance-in-half",
                severity="warning",
                **place_of(record),
                evidence={"input_absmax": largest, "left": left.absmax, "zeros": left.zeros or 0},
                code=variance_in_float32(record, api=api),
            )


def cancellations(step: ObservedStep) -> Iterator[tuple[OpRecord, float, TensorSummary]]:
    """Yield each difference in float16 far smaller than both operands: its op, the largest operand, the result."""
    for record in forward_ops(step):
        if short_name(record) not in ("sub", "rsub") or not computes_in_half(step, record.index):
            continue
        taken_of = [value.summary.absmax for value in step.inputs(record.index)]
        left = step.outputs(record.index)[0].summary
        if len(taken_of) == 2 and left.is_finite and left.absmax < CANCELLED * min(taken_of):
            yield record, max(taken_of), left


def _of_squares(step: ObservedStep, op: int) -> bool:
    """Whether a reduction and two squares are at most four ops before an op."""
    above = list(upstream(step, op, 4))
    reduces = any(short_name(step.trace.records[each]) in REDUCTIONS for each in above)
    return reduces and sum(squares(step, each) for each in above) >= 2


def exponentials_in_half(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """An exp, or a power other than a square, near an end of the float16 range; not exp(-inf) of a mask."""
    for record in forward_ops(step):
        if short_name(record) not in _EXPONENTIALS or not computes_in_half(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost = (written.zeros or 0) - (read.infs or 0) if short_name(record) in ("exp", "exp2") else 0
        near = written.is_finite and written.absmax * NEAR > HALF_MAX
        if lost > 0 or near:
            yield finding(
                "exponential-in-half",
                **place_of(record),
                evidence={"highest": written.absmax, "zeros": max(lost, 0), "elements": written.numel},
                what=f"reached {written.absmax:.4g}" if near else f"wrote {lost:,} zeros",
                code=kept_in_float32(record, api=api, trace=step.trace),
            )


def logarithms_in_half(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A logarithm in float16 of a non-zero number below 2^-14."""
    for record in forward_ops(step):
        if short_name(record) not in _LOGARITHMS or not computes_in_half(step, record.index):
            continue
        read = step.inputs(record.index)[0].summary
        if read.smallest is not None and read.smallest < SUBNORMAL:
            fused = "or log_softmax, logsigmoid, logsumexp: they do not compute the small number"
            yield finding(
                "logarithm-in-half",
                **place_of(record),
                evidence={"smallest": read.smallest, "elements": read.numel},
                code=kept_in_float32(record, fused, api=api, trace=step.trace),
            )


ARITHMETIC_RULES: tuple[Callable[[ObservedStep, Api], Iterator[Finding]], ...] = (
    overflows_that_do_not_show,
    variances_that_cancel,
    exponentials_in_half,
    logarithms_in_half,
)
