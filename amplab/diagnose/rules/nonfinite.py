"""Rules about a `FirstNonfinite`: which finding explains the first inf or NaN of a step.

scale-too-large             backward overflowed, and does not at a smaller loss scale
constant-underflows-half    a division or logarithm received 0 because an eps rounds to 0 in float16
constant-overflows-half     a number in the code is larger than 65504
log-of-zero, division-by-zero, infinite-value, gradient-undefined, outside-domain
                            an op received a number for which it, or its gradient, is infinite or not defined
bce-after-sigmoid           binary_cross_entropy read probabilities that round to 0 or 1
logits-overflow-half        a product that a softmax reads overflowed
reduction-overflows-half    a sum, norm or mean overflowed
overflow-in-half            any other op overflowed
variance-in-half            the difference of two nearly equal float16 numbers was negative
nonfinite-batch, nonfinite-parameter, nonfinite-buffer, nonfinite-input
                            a tensor was not finite before the step
masks-added                 masks filled with torch.finfo(dtype).min were added
masked-row                  every element that a softmax read was masked
held-inf-in-half            an op received a buffer or a weight that its cast to float16 made inf
inf-given                   another op received an inf from the code or as an input
nonfinite-in-float32        mixed precision is not the cause
nonfinite-once              a repeated step is finite, so other dtypes and loss scales show nothing
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Certainty, Finding, Number, Severity
from amplab.diagnose.first_nonfinite import FirstNonfinite, Setting
from amplab.diagnose.observed_step.dataflow import line_of, nearest_constant, short_name, upstream
from amplab.diagnose.observed_step.singular_points import Met, Origin, domain_of, forward_op_of, met_point
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX, HALF_UNDERFLOWS, TensorSummary
from amplab.diagnose.observed_step.values import ObservedStep, Value
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import in_float32, variance_in_float32
from amplab.diagnose.remedies.float32_function import body_in_float32
from amplab.diagnose.remedies.singular_points import away_from_point, inside_of_domain
from amplab.diagnose.remedies.users_code import LEAST_EPS, call_on, edited, with_larger_eps, with_smaller_number
from amplab.diagnose.rules.out_of_float32 import why_out_of_float32
from amplab.display.numbers import power
from amplab.policies import APEX, CastPolicy
from amplab.policies.tables.op_names import find_row
from amplab.trace import OpRecord

__all__ = [
    "DIVISIONS", "LOGARITHMS", "REDUCTIONS", "SOFTMAXES",
    "finding_of", "api_in_use", "sigmoid_of_bce", "constant_lost_in_half",
]  # fmt: skip

LOGARITHMS = frozenset(("log", "log2", "log10", "log1p", "xlogy", "logit"))
DIVISIONS = frozenset(("div", "reciprocal", "rsqrt", "pow", "true_divide", "remainder", "fmod"))
REDUCTIONS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "cumsum", "prod", "var", "std", "logsumexp"))
SOFTMAXES = frozenset(("softmax", "log_softmax"))
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv", "addbmm", "einsum"))
_SCALES_AND_MASKS = frozenset(("to_copy", "clone", "mul", "div", "add", "sub", "masked_fill", "where"))


class _Explanation(NamedTuple):
    """A finding's id, its case, and the fields of its sentences."""

    name: str
    case: str = ""
    fields: Mapping[str, Any] = {}


def finding_of(found: FirstNonfinite) -> Finding:
    """Return the finding: an error, or a note for a skip that a dynamic loss scale corrects by itself."""
    explanation, place = _explanation(found), _place(found)
    numbers: dict[str, Any] = {"counted": "", "fn": "", "dtype": _dtype(found)}
    if found.record is not None:
        numbers |= {"counted": _counted(found), "fn": found.record.op}
    return finding(
        explanation.name,
        explanation.case,
        api=api_in_use(found.setting, found.step),
        severity=_severity(found),
        certainty=_certainty(found, explanation.name),
        op=place.op,
        module=place.module,
        tensor=found.tensor or _tensor_cast(found),
        line=place.line,
        evidence=_evidence(found, explanation.name),
        **(numbers | dict(explanation.fields)),
    )


def api_in_use(setting: Setting, step: ObservedStep) -> Api:
    """Return the APIs that a step uses: `setting` tells which one scales the loss, the ops tell which one casts."""
    if setting.api_style is ApiStyle.APEX:
        return Api.of_opt_level(setting.level)
    if any(value.kind == "parameter" and value.summary.is_half for value in step.values):
        return Api(setting.api_style, ApiStyle.HALF)
    by_amplab = any(_AMPLABS_CASTS in record.reason for record in step.trace)
    return Api(setting.api_style, ApiStyle.AMPLAB if by_amplab else ApiStyle.TORCH)


