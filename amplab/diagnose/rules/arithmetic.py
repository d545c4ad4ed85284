"""Rules about results that half gets wrong and a loss need not show: pure functions from an `ObservedStep`, measured in
detail.

    overflow-in-half      an op wrote inf of finite numbers, and what is divided by it is 0
    variance-in-half      E[x^2] - E[x]^2 of halves that are nearly equal: what is left of them is rounding
    exponential-in-half   exp or a power came near 65504, or to 0
    logarithm-in-half     a logarithm read subnormal halves, which have few bits

Where it reaches the loss or a gradient, `rules.nonfinite` says so. Reductions, casts and large constants are in
`rules.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.dataflow import computes_in_half, forward_ops, place_of, short_name, upstream
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.float32 import kept_in_float32, variance_in_float32
from amplab.diagnose.rules.nonfinite import LOGARITHMS, REDUCTIONS

__all__ = ["ARITHMETIC_RULES", "arithmetic_findings"]

CANCELLED = 2.0**-7
"""A difference this much smaller than what it is taken of keeps at most 4 of half's 11 bits."""

NEAR = 8.0
"""Within this factor of 65504 an exp leaves half when what it reads grows by 2."""

SUBNORMAL = 2.0**-14
"""Half's smallest normal number; below it each halving costs a bit."""

_EXPONENTIALS = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "pow"))
_LOGARITHMS = frozenset(("log", "log2", "log10"))
_MEANT = (
    REDUCTIONS | LOGARITHMS | frozenset(("div", "true_divide", "reciprocal", "rsqrt", "masked_fill", "where", "fill"))
)
"""Ops whose inf another rule is about, or is what they were asked for: 1 / 0, a mask."""


def arithmetic_findings(step: ObservedStep, level: str | None = "O1") -> list[Finding]:
    """Apply every rule of this file; arguments as of `value_findings`."""
    return [finding for rule in ARITHMETIC_RULES for finding in rule(step, level)]


def overflows_that_do_not_show(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """An op that wrote inf in half of finite numbers. Harm: a square, whose root or mean something is divided by.

    Elsewhere inf may be as good as what it stands for: a sigmoid or a mask makes 0 or 1 of either. Where the loss does
    show it, the first op is named already.
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
            yield Finding(
                "overflow-in-half",
                "warning" if _squares(step, record.index) else "note",
                f"{record.op} wrote {written.infs:,} inf in half from inputs up to {max(e.absmax for e in read):.4g}.",
                f"The result is larger than {HALF_MAX:g}; what is divided by it is 0, and the loss may not show it.",
                kept_in_float32(record, "or F.rms_norm, F.normalize: they compute in float32 inside", level=level)
                if _squares(step, record.index)
                else kept_in_float32(record, level=level),
                **place_of(record),
                evidence={"input_absmax": max(e.absmax for e in read), "infs": written.infs, "elements": written.numel},
            )


def variances_that_cancel(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """A difference in half of a mean of squares and the square of a mean, far smaller than both."""
    for record in forward_ops(step):
        if short_name(record) not in ("sub", "rsub") or not computes_in_half(step, record.index):
            continue
        taken_of = [value.summary.absmax for value in step.inputs(record.index)]
        left = step.outputs(record.index)[0].summary
        if (
            len(taken_of) == 2
            and left.is_finite
            and left.absmax < CANCELLED * min(taken_of)
            and _of_squares(step, record.index)
        ):
            yield Finding(
                "variance-in-half",
                "warning",
                f"{record.op} of halves up to {max(taken_of):.4g} left a variance of at most {left.absmax:.4g}.",
                "Half keeps 11 bits: where E[x^2] and E[x]^2 are nearly equal, what is left of them is rounding.",
                variance_in_float32(record, level=level),
                **place_of(record),
                evidence={"input_absmax": max(taken_of), "left": left.absmax, "zeros": left.zeros or 0},
            )


def _of_squares(step: ObservedStep, op: int) -> bool:
    """Whether an op is up to four behind a reduction and behind two squares."""
    above = list(upstream(step, op, 4))
    reduces = any(short_name(step.trace.records[each]) in REDUCTIONS for each in above)
    return reduces and sum(_squares(step, each) for each in above) >= 2


def _squares(step: ObservedStep, op: int) -> bool:
    name, (places, _, numbers) = short_name(step.trace.records[op]), step.ops[op]
    if name == "mul":
        return len(places) == 2 and places[0] == places[1]
    return name == "square" or (name == "pow" and 2.0 in numbers)


def exponentials_in_half(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """An exp or a power other than the second in half, at one of half's ends; a mask of -inf is meant to be 0."""
    for record in forward_ops(step):
        if short_name(record) not in _EXPONENTIALS or not computes_in_half(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost = (written.zeros or 0) - (read.infs or 0) if short_name(record) in ("exp", "exp2") else 0
        near = written.is_finite and written.absmax * NEAR > HALF_MAX
        if lost > 0 or near:
            what = f"came to {written.absmax:.4g}" if near else f"wrote {lost:,} zeros"
            yield Finding(
                "exponential-in-half",
                "note",
                f"{record.op} in half {what} among {written.numel:,} elements.",
                f"Half ends at {HALF_MAX:g}, which is exp(11.1), and at 6e-08, which is exp(-16.6).",
                kept_in_float32(record, level=level),
                **place_of(record),
                evidence={"highest": written.absmax, "zeros": max(lost, 0), "elements": written.numel},
            )


def logarithms_in_half(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """A logarithm in half of a number below 2^-14, and not 0."""
    for record in forward_ops(step):
        if short_name(record) not in _LOGARITHMS or not computes_in_half(step, record.index):
            continue
        read = step.inputs(record.index)[0].summary
        if read.smallest is not None and read.smallest < SUBNORMAL:
            yield Finding(
                "logarithm-in-half",
                "note",
                f"{record.op} read halves down to {read.smallest:.4g}.",
                "Below 6.1e-05 half has fewer than 11 bits, and at or below 2.98e-08 it is 0, whose logarithm is -inf.",
                kept_in_float32(record, "or log_softmax, logsigmoid, logsumexp: they never form it", level=level),
                **place_of(record),
                evidence={"smallest": read.smallest, "elements": read.numel},
            )


ARITHMETIC_RULES: tuple[Callable[[ObservedStep, str | None], Iterator[Finding]], ...] = (
    overflows_that_do_not_show,
    variances_that_cancel,
    exponentials_in_half,
    logarithms_in_half,
)
