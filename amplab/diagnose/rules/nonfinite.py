"""Put a `FirstNonfinite` into words: what was seen, why, and the code that mends it.

scale-too-large             backward overflowed, and fits at a lower scale
constant-vanishes-in-half   a divisor or a logarithm met 0 because an eps rounds to 0 in half
constant-overflows-half     a number of the code is larger than 65504
log-of-zero, division-by-zero, gradient-undefined   what they say, with the op before that made the 0
logits-overflow-half        a product that a softmax reads left half's range
reduction-overflows-half    a sum, a norm or a mean did
overflow-in-half            any other op did
variance-in-half            the difference of two nearly equal halves came out negative
nonfinite-batch, nonfinite-parameter, nonfinite-buffer, nonfinite-input   it came in
masked-row                  every element that a softmax chose from was masked
inf-given                   another op met an inf that was written or given, and made NaN of it or passed it on
nonfinite-in-float32        it has nothing to do with mixed precision
nonfinite-once              a second run is finite, so that other formats and scales tell nothing
"""

from __future__ import annotations

from typing import NamedTuple

from amplab.diagnose.finding import Finding, Number, Severity
from amplab.diagnose.first_nonfinite import FirstNonfinite, Setting
from amplab.diagnose.observed_step.dataflow import line_of, short_name, upstream, vanishing_constant
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX, HALF_VANISHES
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import smaller_rate
from amplab.diagnose.remedies.float32 import dynamic_scale, in_float32, variance_in_float32
from amplab.diagnose.rules.out_of_float32 import why_out_of_float32
from amplab.display.numbers import power
from amplab.policies import CastPolicy
from amplab.trace import OpRecord

__all__ = [
    "DIVISIONS", "LOGARITHMS", "REDUCTIONS", "SOFTMAXES",
    "finding_of", "level_in_use", "sigmoid_of_bce", "vanished_in_half",
]  # fmt: skip

LOGARITHMS = frozenset(("log", "log2", "log10", "log1p", "xlogy", "logit"))
DIVISIONS = frozenset(("div", "reciprocal", "rsqrt", "pow", "true_divide", "remainder", "fmod"))
REDUCTIONS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "cumsum", "prod", "var", "std", "logsumexp"))
SOFTMAXES = frozenset(("softmax", "log_softmax"))
_ROOTS = frozenset(("sqrt", "rsqrt", "pow"))
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv", "addbmm", "einsum"))
_SCALES_AND_MASKS = frozenset(("to_copy", "clone", "mul", "div", "add", "sub", "masked_fill", "where"))


class _Words(NamedTuple):
    name: str
    symptom: str
    cause: str
    remedy: str


def finding_of(found: FirstNonfinite) -> Finding:
    """Return the finding: an error, or a note for a single skip under a dynamic scale that mends itself."""
    words, place = _words(found), _place(found)
    return Finding(
        words.name,
        _severity(found),
        words.symptom,
        words.cause,
        words.remedy,
        "likely" if found.cause in ("model", "state", "input") else "certain",
        op=place.op,
        module=place.module,
        tensor=found.tensor or _tensor_cast(found),
        line=place.line,
        evidence=_evidence(found),
    )


def level_in_use(setting: Setting, step: ObservedStep) -> str | None:
    """In whose words a remedy is, as `remedies.float32` takes it: an opt_level, or by what casts without one."""
    if setting.face == "apex":
        return setting.level.replace("O0", "O1") or "O1"
    if any(value.kind == "parameter" and value.summary.is_half for value in step.values):
        return "half"
    return "amplab" if any(_AMPLABS_CASTS in record.reason for record in step.trace) else None


_AMPLABS_CASTS = f"{CastPolicy.LOWER_PRECISION_FP.value} list"  # what torch.autocast casts has no list here


def vanished_in_half(step: ObservedStep, op: int) -> float | None:
    """The non-zero number of an op's arguments that rounds to 0 in the half that the op writes; None for none."""
    halves = any(value.summary.is_half for value in step.outputs(op))
    lost = (number for number in step.ops[op].numbers if 0 < abs(number) <= HALF_VANISHES)
    return next(lost, None) if halves and not _keeps_float32_inside(step, op) else None