def _certainty(found: FirstNonfinite, name: str) -> Certainty:
    """Return "certain" where the values themselves show the cause, else "likely"."""
    concluded = found.cause in ("model", "state", "input") and name not in _SEEN
    return "likely" if concluded else "certain"


_SEEN = frozenset(
    (
        "infinite-value",
        "log-of-zero",
        "outside-domain",
        "division-by-zero",
        "masked-row",
        "masks-added",
        "held-inf-in-half",
    )
)
_AMPLABS_CASTS = f"{CastPolicy.LOWER_PRECISION_FP.value} list"  # what torch.autocast casts has no list here


def constant_lost_in_half(step: ObservedStep, op: int) -> float | None:
    """The non-zero constant of an op that rounds to 0 in its float16 output; None for none."""
    halves = any(value.summary.is_half for value in step.outputs(op))
    lost = (number for number in step.ops[op].numbers if 0 < abs(number) <= HALF_UNDERFLOWS)
    return next(lost, None) if halves and not _keeps_float32_inside(step, op) else None


def sigmoid_of_bce(step: ObservedStep, op: int) -> int | None:
    """The sigmoid that a binary cross entropy reads, where `op` is that op or at most four ops after it."""
    near = (op, *upstream(step, op, 4))
    if not any(short_name(step.trace.records[each]).startswith("binary_cross_entropy") for each in near):
        return None
    above = (each for number in near for each in (number, *upstream(step, number, 3)))
    return next((each for each in above if short_name(step.trace.records[each]) == "sigmoid"), None)


def _keeps_float32_inside(step: ObservedStep, op: int) -> bool:
    """torch's norms add their eps in float32, for inputs and outputs of any dtype."""
    return "norm" in short_name(step.trace.records[op])


def _severity(found: FirstNonfinite) -> Severity:
    return "note" if found.cause == "scale" and found.setting.dynamic and (found.fitting_scale or 0) > 1 else "error"


def _tensor_cast(found: FirstNonfinite) -> str:
    """The name of the input of a cast, where it has one: a weight that is too large for float16."""
    if found.record is None or not found.record.is_cast:
        return ""
    return next((value.name for value in found.step.inputs(found.record.index) if value.name), "")


class _Place(NamedTuple):
    op: str = ""
    module: str = ""
    line: str = ""


def _place(found: FirstNonfinite) -> _Place:
    """The place to show: the op that received a lost constant; for binary cross entropy, the sigmoid before it."""
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
    """The op whose constant is 0 in float16, if a 0 caused the first non-finite value."""
    if found.record is None or not _met_zero(found) or found.cause == "scale":
        return None
    return nearest_constant(found.step, found.record.index, lambda op: constant_lost_in_half(found.step, op))


def _met_zero(found: FirstNonfinite) -> bool:
    return any(each.zeros for each in found.inputs)


def _explanation(found: FirstNonfinite) -> _Explanation:
    if found.record is None:
        return _came_in(found)
    if found.cause == "scale":
        case = "dynamic" if found.setting.dynamic else ""
        scales = {"scale": power(found.setting.loss_scale), "fits": power(found.fitting_scale or 1.0)}
        return _Explanation("scale-too-large", case, scales)
    if found.cause == "state":
        return _Explanation("nonfinite-once")
    if (held := _held_in_half(found, found.record)) is not None:
        return _Explanation("held-inf-in-half", "", {"held": held.name, "held_as": held.kind})
    if found.kind == "masked":
        names = found.record.op, short_name(found.record)
        is_softmax = any(word in name for word in ("softmax", "attention") for name in names)
        return _Explanation("masked-row" if is_softmax else "inf-given")
    if sigmoid_of_bce(found.step, found.record.index) is not None:
        return _Explanation("bce-after-sigmoid", "nonfinite")
    return _zero(found, found.record) or _overflow(found, found.record)


def _held_in_half(found: FirstNonfinite, record: OpRecord) -> Value | None:
    """The float16 buffer or weight with an inf that an op received; None for none."""
    held = (value for value in found.step.inputs(record.index) if value.kind in ("buffer", "parameter"))
    return next((each for each in held if each.summary.is_half and not each.summary.is_finite), None)


def _came_in(found: FirstNonfinite) -> _Explanation:
    names = {"tensor_name": found.tensor or "a tensor that no op of this step wrote"}
    if found.cause == "parameter":
        return _Explanation("nonfinite-parameter", _case_of_weights(found), names | {"rate": "group['lr'] / 10"})
    if found.cause == "buffer":
        return _Explanation("nonfinite-buffer", "came-in", names)
    return _Explanation(f"nonfinite-{found.cause}", "", names | {"first_at": _first_at(found)})


