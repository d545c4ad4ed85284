"""Rules about the values of one step: pure functions from an `ObservedStep`, measured in detail, to findings.

They judge by what the ops received, not by what the code says. A rule whose danger did no harm to the values of this
step gives a note at most; where inf or NaN reached the loss or a gradient, `first_nonfinite` says so itself.

    constant-vanishes-in-half   a number given to a half op rounds to 0, and a divisor or logarithm was left with 0
    constant-overflows-half     a number given to a half op is larger than 65504 and became inf
    cast-overflows-half         so did a value that was cast
    square-vanishes-in-half     squares of small numbers are 0: a variance or a norm by hand
    softmax-in-half             its smallest probabilities are 0
    reduction-overflows-half    a sum in half is inf, and the loss does not show it
    reduction-near-overflow     a sum in half came near 65504
    bce-after-sigmoid           binary cross entropy of probabilities, which round to 0 and 1
    gradients-underflow         gradients became 0 where they were cast to half
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.dataflow import (
    computes_in_half,
    forward_ops,
    line_of,
    place_of,
    readers_by_op,
    short_name,
    writers,
)
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX, HALF_VANISHES, TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.float32 import dynamic_scale, kept_in_float32
from amplab.diagnose.rules.nonfinite import (
    DIVISIONS,
    LOGARITHMS,
    REDUCTIONS,
    SOFTMAXES,
    sigmoid_of_bce,
    vanished_in_half,
)
from amplab.display.numbers import power
from amplab.trace import OpRecord

__all__ = ["VALUE_RULES", "value_findings"]

_SQUARES = frozenset(("pow", "square", "mul"))
_BCE = frozenset(("binary_cross_entropy",))

LOST = 0.5
"""Share of squares that vanish from which on a variance is wrong by more than half of its elements."""

NEAR = 8.0
"""A reduction within this factor of 65504 leaves half within three doublings of its inputs."""

UNDERFLOW_NOTE, UNDERFLOW_WARNING = 0.01, 0.1
"""Shares of non-zero gradient elements lost: worth a word; and a tenth, which scaling is there to prevent."""

UNDERFLOW_WEIGHT = 0.01
"""What is lost together, at most 2^-25 each, against the largest element: below 1 % no update feels it."""


def value_findings(step: ObservedStep, level: str | None = "O1") -> list[Finding]:
    """Apply every rule of this file.

    Args:
        step: observed with ``detailed=True``.
        level: in whose words the remedies are, as `remedies.float32` takes it.
    """
    return [finding for rule in VALUE_RULES for finding in rule(step, level)]


def constants_that_vanish(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """An eps that is 0 in half. Harm: its op wrote zeros, and an op that divides or takes a logarithm reads them."""
    readers = readers_by_op(step)
    for record in forward_ops(step):
        constant = vanished_in_half(step, record.index)
        if constant is None:
            continue
        written = step.outputs(record.index)[0].summary
        sensitive = next((op for op in _downstream(readers, record.index, 4) if _divides(step, op)), None)
        harmed = bool(written.zeros) and sensitive is not None
        then = f"; {step.trace.records[sensitive].op} reads its {written.zeros:,} zeros" if harmed else ""
        yield Finding(
            "constant-vanishes-in-half",
            "warning" if harmed else "note",
            f"{record.op} was given {constant:g}, which is 0 in half{then}.",
            "Half rounds what is at or below 2^-25 = 2.98e-08 to 0.",
            kept_in_float32(record, f"or an eps of at least 1e-4, not {constant:g}", level=level),
            **place_of(record),
            evidence={"constant": constant, "zeros": written.zeros or 0, "elements": written.numel},
        )


def constants_that_overflow(step: ObservedStep, _level: str | None) -> Iterator[Finding]:
    """A mask of -1e9 that is -inf in half. No harm by itself: -inf is what a mask means, until a row is all masked."""
    for record in forward_ops(step):
        written = [value.summary for value in step.outputs(record.index) if value.summary.is_half]
        large = [number for number in step.ops[record.index].numbers if HALF_MAX < abs(number) < float("inf")]
        if written and large and written[0].infs:
            yield Finding(
                "constant-overflows-half",
                "note",
                f"{record.op} was given {large[0]:g} and wrote {written[0].infs:,} inf.",
                f"The largest number of half is {HALF_MAX:g}.",
                "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
                **place_of(record),
                evidence={"constant": large[0], "infs": written[0].infs},
            )


def casts_that_overflow(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """Finite values that became inf in a cast to half, forward."""
    for record in forward_ops(step):
        if not record.is_cast or not step.outputs(record.index):
            continue
        read, written = step.inputs(record.index)[-1].summary, step.outputs(record.index)[0].summary
        read = _expanded(read, written.numel)
        if written.is_half and (written.infs or 0) > (read.infs or 0):
            yield Finding(
                "cast-overflows-half",
                "note",
                f"A cast to half made inf of {written.infs - (read.infs or 0):,} finite values.",
                f"The largest of them is {read.absmax:.4g}, half ends at {HALF_MAX:g}.",
                kept_in_float32(record, level=level),
                **place_of(record),
                evidence={"input_absmax": read.absmax, "infs": written.infs, "elements": written.numel},
            )


def squares_that_vanish(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """Squares in half, of which more than `LOST` are 0 though what was squared is not; |x| < 2.4e-4 does that."""
    for record in forward_ops(step):
        if short_name(record) not in _SQUARES or not _squares(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost, nonzero = (written.zeros or 0) - (read.zeros or 0), read.numel - (read.zeros or 0)
        if written.is_half and nonzero and lost > LOST * nonzero:
            yield Finding(
                "square-vanishes-in-half",
                "warning",
                f"{lost:,} of {nonzero:,} non-zero numbers have a square that is 0 in half.",
                "Squares of numbers below 2.4e-4 are smaller than half's smallest number; above 256 they overflow.",
                kept_in_float32(
                    record, "or F.layer_norm, torch.linalg.vector_norm: they compute in float32 inside", level=level
                ),
                **place_of(record),
                evidence={"lost": lost, "nonzero": nonzero, "input_absmax": read.absmax},
            )


def softmaxes_in_half(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """A softmax that reads and writes half and wrote zeros. What reads them decides about harm, so this is a note."""
    for record in forward_ops(step):
        if short_name(record) not in SOFTMAXES or not computes_in_half(step, record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        lost = (written.zeros or 0) - (read.infs or 0)  # what a mask of -inf made 0 is none
        if short_name(record) == "softmax" and lost > 0:
            yield Finding(
                "softmax-in-half",
                "note",
                f"softmax in half wrote {lost:,} zeros among {written.numel:,} probabilities.",
                "Probabilities at or below 2^-25 are 0 in half; a logarithm of them would be -inf.",
                kept_in_float32(record, level=level),
                **place_of(record),
                evidence={"zeros": lost, "elements": written.numel},
            )


def reductions_that_overflow(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """A sum, mean or norm that wrote inf in half of finite values: x / inf is 0, so that the loss may stay finite.

    A sum in float32 that is cast to half is the same.
    """
    for record in forward_ops(step):
        if not step.inputs(record.index):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        summed = _summed(step, record)
        if summed is not None and written.is_half and written.infs and read.is_finite:
            yield Finding(
                "reduction-overflows-half",
                "warning",
                f"{summed.op} wrote {written.infs:,} inf in half from inputs up to {read.absmax:.4g}.",
                f"The result is larger than {HALF_MAX:g}; what is divided by it is 0, and the loss may not show it.",
                kept_in_float32(summed, level=level),
                **place_of(summed),
                evidence={"input_absmax": read.absmax, "infs": written.infs, "elements": written.numel},
            )


def _summed(step: ObservedStep, record: OpRecord) -> OpRecord | None:
    """The reduction that an op is, or whose result it casts to half."""
    if record.is_cast:
        above = next(writers(step, step.ops[record.index].inputs[-1]), None)
        record = record if above is None else step.trace.records[above]
    return record if short_name(record) in REDUCTIONS else None


def reductions_near_overflow(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """A sum, mean or norm in half whose result lies within a factor `NEAR` of 65504."""
    for record in forward_ops(step):
        if not (short_name(record) in REDUCTIONS and computes_in_half(step, record.index)):
            continue
        read, written = step.inputs(record.index)[0].summary, step.outputs(record.index)[0].summary
        if written.is_finite and written.absmax * NEAR > HALF_MAX and written.numel < read.numel:
            yield Finding(
                "reduction-near-overflow",
                "note",
                f"{record.op} over {read.numel // written.numel:,} elements came to {written.absmax:.4g} in half.",
                f"Half ends at {HALF_MAX:g}; a longer row or larger values would make inf of it.",
                kept_in_float32(record, level=level),
                **place_of(record),
                evidence={"result": written.absmax, "room": HALF_MAX / written.absmax},
            )


def bce_after_sigmoid(step: ObservedStep, _level: str | None) -> Iterator[Finding]:
    """Binary cross entropy of a sigmoid. Harm: probabilities are 0 or 1 exactly, where its gradient is 0 or clamped."""
    for record in forward_ops(step):
        if short_name(record) not in _BCE:
            continue
        sigmoid = sigmoid_of_bce(step, record.index)
        if sigmoid is None:
            continue
        probability = step.outputs(sigmoid)[0].summary
        saturated = bool(probability.zeros) or probability.highest == 1
        at = step.trace.records[sigmoid]
        yield Finding(
            "bce-after-sigmoid",
            "warning" if saturated else "note",
            f"binary_cross_entropy reads a sigmoid in {_dtype(probability)}"
            + (", and some of its probabilities are 0 or 1." if saturated else "."),
            "1 - p has no bits left near p = 1: half rounds to 1 from a logit of 8.3 on, float32 from 17. The loss is "
            "then clamped and its gradient is 0.",
            "loss = F.binary_cross_entropy_with_logits(logits.float(), target)  # and no sigmoid before it",
            op=record.op,
            module=at.module,
            line=line_of(at),
            evidence={"highest": probability.highest, "zeros": probability.zeros or 0, "dtype": _dtype(probability)},
        )


def gradients_that_underflow(step: ObservedStep, level: str | None) -> Iterator[Finding]:
    """Gradients that casts to half made 0, by module. Harm: a tenth of them, and together not next to nothing."""
    casts: dict[str, list[tuple[TensorSummary, TensorSummary]]] = {}
    for record in step.trace.records:
        if record.phase == "backward" and record.is_cast and step.outputs(record.index):
            read, written = step.inputs(record.index)[-1].summary, step.outputs(record.index)[0].summary
            if written.is_half:
                casts.setdefault(record.module, []).append((_expanded(read, written.numel), written))
    for module, pairs in casts.items():
        lost = sum((written.zeros or 0) - (read.zeros or 0) for read, written in pairs)
        nonzero = sum(read.numel - (read.zeros or 0) for read, _ in pairs)
        share, weight = lost / max(nonzero, 1), lost * HALF_VANISHES / (max(read.absmax for read, _ in pairs) or 1)
        if share > UNDERFLOW_NOTE:
            yield Finding(
                "gradients-underflow",
                "warning" if share > UNDERFLOW_WARNING and weight > UNDERFLOW_WEIGHT else "note",
                f"{share:.0%} of the non-zero gradient elements are 0 in half at a loss scale of "
                f"{power(step.loss_scale)}.",
                "They are smaller than 2^-25 even when scaled.",
                dynamic_scale(level),
                op="cast",
                module=module,
                evidence={"share": share, "lost": lost, "weight_at_most": weight, "loss_scale": step.loss_scale},
            )


VALUE_RULES: tuple[Callable[[ObservedStep, str | None], Iterator[Finding]], ...] = (
    bce_after_sigmoid,
    constants_that_vanish,
    squares_that_vanish,
    gradients_that_underflow,
    constants_that_overflow,
    casts_that_overflow,
    softmaxes_in_half,
    reductions_that_overflow,
    reductions_near_overflow,
)


def _expanded(read: TensorSummary, numel: int) -> TensorSummary:
    """The figures of what a cast read as often as it read each element: a gradient may be one number, expanded."""
    times = numel // max(read.numel, 1)
    return replace(read, numel=read.numel * times, zeros=(read.zeros or 0) * times, infs=(read.infs or 0) * times)


def _squares(step: ObservedStep, op: int) -> bool:
    """Whether an op multiplies a tensor with itself."""
    name, (places, _, numbers) = short_name(step.trace.records[op]), step.ops[op]
    if name == "mul":
        return len(places) == 2 and places[0] == places[1]
    return name == "square" or 2.0 in numbers


def _divides(step: ObservedStep, op: int) -> bool:
    record = step.trace.records[op]
    return record.phase == "forward" and short_name(record) in DIVISIONS | LOGARITHMS


def _downstream(readers: dict[int, list[int]], op: int, depth: int) -> Iterator[int]:
    level, seen = [op], {op}
    for _ in range(depth):
        level = [each for each in dict.fromkeys(e for number in level for e in readers[number]) if each not in seen]
        seen.update(level)
        yield from level


def _dtype(statistics: TensorSummary) -> str:
    return "half" if statistics.is_half else str(statistics.dtype).removeprefix("torch.")
