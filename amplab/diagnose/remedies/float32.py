"""Code to paste that computes one op or one module in float32, for each API that chooses dtypes.

ApiStyle     weights   who casts              how an op is computed in float32
APEX         float32   amp, at each op        a rule of its policy, or a block of amp.disable_casts
APEX_HALF    half      nothing                .float() by hand, or a rule for the module
HALF         half      nothing                .float() by hand
AMPLAB       float32   amplab.autocast        a block without amplab.autocast; torch's block does not end it
TORCH        float32   torch.autocast         a block without torch.autocast; amplab's block does not end it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32_call import float32_call
from amplab.diagnose.remedies.rule_cost import cost_of_modules, cost_of_ops
from amplab.diagnose.remedies.users_code import UsersCall, call_on, edited
from amplab.policies import PrecisionPolicy
from amplab.trace import OpRecord, Trace

__all__ = ["in_float32", "kept_in_float32", "module_rule", "variance_in_float32", "without_casts"]


def in_float32(
    record: OpRecord,
    note: str = "",
    *,
    api: Api | None = None,
    reader: OpRecord | None = None,
    trace: Trace | None = None,
) -> str:
    """Return the lines that compute the op of `record`, or the module that contains it, in float32.

    What a rule computes stays in float32 until an op casts it to half. The rule is therefore for the module of the op
    and, if such a `reader` is given, for the module of the reader. The line is the user's own if it can be found.

    Args:
        record: the op.
        note: an alternative, added as a comment.
        api: what the training loop uses.
        reader: the op that would round the output of this one to half; None if there is none, or if that is no loss.
        trace: the step, to say what a rule costs.

    >>> print(in_float32(OpRecord(0, "matmul", "aten.mm.default", "forward", "attn", (), (), "")))
    policy = amplab.policies.PrecisionPolicy(module_rules={'attn': 'float32'})
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", policy=policy)
    # or around that line alone:
    with amp.disable_casts():
        y = torch.matmul(x.float(), other.float())
    """
    api = api or Api()
    if api.casting is ApiStyle.HALF:
        lines = [_by_hand(record), "# or model.bfloat16(): it has the range of float32"]
        return "\n".join([*lines, f"# {note}"] if note else lines)
    ruled = "" if api.casting in _REGIONS else _rule(record, reader)
    if record.is_cast:  # only that of a weight belongs to a module
        ruled = ruled if record.parameter and ruled.startswith("module_rules") else ""
    priced = [*_rule_lines(ruled, api.level), *_cost(ruled, record, reader, trace)] if ruled else []
    if api.casting is ApiStyle.APEX_HALF:
        lines = [*priced, _in_bfloat16(api.level, another=bool(ruled))]
    elif ruled and not record.is_cast and call_on(record.line, record.op) is not None:
        wider = "the whole module" if ruled.startswith("module_rules") else f"every {record.op} of the model"
        lines = [*_around(record, api), f"# or {wider}:", *priced]
    else:
        line = [] if ruled and record.is_cast else _around(record, api)
        lines = [*priced, "# or around that line alone:", *line] if ruled and line else [*priced, *line]
    return "\n".join([*lines, f"# {note}"] if note else lines)


def kept_in_float32(record: OpRecord, note: str = "", *, api: Api | None = None, trace: Trace | None = None) -> str:
    """Return the lines that compute an op in float32 and keep the float32 result, which float16 would round again.

    Args:
        record, note, api, trace: as in `in_float32`.

    >>> record = OpRecord(0, "sum", "aten.sum.default", "forward", "", (), (), "")
    >>> print(kept_in_float32(record, api=Api.of_opt_level("O2")))
    y = torch.sum(x.float())  # continue in float32; use y.to(x.dtype) where half weights read it
    """
    api = api or Api()
    if api.casting not in _HALF_WEIGHTS:
        return in_float32(record, note, api=api, trace=trace)
    by_hand = _by_hand(record)
    lines = [by_hand]
    if api.casting is not ApiStyle.HALF and (rule := _module_rule(record)):
        lines = [*_rule_lines(rule, api.level), *_cost(rule, record, None, trace), "# or that line alone:", by_hand]
    return "\n".join([*lines, f"# {note}"] if note else lines)


def variance_in_float32(record: OpRecord, *, api: Api | None = None, reader: OpRecord | None = None) -> str:
    """Return the lines that compute a variance in float32, where `record` read a difference of float16 numbers.

    Args:
        record: the op that read it.
        api, reader: as in `in_float32`.

    >>> print(variance_in_float32(OpRecord(0, "rsqrt", "aten.rsqrt.default", "forward", "", (), (), "")))
    variance = x.float().var(-1, keepdim=True, unbiased=False)  # instead of the difference
    """
    api = api or Api()
    back = ".to(x.dtype)" if api.casting in _HALF_WEIGHTS else ""
    line = f"variance = x.float().var(-1, keepdim=True, unbiased=False){back}  # instead of the difference"
    rule = _module_rule(record, reader)
    return (
        "\n".join([*_rule_lines(rule, api.level), "# or", line])
        if rule and api.casting not in (*_REGIONS, ApiStyle.HALF)
        else line
    )


def module_rule(module: str, api: Api) -> str:
    """Return the lines that compute one module in float32; empty where the API has no rules for modules."""
    if api.casting in (*_REGIONS, ApiStyle.HALF) or not module or module[:1].isupper():
        return ""
    return "\n".join(_rule_lines(f"module_rules={{{module!r}: 'float32'}}", api.level))


def without_casts(lines: Sequence[str], api: Api, tensor: str = "x") -> str:
    """Return lines of code in a block in which nothing is cast; unchanged where the API casts nothing at an op.

    Args:
        lines: the lines.
        api: what the training loop uses.
        tensor: a tensor of theirs, whose device a region of autocast needs; anything but a name becomes `x`.
    """
    if api.casting in _HALF_WEIGHTS:
        return "\n".join(lines)
    indented = ["    " + each for line in lines for each in line.split("\n")]
    region = _REGIONS.get(api.casting, _NO_CASTS)
    if tensor.isidentifier():
        region = region.replace("(x.", f"({tensor}.")
    return "\n".join([f"with {region}:", *indented])


_HALF_WEIGHTS = (ApiStyle.APEX_HALF, ApiStyle.HALF)
_REGIONS = {
    ApiStyle.TORCH: "torch.autocast(x.device.type, enabled=False)",
    ApiStyle.AMPLAB: "amplab.autocast(x.device.type, enabled=False)",
}
_NO_CASTS = "amp.disable_casts()"


def _rule(record: OpRecord, reader: OpRecord | None) -> str:
    """The rule for the modules of both; for their ops where one of them is in no module; empty if it has no rule."""
    ops = dict.fromkeys(each.op for each in (record, reader) if each is not None)
    return _module_rule(record, reader) or (_rule_of("op_rules", ops) if all(map(_is_known, ops)) else "")


def _module_rule(record: OpRecord, reader: OpRecord | None = None) -> str:
    """The rule for the modules of both; empty if one of them is in no module but the model, which goes by its class."""
    modules = dict.fromkeys(each.module for each in (record, reader) if each is not None)
    if any(not each or each[:1].isupper() for each in modules):
        return ""
    outermost = [each for each in modules if not any(each.startswith(f"{other}.") for other in modules)]
    return _rule_of("module_rules", outermost)


def _rule_of(argument: str, names: Iterable[str]) -> str:
    return f"{argument}={{{', '.join(f'{name!r}: {_FLOAT32!r}' for name in names)}}}"


_FLOAT32 = "float32"


def _rule_lines(rule: str, level: str) -> list[str]:
    return [
        f"policy = amplab.policies.PrecisionPolicy({rule})",
        f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", policy=policy)',
    ]


def _cost(rule: str, record: OpRecord, reader: OpRecord | None, trace: Trace | None) -> list[str]:
    """What a rule costs, as a comment; nothing if the step is not known."""
    if trace is None:
        return []
    both = [each for each in (record, reader) if each is not None]
    if rule.startswith("module_rules"):
        return [cost_of_modules(trace, [each.module for each in both])]
    return [cost_of_ops(trace, [each.op for each in both])]


def _call(record: OpRecord, api: Api) -> UsersCall | None:
    """The user's call of the op, or of its module; half weights do not take float32, so there not of its module."""
    if record.is_cast:
        return None
    module = "" if api.casting in _HALF_WEIGHTS else record.module.rpartition(".")[2]
    return call_on(record.line, record.op) or (call_on(record.line, module, is_module=True) if module else None)


