"""Code to paste: one place or one module computed in float32."""

from __future__ import annotations

from amplab.policies import PrecisionPolicy
from amplab.trace import OpRecord

__all__ = ["in_float32"]


def in_float32(record: OpRecord, note: str = "", *, level: str | None = "O1") -> str:
    """Return the lines that let the op of `record`, or the module it is in, compute in float32.

    Args:
        record: the op.
        note: another way, added as a comment.
        level: the opt_level to go on with; None where apex's face is not in use.

    >>> print(in_float32(OpRecord(0, "matmul", "aten.mm.default", "forward", "attn", (), (), "")))
    policy = amplab.policies.PrecisionPolicy(module_rules={'attn': 'float32'})
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", policy=policy)
    # or around that line alone:
    with torch.autocast(x.device.type, enabled=False):
        y = matmul(x.float())
    """
    around = ["with torch.autocast(x.device.type, enabled=False):", f"    y = {record.op}(x.float())"]
    if record.is_cast or level is None or not (_pattern(record) or _is_known(record.op)):
        around[1] = "    y = x.float()  # and go on in float32" if record.is_cast else around[1]
        return "\n".join([*around, f"# {note}"] if note else around)
    pattern = _pattern(record)
    rule = f"module_rules={{{pattern!r}: 'float32'}}" if pattern else f"op_rules={{{record.op!r}: 'float32'}}"
    lines = [
        f"policy = amplab.policies.PrecisionPolicy({rule})",
        f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", policy=policy)',
        "# or around that line alone:",
        *around,
    ]
    return "\n".join([*lines, f"# {note}"] if note else lines)


def _pattern(record: OpRecord) -> str:
    """The name of the op's module, empty outside of one and in the model itself, which goes by its class."""
    return record.module if record.module and not record.module[0].isupper() else ""


def _is_known(op: str) -> bool:
    """Whether a policy takes a rule for this op."""
    try:
        PrecisionPolicy(op_rules={op: "float32"})
    except ValueError:
        return False
    return True