def sigmoid_of_bce(step: ObservedStep, op: int) -> int | None:
    """The sigmoid whose probabilities a binary cross entropy reads, where `op` is it or up to four ops behind it."""
    near = (op, *upstream(step, op, 4))
    if not any(short_name(step.trace.records[each]).startswith("binary_cross_entropy") for each in near):
        return None
    above = (each for number in near for each in (number, *upstream(step, number, 3)))
    return next((each for each in above if short_name(step.trace.records[each]) == "sigmoid"), None)


def _keeps_float32_inside(step: ObservedStep, op: int) -> bool:
    """Norms of torch take an eps and compute with it in float32, whatever they read and write."""
    return "norm" in short_name(step.trace.records[op])


def _severity(found: FirstNonfinite) -> Severity:
    return "note" if found.cause == "scale" and found.setting.dynamic and (found.fitting_scale or 0) > 1 else "error"


def _tensor_cast(found: FirstNonfinite) -> str:
    """The name of what a cast read, where it has one: a weight that is too large for half."""
    if found.record is None or not found.record.is_cast:
        return ""
    return next((value.name for value in found.step.inputs(found.record.index) if value.name), "")


class _Place(NamedTuple):
    op: str = ""
    module: str = ""
    line: str = ""


def _place(found: FirstNonfinite) -> _Place:
    """Where to look: where a constant was lost, that is the op which was given it; for BCE, the sigmoid before it."""
    if found.record is None:
        owned = found.cause in ("parameter", "buffer")
        return _Place(module=found.tensor.rpartition(".")[0] if owned else "")
    records = found.step.trace.records
    sigmoid = sigmoid_of_bce(found.step, found.record.index) if found.cause != "scale" else None
    if sigmoid is not None:
        return _Place("binary_cross_entropy", records[sigmoid].module, line_of(records[sigmoid]))
    lost = _lost_constant(found)
    shown = records[lost[0]] if lost else found.record
    module = shown.module or next((each.module for each in found.chain if each.module), "")
    return _Place(shown.op, module, line_of(shown))


def _lost_constant(found: FirstNonfinite) -> tuple[int, float] | None:
    """The op whose constant vanished in half, where the first non-finite value is due to a 0."""
    if found.record is None or not _met_zero(found) or found.cause == "scale":
        return None
    return vanishing_constant(found.step, found.record.index, lambda op: vanished_in_half(found.step, op))


def _met_zero(found: FirstNonfinite) -> bool:
    return any(each.zeros for each in found.inputs)


def _words(found: FirstNonfinite) -> _Words:
    if found.record is None:
        return _came_in(found)
    if found.cause == "scale":
        return _scale(found)
    if found.cause == "state":
        return _once(found)
    if found.kind == "masked":
        return _masked(found)
    if sigmoid_of_bce(found.step, found.record.index) is not None:
        return _bce(found)
    return _zero(found) or _overflow(found)


def _came_in(found: FirstNonfinite) -> _Words:
    what = {"batch": "the batch", "parameter": "a parameter", "buffer": "a buffer", "input": "a tensor"}[found.cause]
    name = found.tensor or "a tensor that no op of this step wrote"
    symptom = f"{name} held inf or NaN before the step began; {found.result} is not finite."
    if found.cause == "parameter":
        return _Words("nonfinite-parameter", symptom, *_how_weights_were_lost(found, _level(found)))
    if found.cause == "buffer":
        cause = "A forward wrote it there: BatchNorm takes a batch into its statistics before a step can be skipped."
        remedy = f"model.get_submodule({found.tensor.rpartition('.')[0]!r}).reset_running_stats()  # and check batches"
        return _Words("nonfinite-buffer", symptom, cause, remedy)
    cause = f"The fault is in {what}: no scale and no format can mend it."
    remedy = "assert torch.isfinite(x).all(), 'bad sample'  # in the loader; then drop or repair the sample"
    return _Words(f"nonfinite-{found.cause}", symptom, cause, remedy)


