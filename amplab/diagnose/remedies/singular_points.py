"""Code to paste that keeps the input of an op away from a singular point, using the names of the user's line.

The cast to float32 must come before the op that loses the value; after it is too late. Where the input is at the point
in float32 too, another function computes the result, or the input is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence

from amplab.diagnose.observed_step.dataflow import short_name
from amplab.diagnose.observed_step.singular_points import Domain, Met, domain_of
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import module_rule, without_casts
from amplab.diagnose.remedies.users_code import Edit, UsersCall, call_on, edited
from amplab.policies import CastPolicy
from amplab.trace import OpRecord

__all__ = ["away_from_point", "inside_of_domain"]

_STABLE = {
    ("log1p", "neg", "sigmoid"): "torch.nn.functional.logsigmoid(-{x})",
    ("log", "rsub", "sigmoid"): "torch.nn.functional.logsigmoid(-{x})",
    ("log", "sigmoid"): "torch.nn.functional.logsigmoid({x})",
    ("log", "softmax"): "torch.nn.functional.log_softmax({x}, dim=-1)",
    ("logit", "sigmoid"): "{x}",
    ("atanh", "tanh"): "{x}",
}
"""A singular op and the ops that lead to its input, the first one last -> an expression of the first one's input that
computes the same without reaching the point."""

_LOST = ("bound", "factor", "eps", "rounded", "cast")
_TWO_SIDED = 2


def away_from_point(step: ObservedStep, met: Met, api: Api) -> str:
    """Return the lines to paste for an op that met a singular point."""
    path = (met.op, *reversed(met.origin.between[:-1]), *(() if met.origin.op is None else (met.origin.op,)))
    ops = tuple(dict.fromkeys(path))
    stable = _STABLE.get(tuple(short_name(step.trace.records[each]) for each in ops))
    if stable is not None:
        return _replaced(step.trace.records[met.op], step.trace.records[ops[-1]], stable)
    if met.origin.why in _LOST and met.origin.op is not None:
        return _in_float32_from(step, met, met.origin.op, api)
    return inside_of_domain(step, met.op, api)


def inside_of_domain(step: ObservedStep, op: int, api: Api) -> str:
    """Return the line that clamps the input of an op to the inside of its domain."""
    record, domain = step.trace.records[op], domain_of(step, op)
    clamp = f".float(){_clamp(domain)}" if domain is not None else ".float()"
    call = call_on(record.line, record.op)
    if call is None:
        return f"y = {_called(record, f'x{clamp}', api)}  # x is the input of {record.op}"
    return edited(call.statement, (*call.followed_by(_back(api)), *call.operand_followed_by(clamp)))


def _replaced(record: OpRecord, inner: OpRecord, stable: str) -> str:
    """The user's statement with a function that computes two ops at once."""
    call, within = call_on(record.line, record.op), call_on(inner.line, inner.op)
    known = within is not None and inner.module == record.module
    argument = within.tensor if known and within is not None else "x"
    text = argument if argument.isidentifier() or stable.endswith("({x}, dim=-1)") else f"({argument})"
    code = stable.format(x=text if stable != "{x}" else argument)
    note = "" if known else f"  # x is the input of {inner.op}"
    if call is None:
        return f"y = {code}{note or f'  # instead of {inner.op} and {record.op}'}"
    return edited(call.statement, call.replaced_by(code)) + note


def _in_float32_from(step: ObservedStep, met: Met, first: int, api: Api) -> str:
    """The user's statements with everything in float32 from the input of the op that lost the value."""
    inner, outer = step.trace.records[first], step.trace.records[met.op]
    if met.origin.why == "cast":
        line = inner.line.source if inner.line is not None else ""
        return f"# leave out the cast to float16 before {outer.op}" + (f", in this line:\n# {line}" if line else "")
    begins, ends = call_on(inner.line, inner.op), call_on(outer.line, outer.op)
    if begins is None and inner.module != outer.module and (rule := module_rule(inner.module, api)):
        return rule
    if begins is None or ends is None:
        return inside_of_domain(step, met.op, api)
    return _pasted(step, met, first, (begins, ends), api)


def _pasted(step: ObservedStep, met: Met, first: int, calls: tuple[UsersCall, UsersCall], api: Api) -> str:
    begins, ends = calls
    inner, outer = step.trace.records[first], step.trace.records[met.op]
    is_half_op = api.casting is not ApiStyle.HALF and CastPolicy.LOWER_PRECISION_FP.value in inner.reason
    operands = begins.tensors[: len(inner.inputs)] if is_half_op else begins.tensors[:1]
    within: list[Edit] = [edit for each in operands for edit in begins.operand_followed_by(".float()", each)]
    domain = domain_of(step, met.op)
    clamped = (
        met.origin.why == "rounded" and domain is not None and len(_ends(domain)) == _TWO_SIDED and first != met.op
    )
    around = [*ends.followed_by(_back(api)), *(ends.operand_followed_by(_clamp(domain)) if clamped and domain else ())]
    if begins.statement == ends.statement and inner.line == outer.line:
        lines = [edited(ends.statement, (*around, *within))]
    else:
        lines = [edited(begins.statement, tuple(within)), edited(ends.statement, tuple(around))]
    return without_casts(lines, api, begins.tensor) if is_half_op else "\n".join(lines)


def _called(record: OpRecord, argument: str, api: Api) -> str:
    name = record.op.removeprefix("special_")
    home = "torch.special" if name != record.op else "torch"
    return f"{home}.{name}({argument}){_back(api)}"


def _back(api: Api) -> str:
    """Where the next op reads half weights, its input is half."""
    return ".half()" if api.casting in (ApiStyle.APEX_HALF, ApiStyle.HALF) else ""


def _ends(domain: Domain) -> Sequence[float]:
    return [each for each in (domain.lowest, domain.highest) if abs(each) != float("inf")]


def _clamp(domain: Domain) -> str:
    distance = "1e-4" if domain.infinite_at else "1e-6"
    lowest = distance if domain.lowest == 0 else f"{domain.lowest:g} + {distance}"
    if len(_ends(domain)) == _TWO_SIDED:
        return f".clamp({lowest}, {domain.highest:g} - {distance})"
    return f".clamp_min({lowest})"