def _first_at(found: FirstNonfinite) -> str:
    """Return a phrase with the sample and the column of the batch's first non-finite element; empty if unknown."""
    if not found.at:
        return ""
    sample, *rest = found.at
    column = f", column {rest[0]}" if len(rest) == 1 else f" at {rest}" if rest else ""
    return f", first in sample {sample}{column}"


def _case_of_weights(found: FirstNonfinite) -> str:
    """How inf came into the weights: a dynamic loss scale prevents that only for overflows of float16 gradients."""
    if found.setting.dynamic:
        return ""
    return "unchecked" if any(value.summary.is_half for value in found.step.values) else "no-half"


def _zero(found: FirstNonfinite, record: OpRecord) -> _Explanation | None:
    """The finding for an op at a singular point, outside of its domain, or divided by 0, in forward or in its gradient.

    A number that becomes 0 in float16 before an op that divides comes first.
    """
    name, lost = short_name(record), _lost_constant(found)
    outside = _outside_domain(found, record)
    if outside is not None:
        return outside
    if lost and _met_zero(found) and name in DIVISIONS | LOGARITHMS:
        at = found.step.trace.records[lost[0]]
        return _Explanation(
            "constant-underflows-half",
            "nonfinite",
            {"code": _with_eps(found, at, lost[1], first=name in DIVISIONS)},
        )
    met = _met(found, record)
    if met is not None:
        return _singular(found, record, met)
    if not (_met_zero(found) and name in DIVISIONS):
        return None
    return (
        _Explanation("gradient-undefined", "zero") if record.phase == "backward" else _Explanation("division-by-zero")
    )


def _met(found: FirstNonfinite, record: OpRecord) -> Met | None:
    return met_point(found.step, record.index, in_float32_too=found.cause == "model")


def _singular(found: FirstNonfinite, record: OpRecord, met: Met) -> _Explanation:
    """The finding for an op that met a point at which it, or its slope, is infinite."""
    step, op = found.step, met.origin.op
    domain = domain_of(step, met.op)
    slope = record.phase == "backward"
    fields = {
        "fn": step.trace.records[met.op].op,
        "singular": _points((domain.steep_at if slope else domain.infinite_at) if domain else met.points),
        "received": _points(met.points),
        "by": _by(found, op),
        "ends": _points(met.origin.ends or met.points),
        "number": met.origin.number,
        "rounded_in": str(_dtype_of(step, met.origin)).removeprefix("torch."),
        "effect": _effect(met, _dtype_of(step, met.origin)),
        "code": away_from_point(step, met, _api(found)),
    }
    if slope:
        return _Explanation("gradient-undefined", met.origin.why, fields)
    if _LOG_OF_ZERO & {short_name(record)} and met.points == (0,):
        return _log(found, record, fields)
    return _Explanation("infinite-value", met.origin.why, fields)


_LOG_OF_ZERO = frozenset(("log", "log2", "log10"))


def _points(points: tuple[float, ...]) -> str:
    return " and ".join(f"{each:g}" for each in points)


def _by(found: FirstNonfinite, op: int | None) -> str:
    if op is None:
        return "the step's input"
    record = found.step.trace.records[op]
    return f"{record.op}{f', {record.line},' if record.line is not None else ''}"


def _dtype_of(step: ObservedStep, origin: Origin) -> torch.dtype:
    """The dtype that the op computes in which moved a value onto a singular point."""
    wrote = () if origin.op is None else step.outputs(origin.op)
    return wrote[0].summary.dtype if wrote else torch.float16


def _effect(met: Met, dtype: torch.dtype) -> str:
    """What a number of the code is in the dtype of its op."""
    name, below_one = str(dtype).removeprefix("torch."), 1 - torch.finfo(dtype).eps / 2
    near_one = f"{name} has no number between {below_one:.{_DIGITS.get(dtype, 8)}g} and 1"
    if met.origin.why == "eps":
        return f"1 - {met.origin.number:g} is 1: {near_one}"
    rounded = math.copysign(1, met.origin.number)
    return f"it is {rounded:g}: {near_one}" if abs(met.origin.number) > _HALFWAY else "it is 0"


_DIGITS = {torch.float16: 4, torch.bfloat16: 4}
_HALFWAY = 0.5