def _in_float32(call: UsersCall, record: OpRecord) -> str:
    """The user's statement with the inputs of the call in float32."""
    tensors = call.tensors[: len(record.inputs) or None]
    edits = [edit for each in tensors for edit in call.operand_followed_by(".float()", each)]
    return edited(call.statement, tuple(edits))


_ASSIGNED = re.compile(r"^[\w.]+ = ")


def _by_hand(record: OpRecord) -> str:
    call = _call(record, Api(casting=ApiStyle.HALF))
    if call is not None:
        statement = _in_float32(call, record)
        rounded = _rounded_to_half(statement)
        return f"{statement}\n# or, if half weights read the result:\n# {rounded}" if rounded else statement
    value, first = _value(record)
    return f"y = {value}  # {first}continue in float32; use y.to(x.dtype) where half weights read it"


def _rounded_to_half(statement: str) -> str:
    """Return a statement with the value that it assigns or returns rounded to half; empty for another statement.

    >>> _rounded_to_half("return x * w")
    'return (x * w).half()'
    """
    for before in ("return ", *_ASSIGNED.findall(statement)):
        value = statement.removeprefix(before)
        if value != statement:
            return f"{before}({value}).half()"
    return ""


def _around(record: OpRecord, api: Api) -> list[str]:
    call = _call(record, api)
    if call is not None:
        return without_casts([_in_float32(call, record)], api, call.tensor).split("\n")
    value, first = _value(record)
    line = value if value != "x.float()" else f"{value}  # and {first}continue in float32"
    return [f"with {_REGIONS.get(api.casting, _NO_CASTS)}:", f"    y = {line}"]


def _value(record: OpRecord) -> tuple[str, str]:
    """The call of the op in float32; or only its input in float32, and what is left to do as text."""
    call = "" if record.is_cast else float32_call(record)
    return call or "x.float()", "" if call or record.is_cast else f"call {record.op} with it, "


def _in_bfloat16(level: str, *, another: bool) -> str:
    if another:
        return f'# or opt_level="{level}", cast_model_type=torch.bfloat16: it has the range of float32'
    call = f'amp.initialize(model, optimizer, opt_level="{level}", cast_model_type=torch.bfloat16)'
    return f"model, optimizer = {call}"


def _is_known(op: str) -> bool:
    """Whether a policy takes a rule for this op."""
    try:
        PrecisionPolicy(op_rules={op: "float32"})
    except ValueError:
        return False
    return True