def _scale(found: FirstNonfinite) -> _Words:
    scale, fits = found.setting.loss_scale, found.fitting_scale
    symptom = f"{found.result} overflows at a loss scale of {power(scale)} and is finite at {power(fits)}."
    cause = "The scaled gradients leave the range of half; at a lower scale they do not."
    if found.setting.dynamic:
        return _Words("scale-too-large", symptom, f"{cause} A dynamic scale backs off by itself.", "# nothing to do")
    remedy = f"{dynamic_scale(_level(found))}\n# or loss_scale={fits:.12g}"
    return _Words("scale-too-large", symptom, f"{cause} A static scale lets them into the weights.", remedy)


def _masked(found: FirstNonfinite) -> _Words:
    op = found.record.op
    if not any(word in name for word in ("softmax", "attention") for name in (op, short_name(found.record))):
        return _met_inf(found)
    symptom = f"{op} read a row in which every element is masked with -inf, and made NaN of it."
    remedy = "scores = scores.masked_fill(mask & ~mask.all(-1, keepdim=True), -torch.inf)"
    return _Words("masked-row", symptom, "A softmax over nothing is 0 / 0, in every format.", remedy)


def _met_inf(found: FirstNonfinite) -> _Words:
    """An inf that no arithmetic made, and an op that has no number for it."""
    symptom = (
        f"{found.record.op} met an inf that is written in the code or was given to it, and wrote {_counted(found)}."
    )
    cause = "In every format inf stays inf, and is NaN where it meets 0 or another inf. No scale mends it."
    remedy = "assert torch.isfinite(x).all(), 'inf given'  # x: each factor and weight of that line, before it"
    return _Words("inf-given", symptom, cause, remedy)


def _bce(found: FirstNonfinite) -> _Words:
    symptom = f"The gradient of binary_cross_entropy left its range: {found.record.op} wrote {_counted(found)}."
    cause = "Where a probability is 0 or 1 its gradient is about 1 / 1e-12, and 1 - p has no bits left near p = 1."
    remedy = "loss = F.binary_cross_entropy_with_logits(logits.float(), target)  # and no sigmoid before it"
    return _Words("bce-after-sigmoid", symptom, cause, remedy)


def _zero(found: FirstNonfinite) -> _Words | None:
    """Words for an op that divided by 0 or took its logarithm, forward or as a gradient."""
    name, lost = short_name(found.record), _lost_constant(found)
    if name in LOGARITHMS | _ROOTS and found.output.nans and any(each.lowest < 0 for each in found.inputs):
        return _outside_domain(found)
    divides = name in DIVISIONS or name in LOGARITHMS
    if not (_met_zero(found) and divides):
        return None
    if lost:
        return _vanished(found, *lost)
    if found.record.phase == "backward" and name not in LOGARITHMS:
        op = found.record.op
        symptom = f"The gradient of {op} is not finite where {op} met 0, though forward was finite."
        remedy = f"safe = torch.where(x > 0, x, 1.0)  # before {op}, not after: a where behind it comes too late"
        return _Words("gradient-undefined", symptom, f"{op} has no finite slope at 0.", remedy)
    if name in LOGARITHMS:
        return _log(found)
    symptom = f"{found.record.op} divided by 0 and wrote {_counted(found)}."
    return _Words(
        "division-by-zero", symptom, f"The divisor is 0 in {_dtype(found)}.", "y = x / divisor.clamp_min(1e-5)"
    )


def _outside_domain(found: FirstNonfinite) -> _Words:
    op, lowest = found.record.op, min(each.lowest for each in found.inputs if each.lowest < 0)
    if found.cause == "format" and found.phase == "forward" and _is_difference_in_half(found):
        return _variance(found, lowest)
    symptom = f"{op} read negative numbers, down to {lowest:.4g}, and wrote {_counted(found)}."
    cause = "A where after it hides that in forward; in backward 0 times NaN is NaN."
    if not found.result.startswith("gradient"):
        cause = f"{op} of a negative number is NaN in every format."
        cause += " In float32 it is not negative." if found.cause == "format" else ""
    return _Words("outside-domain", symptom, cause, f"safe = torch.where(x > 0, x, 1.0)  # before {op}, not after")