def _outside_domain(found: FirstNonfinite, record: OpRecord) -> _Explanation | None:
    """The finding for a NaN that an op wrote for numbers outside of its domain; None for any other."""
    if not found.output.nans:
        return None
    for op in forward_op_of(found.step, record.index):
        domain = domain_of(found.step, op)
        read = [value.summary for value in found.step.inputs(op)[:1]]
        beyond = [
            end for each in read for end in (each.lowest, each.highest) if domain and not domain[0] <= end <= domain[1]
        ]
        if domain is not None and beyond:
            return _outside(found, record, op, beyond[0])
    return None


def _outside(found: FirstNonfinite, record: OpRecord, op: int, beyond: float) -> _Explanation:
    if found.cause == "format" and found.phase == "forward" and _is_difference_in_half(found, record) and beyond < 0:
        code = variance_in_float32(record, api=_api(found), reader=_reader(found, record))
        return _Explanation("variance-in-half", "nonfinite", {"lowest": beyond, "code": code})
    fields = {
        "fn": found.step.trace.records[op].op,
        "domain": domain_of(found.step, op),
        "beyond": f"{beyond:.9g}",
        "float32": " In float32 it is not outside." if found.cause == "format" else "",
        "code": inside_of_domain(found.step, op, _api(found)),
    }
    return _Explanation("outside-domain", "gradient" if found.result.startswith("gradient") else "", fields)


def _is_difference_in_half(found: FirstNonfinite, record: OpRecord) -> bool:
    step = found.step
    near = [op for op in upstream(step, record.index, 4) if short_name(step.trace.records[op]) in ("sub", "rsub")]
    return any(value.summary.is_half for op in near for value in step.inputs(op))


def _log(found: FirstNonfinite, record: OpRecord, fields: dict[str, Any]) -> _Explanation:
    above = (short_name(found.step.trace.records[op]) for op in upstream(found.step, record.index, 5))
    case = "softmax" if any(name in SOFTMAXES for name in above) else ""
    in_float32 = ", but not in float32" if found.cause == "format" else ", and in float32 too"
    dtype = _where_zeros_began(found, record)
    return _Explanation("log-of-zero", case, fields | {"zero_dtype": dtype, "float32": in_float32})


def _overflow(found: FirstNonfinite, record: OpRecord) -> _Explanation:
    masks = _masks_added(found, record)
    if masks is not None:
        return masks
    if found.cause == "model":
        return _Explanation("nonfinite-in-float32", *why_out_of_float32(found, record))
    if found.kind == "constant":
        code = with_smaller_number(record.line, record.op)
        large = _large_constant(found, record)
        number = "" if large is None else f", {large:g},"
        return _Explanation("constant-overflows-half", "nonfinite", {"code": code, "number": number})
    words = {"bfloat16": "and bfloat16" if found.in_bfloat16 else "but not in bfloat16"}
    softmax = _softmax_that_reads(found)
    if softmax is not None and _is_product(found, record):
        note = "or scale the queries before the product: q = q * q.shape[-1] ** -0.5"
        note = note if short_name(softmax) == "softmax" else ""
        return _Explanation("logits-overflow-half", "nonfinite", words | {"code": _in_float32(found, record, note)})
    reduces = short_name(record) in REDUCTIONS or record.op in REDUCTIONS
    kind = "reduction-overflows-half" if reduces else "overflow-in-half"
    code = body_in_float32(found.step, record, api=_api(found)) if found.phase == "forward" else ""
    return _Explanation(kind, "nonfinite", words | {"code": code or _in_float32(found, record)})


def _large_constant(found: FirstNonfinite, record: OpRecord) -> float | None:
    """The first finite number among an op's arguments that float16 does not hold; None for none."""
    large = (each for each in found.step.ops[record.index].numbers if HALF_MAX < abs(each) < math.inf)
    return next(large, None)


def _masks_added(found: FirstNonfinite, record: OpRecord) -> _Explanation | None:
    """The finding for an op that read torch.finfo(dtype).min, as masks contain it, and overflowed."""
    least = [each for each in found.inputs if each.lowest <= torch.finfo(each.dtype).min * _NEARLY]
    if found.phase != "forward" or not least or record.op not in _ADDS:
        return None
    call = call_on(record.line, record.op, outermost=True)
    code = "scores = scores.clamp_min(-1e4)  # after the masks are added, before the softmax"
    if call is not None:
        code = edited(call.statement, call.followed_by(".clamp_min(-1e4)"))
    return _Explanation("masks-added", "", {"least": least[0].lowest, "dtype": _dtype(found), "code": code})


