"""Rules about the values of one step: pure functions from an `ObservedStep`, measured in detail, to findings.

They judge by the values that ops received, not by what the code says. A danger that did no harm to the values of this
step is a note at most. If inf or NaN reached the loss or a gradient, `rules.nonfinite` reports it.

    constant-underflows-half    a constant of a float16 op rounds to 0, and a division or logarithm received the 0
    constant-overflows-half     a constant of a float16 op is larger than 65504 and became inf
    cast-overflows-half         a cast to float16 turned finite values into inf
    square-underflows-half      squares of small numbers are 0: a variance or norm computed by hand
    softmax-in-half             the smallest probabilities are 0
    reduction-overflows-half    a sum in float16 is inf, and the loss does not show it
    reduction-near-overflow     a sum in float16 is close to 65504
    norm-of-constant            every group of a norm layer has a variance of 0
    bce-after-sigmoid           binary cross entropy of probabilities that round to 0 and 1
    gradients-underflow         gradients became 0 when they were cast to float16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.dataflow import (
    computes_in_half,
    forward_ops,
    line_of,
    place_of,
    readers_by_op,
    short_name,
    squares,
    writers,
)
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX, HALF_UNDERFLOWS, TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.remedies.float32 import kept_in_float32
from amplab.diagnose.remedies.users_code import with_smaller_number
from amplab.diagnose.rules.nonfinite import (
    DIVISIONS,
    LOGARITHMS,
    REDUCTIONS,
    SOFTMAXES,
    constant_lost_in_half,
    sigmoid_of_bce,
)
from amplab.display.numbers import power
from amplab.trace import OpRecord

__all__ = ["VALUE_RULES", "value_findings"]

_SQUARES = frozenset(("pow", "square", "mul"))
_BCE = frozenset(("binary_cross_entropy",))

LOST = 0.5
"""Share of squares that are 0 above which a variance ignores most of its elements."""

NEAR = 8.0
"""A reduction within this factor of 65504 overflows after three doublings of its inputs."""

UNDERFLOW_NOTE, UNDERFLOW_WARNING = 0.01, 0.1
"""Shares of non-zero gradient elements lost: for a note, and for a warning."""

UNDERFLOW_WEIGHT = 0.01
"""Sum of what is lost, at most 2^-25 each, relative to the largest element: below 1 % it does not affect the update."""


def value_findings(step: ObservedStep, api: Api | None = None) -> list[Finding]:
    """Apply every rule of this file.

    Args:
        step: observed with ``detailed=True``.
        api: what the training loop uses, for the remedies.
    """
    return [found for rule in VALUE_RULES for found in rule(step, api or Api())]


def constants_that_underflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """An eps that is 0 in float16. It does harm if its op wrote zeros that a division or logarithm reads."""
    readers = readers_by_op(step)
    for record in forward_ops(step):
        constant = constant_lost_in_half(step, record.index)
        if constant is None:
            continue
        written = step.outputs(record.index)[0].summary
        sensitive = next((op for op in _downstream(readers, record.index, 4) if _divides(step, op)), None)
        then = ""
        if written.zeros and sensitive is not None:
            then = f"; {step.trace.records[sensitive].op} reads its {written.zeros:,} zeros"
        yield finding(
            "constant-underflows-half",
            severity="warning" if then else "note",
            **place_of(record),
            evidence={"constant": constant, "zeros": written.zeros or 0, "elements": written.numel},
            then=then,
            code=kept_in_float32(record, f"or an eps of at least 1e-4, not {constant:g}", api=api, trace=step.trace),
        )


def constants_that_overflow(step: ObservedStep, _api: Api) -> Iterator[Finding]:
    """A mask of -1e9 that is -inf in float16. It does no harm unless a row is masked completely."""
    for record in forward_ops(step):
        written = [value.summary for value in step.outputs(record.index) if value.summary.is_half]
        large = [number for number in step.ops[record.index].numbers if HALF_MAX < abs(number) < float("inf")]
        given = sum(value.summary.infs or 0 for value in step.inputs(record.index))
        if written and large and (written[0].infs or 0) > given:
            yield finding(
                "constant-overflows-half",
                severity="note",
                **place_of(record),
                evidence={"constant": large[0], "infs": written[0].infs or 0},
                code=with_smaller_number(record.line, record.op),
            )


def casts_that_overflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """Finite values that became inf in a cast to float16 in forward."""
    for record in forward_ops(step):
        if not _casts_measured(step, record):
            continue
        read, written = step.inputs(record.index)[-1].summary, step.outputs(record.index)[0].summary
        read = _expanded(read, written.numel)
        if written.is_half and (written.infs or 0) > (read.infs or 0):
            yield finding(
                "cast-overflows-half",
                **place_of(record),
                evidence={"input_absmax": read.absmax, "infs": written.infs or 0, "elements": written.numel},
                lost=(written.infs or 0) - (read.infs or 0),
                code=kept_in_float32(record, api=api, trace=step.trace),
            )


def squares_that_underflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """Squares in float16 of which more than `LOST` are 0 although the input is not: |x| < 2.4e-4."""
    for record in forward_ops(step):
        if short_name(record) not in _SQUARES or not squares(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost, nonzero = (written.zeros or 0) - (read.zeros or 0), read.numel - (read.zeros or 0)
        if written.is_half and nonzero and lost > LOST * nonzero:
            fused = "or F.layer_norm, torch.linalg.vector_norm: they compute in float32 internally"
            yield finding(
                "square-underflows-half",
                **place_of(record),
                evidence={"lost": lost, "nonzero": nonzero, "input_absmax": read.absmax},
                code=kept_in_float32(record, fused, api=api, trace=step.trace),
            )


def softmaxes_in_half(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A softmax in float16 that wrote zeros. Harm depends on what reads them, so this is a note."""
    for record in forward_ops(step):
        if short_name(record) not in SOFTMAXES or not computes_in_half(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost = (written.zeros or 0) - (read.infs or 0)  # zeros for masked elements are not lost
        if short_name(record) == "softmax" and lost > 0:
            yield finding(
                "softmax-in-half",
                **place_of(record),
                evidence={"zeros": lost, "elements": written.numel},
                code=kept_in_float32(record, api=api, trace=step.trace),
            )


def reductions_that_overflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A sum, mean or norm of finite values that is inf in float16: x / inf is 0, so the loss may stay finite.

    A sum in float32 that is cast to float16 counts too.
    """
    for record in forward_ops(step):
        if not step.inputs(record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        summed = _summed(step, record)
        if summed is not None and written.is_half and written.infs and read.is_finite:
            yield finding(
                "reduction-overflows-half",
                severity="warning",
                **place_of(summed),
                evidence={"input_absmax": read.absmax, "infs": written.infs, "elements": written.numel},
                code=kept_in_float32(summed, api=api, trace=step.trace),
            )


def _summed(step: ObservedStep, record: OpRecord) -> OpRecord | None:
    """The reduction that an op is, or whose result it casts to float16."""
    if record.is_cast:
        above = next(writers(step, step.ops[record.index].inputs[-1]), None)
        record = record if above is None else step.trace.records[above]
    return record if short_name(record) in REDUCTIONS else None


def reductions_near_overflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A sum, mean or norm in float16 whose result is within a factor `NEAR` of 65504."""
    for record in forward_ops(step):
        if not (short_name(record) in REDUCTIONS and computes_in_half(step, record.index)):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        if written.is_finite and written.absmax * NEAR > HALF_MAX and written.numel < read.numel:
            yield finding(
                "reduction-near-overflow",
                **place_of(record),
                evidence={"result": written.absmax, "room": HALF_MAX / written.absmax},
                reduced=read.numel // written.numel,
                code=kept_in_float32(record, api=api, trace=step.trace),
            )


def bce_after_sigmoid(step: ObservedStep, _api: Api) -> Iterator[Finding]:
    """Binary cross entropy of a sigmoid. It does harm where probabilities are exactly 0 or 1."""
    for record in forward_ops(step):
        if short_name(record) not in _BCE:
            continue
        sigmoid = sigmoid_of_bce(step, record.index)
        if sigmoid is None:
            continue
        probability = step.outputs(sigmoid)[0].summary
        saturated = bool(probability.zeros) or probability.highest == 1
        at = step.trace.records[sigmoid]
        yield finding(
            "bce-after-sigmoid",
            severity="warning" if saturated else "note",
            op=record.op,
            module=at.module,
            line=line_of(at),
            evidence={
                "highest": probability.highest, "zeros": probability.zeros or 0, "dtype": _dtype(probability)
            },
            saturated=", and some of its probabilities are 0 or 1" if saturated else "",
        )  # fmt: skip


def gradients_that_underflow(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """Gradients that became 0 in casts to float16, by module; they do harm above both `UNDERFLOW_…` limits."""
    casts: dict[str, list[tuple[TensorSummary, TensorSummary]]] = {}
    for record in step.trace.records:
        if record.phase == "backward" and _casts_measured(step, record):
            read, written = step.inputs(record.index)[-1].summary, step.outputs(record.index)[0].summary
            if written.is_half:
                casts.setdefault(record.module, []).append((_expanded(read, written.numel), written))
    for module, pairs in casts.items():
        lost = sum((written.zeros or 0) - (read.zeros or 0) for read, written in pairs)
        nonzero = sum(read.numel - (read.zeros or 0) for read, _ in pairs)
        share, weight = lost / max(nonzero, 1), lost * HALF_UNDERFLOWS / (max(read.absmax for read, _ in pairs) or 1)
        if share > UNDERFLOW_NOTE:
            yield finding(
                "gradients-underflow",
                api=api,
                severity="warning" if share > UNDERFLOW_WARNING and weight > UNDERFLOW_WEIGHT else "note",
                op="cast",
                module=module,
                evidence={
                    "share": share,
                    "lost": lost,
                    "lost_at_most_of_largest": weight,
                    "loss_scale": step.loss_scale,
                },
                scale=power(step.loss_scale),
            )


def norms_of_constants(step: ObservedStep, _api: Api) -> Iterator[Finding]:
    """A norm layer all of whose groups have a variance of 0: 1 / sqrt(variance + eps) is 1 / sqrt(eps) for each.

    Single rows of padding are constant in healthy runs too, so some groups do not count. torch computes a variance of 0
    for a group with NaN too: an output that is not finite says so.
    """
    for record in forward_ops(step):
        written, numbers = step.outputs(record.index), step.ops[record.index].numbers
        if not short_name(record).endswith("_norm") or len(written) != 3 or not numbers or numbers[-1] <= 0:
            continue
        gain, groups = numbers[-1] ** -0.5, written[2].summary
        if not written[0].summary.is_finite:
            continue
        if groups.smallest is not None and groups.smallest > 0.99 * gain:
            size = written[0].summary.numel // groups.numel
            yield finding(
                "norm-of-constant",
                "single" if size == 1 and "group_norm" in short_name(record) else "",
                **place_of(record),
                evidence={"groups": groups.numel, "elements_each": size, "eps": numbers[-1]},
                gain=gain,
            )


VALUE_RULES: tuple[Callable[[ObservedStep, Api], Iterator[Finding]], ...] = (
    bce_after_sigmoid,
    constants_that_underflow,
    squares_that_underflow,
    gradients_that_underflow,
    constants_that_overflow,
    casts_that_overflow,
    softmaxes_in_half,
    reductions_that_overflow,
    reductions_near_overflow,
    norms_of_constants,
)


def _casts_measured(step: ObservedStep, record: OpRecord) -> bool:
    """Whether an op is a cast between dtypes that are measured, which float8 is not."""
    return record.is_cast and bool(step.inputs(record.index)) and bool(step.outputs(record.index))


def _expanded(read: TensorSummary, numel: int) -> TensorSummary:
    """The summary of what a cast read, counting each element as often as it was read: a gradient may be expanded."""
    times = numel // max(read.numel, 1)
    return replace(read, numel=read.numel * times, zeros=(read.zeros or 0) * times, infs=(read.infs or 0) * times)


def _divides(step: ObservedStep, op: int) -> bool:
    record = step.trace.records[op]
    return record.phase == "forward" and short_name(record) in DIVISIONS | LOGARITHMS


def _downstream(readers: dict[int, list[int]], op: int, depth: int) -> Iterator[int]:
    level, seen = [op], {op}
    for _ in range(depth):
        level = [each for each in dict.fromkeys(e for number in level for e in readers[number]) if each not in seen]
        seen.update(level)
        yield from level


def _dtype(summary: TensorSummary) -> str:
    return str(summary.dtype).removeprefix("torch.")