def _is_difference_in_half(found: FirstNonfinite) -> bool:
    step, index = found.step, found.record.index
    near = [op for op in upstream(step, index, 4) if short_name(step.trace.records[op]) in ("sub", "rsub")]
    return any(value.summary.is_half for op in near for value in step.inputs(op))


def _variance(found: FirstNonfinite, lowest: float) -> _Words:
    op = found.record.op
    symptom = f"{op} read a difference of halves that is negative, down to {lowest:.4g}, and wrote {_counted(found)}."
    cause = "Half keeps 11 bits: where E[x^2] and E[x]^2 are nearly equal, what is left of E[x^2] - E[x]^2 is rounding."
    return _Words(
        "variance-in-half", symptom, f"{cause} In float32 the step is finite.",
        variance_in_float32(found.record, level=_level(found), reader=_reader(found, found.record)),
    )  # fmt: skip


def _log(found: FirstNonfinite) -> _Words:
    step, index = found.step, found.record.index
    above = next((op for op in upstream(step, index, 5) if short_name(step.trace.records[op]) in SOFTMAXES), None)
    lost_in = _where_zeros_began(found)
    if above is None:
        symptom = f"{found.record.op} read {_zeros(found)} zeros and wrote {_counted(found)}."
        cause = (
            f"What it read is 0 in {lost_in}, {'but not in float32' if found.cause == 'format' else 'in float32 too'}."
        )
        return _Words("log-of-zero", symptom, cause, "y = x.float().clamp_min(1e-7).log()")
    symptom = f"{found.record.op} read {_zeros(found)} zeros that softmax had written, and wrote {_counted(found)}."
    cause = f"The smallest probabilities round to 0 in {lost_in}; log_softmax never forms them."
    return _Words("log-of-zero", symptom, cause, "log_probabilities = F.log_softmax(logits.float(), dim=-1)")


def _vanished(found: FirstNonfinite, op: int, constant: float) -> _Words:
    at = found.step.trace.records[op]
    symptom = f"{found.record.op} met 0: the {constant:g} given to {at.op} before it is 0 in half."
    cause = f"Half rounds what is at or below {HALF_VANISHES:.2g} to 0, and its smallest number is 5.96e-08."
    return _Words(
        "constant-vanishes-in-half",
        symptom,
        cause,
        _in_float32(found, at, f"or an eps of at least 1e-4, not {constant:g}"),
    )


def _once(found: FirstNonfinite) -> _Words:
    return _Words(
        "nonfinite-once",
        f"{found.record.op} wrote {_counted(found)} from inputs up to {_reads(found):.4g}; a second run is finite.",
        "The step depends on state that is not put back: a list or a tensor that forward changes in place, a count or "
        "a generator outside of the modules.",
        "self.register_buffer('count', torch.zeros(()))  # state in buffers is put back, and saved",
    )


def _overflow(found: FirstNonfinite) -> _Words:
    record, name = found.record, short_name(found.record)
    if found.cause == "model":
        symptom = f"{record.op} wrote {_counted(found)} from finite inputs up to {_reads(found):.4g}, in float32 too."
        return _Words("nonfinite-in-float32", symptom, *why_out_of_float32(found))
    then = "and bfloat16" if found.in_bfloat16 else "but not in bfloat16"
    symptom = f"{record.op} wrote {_counted(found)} in {_dtype(found)} from inputs up to {_reads(found):.4g}."
    cause = f"The result is larger than {HALF_MAX:g}; the same step is finite in float32 {then}."
    if found.kind == "constant":
        remedy = "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)"
        return _Words("constant-overflows-half", symptom, f"A number in the code is larger than {HALF_MAX:g}.", remedy)
    softmax = _softmax_that_reads(found)
    if softmax is not None and _is_product(found):
        note = "or scale the queries before the product: q = q * q.shape[-1] ** -0.5"
        note = note if short_name(softmax) == "softmax" else ""
        return _Words(
            "logits-overflow-half", symptom, f"{cause} A softmax reads them.", _in_float32(found, record, note)
        )
    reduces = name in REDUCTIONS or record.op in REDUCTIONS
    kind = "reduction-overflows-half" if reduces else "overflow-in-half"
    return _Words(kind, symptom, cause, _in_float32(found, record))