def _with_eps(found: FirstNonfinite, record: OpRecord, eps: float, *, first: bool) -> str:
    """A larger eps in the user's line if it comes `first` and is found, and float32 as the other way.

    Where the divisor is the eps alone, gradients are multiplied by 1 / eps. Only a larger eps makes that factor small,
    so a small one in float32 keeps the loss scale low.
    """
    own = with_larger_eps(record.line, record.op, eps) if first else ""
    if not own:
        return _in_float32(found, record, f"or an eps of at least {LEAST_EPS}, not {eps:g}")
    return f"{own}\n# or keep {eps:g} and compute in float32:\n{_in_float32(found, record)}"


_NEARLY = 0.99
_ADDS = frozenset(("add", "sub", "iadd", "baddbmm", "scaled_dot_product_attention"))


def _in_float32(found: FirstNonfinite, record: OpRecord, note: str = "") -> str:
    return in_float32(record, note, api=_api(found), reader=_reader(found, record), trace=found.step.trace)


def _api(found: FirstNonfinite) -> Api:
    return api_in_use(found.setting, found.step)


def _reader(found: FirstNonfinite, record: OpRecord) -> OpRecord | None:
    """The op that would round what the first non-finite op wrote to half again, in forward; None if there is none.

    Ops of the float32 lists, such as norms and losses, end the search: what they return fits.
    """
    if found.phase != "forward" or record is not found.record:
        return None
    for reader in found.chain[1:]:
        row = find_row(reader.op, APEX)
        if row is not None and row.cast is CastPolicy.LOWER_PRECISION_FP:
            return reader
        if row is not None and row.cast is CastPolicy.FP32:
            return None
    return None


def _softmax_that_reads(found: FirstNonfinite) -> OpRecord | None:
    """The softmax that reads the value, with only casts, scales, masks and views between."""
    for record in found.chain[1:]:
        if short_name(record) in SOFTMAXES:
            return record
        if not (record.is_cast or record.is_view or short_name(record) in _SCALES_AND_MASKS):
            return None
    return None


def _is_product(found: FirstNonfinite, record: OpRecord) -> bool:
    """Whether the op is a product, or only scales or masks one."""
    passes = short_name(record) in _SCALES_AND_MASKS
    near = (record.index, *(upstream(found.step, record.index, 2) if passes else ()))
    return any(short_name(found.step.trace.records[op]) in _PRODUCTS for op in near)


def _evidence(found: FirstNonfinite, name: str) -> dict[str, Number]:
    read = _read_at_point(found, found.record) if name == "gradient-undefined" and found.record else found.inputs
    numbers: dict[str, Number] = {"not_finite": found.result, "loss_scale": found.setting.loss_scale}
    if found.record is not None:
        numbers |= {"phase": found.phase, "input_absmax": max((each.absmax for each in read), default=0.0)}
    numbers |= {"infs": found.output.infs or 0, "nans": found.output.nans or 0, "elements": found.output.numel}
    if zeros := max((each.zeros or 0 for each in read), default=0):
        numbers["input_zeros"] = zeros
    if found.at and found.cause in ("batch", "input"):
        numbers |= dict(zip(("sample", "column"), found.at, strict=False))
    lost = _lost_constant(found)
    if lost is not None:
        numbers["constant"] = lost[1]
    elif found.kind == "constant" and found.record is not None:
        large = _large_constant(found, found.record)
        numbers |= {} if large is None else {"constant": large}
    if found.fitting_scale is not None:
        numbers["finite_at_loss_scale"] = found.fitting_scale
    if found.in_float32 is not None:
        numbers["loss_in_float32"] = found.in_float32.loss
    return numbers


def _read_at_point(found: FirstNonfinite, record: OpRecord) -> tuple[TensorSummary, ...]:
    """What the op read whose slope is infinite: its own input, not what the ops of its gradient read."""
    met = _met(found, record)
    return found.inputs if met is None else (found.step.inputs(met.op)[0].summary,)


def _where_zeros_began(found: FirstNonfinite, record: OpRecord) -> str:
    """The dtype in which the input of an op became 0: float16 if an op before it wrote float16, else its own."""
    near = upstream(found.step, record.index, 5) if found.cause == "format" else ()
    halves = any(value.summary.is_half for op in near for value in found.step.outputs(op))
    return "float16" if halves else _dtype(found)


def _counted(found: FirstNonfinite) -> str:
    output = found.output
    parts = [f"{count:,} {word}" for count, word in ((output.infs, "inf"), (output.nans, "NaN")) if count]
    return f"{' and '.join(parts)} among {output.numel:,} elements"


def _dtype(found: FirstNonfinite) -> str:
    return str(found.output.dtype).removeprefix("torch.")
