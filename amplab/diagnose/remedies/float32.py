"""Code to paste: one place or one module computed in float32, in the words of what is in use.

level           weights   what casts            a place is mended by
"O0" to "O1"    float32   amp, at each call     a rule of its policy, or a block of amp.disable_casts
"O2", "O3"      half      nothing               .float() by hand, or a module rule
"half"          half      nothing               .float() by hand
"amplab"        float32   amplab.autocast       a block without amplab.autocast: torch's does not end it
None            float32   torch.autocast        a block without torch.autocast: amplab's does not end it
"""

from __future__ import annotations

from itertools import takewhile

from amplab.diagnose.remedies.float32_call import float32_call
from amplab.policies import PrecisionPolicy
from amplab.trace import OpRecord

__all__ = ["dynamic_scale", "fewer_casts", "in_float32", "kept_in_float32", "variance_in_float32"]


def in_float32(record: OpRecord, note: str = "", *, level: str | None = "O1", reader: OpRecord | None = None) -> str:
    """Return the lines that let the op of `record`, or the module it is in, compute in float32.

    A module computed in float32 gives its output back in the model's format, so the rule is for the module that holds
    both the op and its `reader`. Half weights (O2, O3) need the same of an op, where only O1 keeps results wide.

    Args:
        record: the op.
        note: another way, added as a comment.
        level: the opt_level to go on with; see the head of this file.
        reader: the op that reads what this one wrote; None where that does not matter.

    >>> print(in_float32(OpRecord(0, "matmul", "aten.mm.default", "forward", "attn", (), (), "")))
    policy = amplab.policies.PrecisionPolicy(module_rules={'attn': 'float32'})
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", policy=policy)
    # or around that line alone:
    with amp.disable_casts():
        y = torch.matmul(x.float(), other.float())
    """
    pattern = _pattern(record, reader)
    if level == "half":
        lines = [_by_hand(record), "# or model.bfloat16(): it has the range of float32"]
        return "\n".join([*lines, f"# {note}"] if note else lines)
    ruled = not record.is_cast and level not in _REGIONS and (pattern or _is_known(record.op))
    if level in _HALF_WEIGHTS:
        lines = _with_rule(record, pattern, level if pattern else "O1") if ruled else []
        lines.append(_in_bfloat16(level, another=ruled))
    else:
        lines = [*_with_rule(record, pattern, level), "# or around that line alone:"] if ruled else []
        lines += _around(record, level)
    return "\n".join([*lines, f"# {note}"] if note else lines)


def kept_in_float32(record: OpRecord, note: str = "", *, level: str | None = "O1") -> str:
    """Return the lines that compute an op in float32 and let what follows have the result: half would round it again.

    Args:
        record, note, level: as in `in_float32`.

    >>> print(kept_in_float32(OpRecord(0, "sum", "aten.sum.default", "forward", "", (), (), ""), level="O2"))
    y = torch.sum(x.float())  # go on in float32; y.to(x.dtype) where half weights read it
    """
    if level not in (*_HALF_WEIGHTS, "half"):
        return in_float32(record, note, level=level)
    lines = [_by_hand(record)]
    if level != "half" and (pattern := _pattern(record, None)):
        lines += ["# or all of that module:", *_with_rule(record, pattern, level)]
    return "\n".join([*lines, f"# {note}"] if note else lines)


def dynamic_scale(level: str | None) -> str:
    """Return the line that gets a loss scale which moves.

    >>> dynamic_scale("O2")
    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")'
    """
    if level in _REGIONS:
        module = "torch.amp" if level is None else "amplab"
        return f"scaler = {module}.GradScaler(x.device.type)  # scaler.scale(loss).backward(), scaler.step(optimizer)"
    if level == "half":
        return 'model, optimizer = amp.initialize(model.float(), optimizer, opt_level="O2")  # a dynamic scale, masters'
    return f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", loss_scale="dynamic")'


def fewer_casts(level: str | None) -> str:
    """Return the code that casts less often.

    >>> fewer_casts("O1")
    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")'
    """
    if level in _REGIONS:
        module = "torch" if level is None else "amplab"
        return f"with {module}.autocast(x.device.type, torch.float16):  # one region around all of the forward"
    if level in (*_HALF_WEIGHTS, "half"):
        return "# keep x in half between the ops: leave out .float() and .to(...) where nothing needs them"
    return 'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")'


def variance_in_float32(record: OpRecord, *, level: str | None = "O1", reader: OpRecord | None = None) -> str:
    """Return the lines that take a variance in float32, where `record` met that of a difference in half.

    Args:
        record: the op that read it.
        level, reader: as in `in_float32`.

    >>> print(variance_in_float32(OpRecord(0, "rsqrt", "aten.rsqrt.default", "forward", "", (), (), "")))
    variance = x.float().var(-1, keepdim=True, unbiased=False)  # in place of the difference
    """
    back = ".to(x.dtype)" if level in (*_HALF_WEIGHTS, "half") else ""
    line = f"variance = x.float().var(-1, keepdim=True, unbiased=False){back}  # in place of the difference"
    pattern = _pattern(record, reader)
    return (
        "\n".join([*_with_rule(record, pattern, level), "# or", line])
        if pattern and level not in (*_REGIONS, "half")
        else line
    )


_HALF_WEIGHTS = ("O2", "O3")
_REGIONS = {
    None: "torch.autocast(x.device.type, enabled=False)",
    "amplab": "amplab.autocast(x.device.type, enabled=False)",
}
_NO_CASTS = "amp.disable_casts()"


def _with_rule(record: OpRecord, pattern: str, level: str | None) -> list[str]:
    rule = f"module_rules={{{pattern!r}: 'float32'}}" if pattern else f"op_rules={{{record.op!r}: 'float32'}}"
    return [
        f"policy = amplab.policies.PrecisionPolicy({rule})",
        f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", policy=policy)',
    ]


def _by_hand(record: OpRecord) -> str:
    value, first = _value(record)
    return f"y = {value}  # {first}go on in float32; y.to(x.dtype) where half weights read it"


def _around(record: OpRecord, level: str | None) -> list[str]:
    value, first = _value(record)
    line = value if value != "x.float()" else f"{value}  # and {first}go on in float32"
    return [f"with {_REGIONS.get(level, _NO_CASTS)}:", f"    y = {line}"]


def _value(record: OpRecord) -> tuple[str, str]:
    """The op's call in float32, or what it reads in float32 and the words for what is left to do."""
    call = "" if record.is_cast else float32_call(record)
    return call or "x.float()", "" if call or record.is_cast else f"call {record.op} with it, "


def _in_bfloat16(level: str, *, another: bool) -> str:
    if another:
        return f'# or opt_level="{level}", cast_model_type=torch.bfloat16: it has the range of float32'
    call = f'amp.initialize(model, optimizer, opt_level="{level}", cast_model_type=torch.bfloat16)'
    return f"model, optimizer = {call}"


def _pattern(record: OpRecord, reader: OpRecord | None) -> str:
    """The innermost module that holds both, empty outside of one and in the model itself, which goes by its class."""
    pairs = zip(record.module.split("."), (reader or record).module.split("."), strict=False)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join(shared) if shared and not shared[0][:1].isupper() else ""


def _is_known(op: str) -> bool:
    """Whether a policy takes a rule for this op."""
    try:
        PrecisionPolicy(op_rules={op: "float32"})
    except ValueError:
        return False
    return True