def _in_float32(found: FirstNonfinite, record: OpRecord, note: str = "") -> str:
    return in_float32(record, note, level=_level(found), reader=_reader(found, record))


def _level(found: FirstNonfinite) -> str | None:
    return level_in_use(found.setting, found.step)


def _reader(found: FirstNonfinite, record: OpRecord) -> OpRecord | None:
    """The op that reads what the first non-finite op wrote, in forward."""
    forward = found.phase == "forward" and record is found.record
    return found.chain[1] if forward and len(found.chain) > 1 else None


def _softmax_that_reads(found: FirstNonfinite) -> OpRecord | None:
    """The softmax that the value reaches with nothing but casts, scales, masks and views between."""
    for record in found.chain[1:]:
        if short_name(record) in SOFTMAXES:
            return record
        if not (record.is_cast or record.is_view or short_name(record) in _SCALES_AND_MASKS):
            return None
    return None


def _is_product(found: FirstNonfinite) -> bool:
    """Whether the op is a product, or only scales or masks one."""
    step, index = found.step, found.record.index
    passes = short_name(found.record) in _SCALES_AND_MASKS
    near = (index, *(upstream(step, index, 2) if passes else ()))
    return any(short_name(step.trace.records[op]) in _PRODUCTS for op in near)


def _evidence(found: FirstNonfinite) -> dict[str, Number]:
    numbers: dict[str, Number] = {"result": found.result, "loss_scale": found.setting.loss_scale}
    if found.record is not None:
        numbers |= {"phase": found.phase, "input_absmax": _reads(found)}
    numbers |= {"infs": found.output.infs or 0, "nans": found.output.nans or 0, "elements": found.output.numel}
    if zeros := _zeros(found):
        numbers["input_zeros"] = zeros
    if lost := _lost_constant(found):
        numbers["constant"] = lost[1]
    if found.fitting_scale is not None:
        numbers["fitting_scale"] = found.fitting_scale
    if found.in_float32 is not None:
        numbers["loss_in_float32"] = found.in_float32.loss
    return numbers


def _reads(found: FirstNonfinite) -> float:
    return max((each.absmax for each in found.inputs), default=0.0)


def _zeros(found: FirstNonfinite) -> int:
    return max((each.zeros or 0 for each in found.inputs), default=0)


def _where_zeros_began(found: FirstNonfinite) -> str:
    """The format in which what an op read became 0: half where half lies on the way to it, whatever it reads itself."""
    near = upstream(found.step, found.record.index, 5) if found.cause == "format" else ()
    halves = any(value.summary.is_half for op in near for value in found.step.outputs(op))
    return "half" if halves else _dtype(found)


def _counted(found: FirstNonfinite) -> str:
    output = found.output
    parts = [f"{count:,} {word}" for count, word in ((output.infs, "inf"), (output.nans, "NaN")) if count]
    return f"{' and '.join(parts)} among {output.numel:,} elements"


def _dtype(found: FirstNonfinite) -> str:
    return "half" if found.output.is_half else str(found.output.dtype).removeprefix("torch.")


_UNCHECKED = ": without a dynamic scale nothing holds back a step whose gradients are not finite."


def _how_weights_were_lost(found: FirstNonfinite, level: str | None) -> tuple[str, str]:
    """Cause and remedy of inf in the weights: a scale that skips mends that of half, and of nothing else."""
    wrote = "An earlier step wrote it into the weights"
    if found.setting.dynamic:
        cause = f"{wrote}: the scaler looks at gradients, so it was the update itself, or a step past the scaler."
        return cause, f"{smaller_rate(found.setting.face, None)}\n# step through the scaler, never beside it"
    if any(value.summary.is_half for value in found.step.values):
        return f"{wrote}{_UNCHECKED}", f"{dynamic_scale(level)}\n# and load the last good checkpoint"
    cause = f"{wrote}. No half is in this step, so no scale mends it: it is the data, the rate, or the slope of an op."
    return cause, _STOP_AT_THE_FIRST


_STOP_AT_THE_FIRST = (
    "# from the last good checkpoint; between backward and step, to stop at the first bad batch:\n"
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
    "# and with that batch: print(amplab.first_nonfinite(model, step=loss_of))"
)
