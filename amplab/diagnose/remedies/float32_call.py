"""The call of an op in float32 as code: with its namespace and the arguments that its schema requires."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from amplab.trace import OpRecord

__all__ = ["float32_call"]

_OF_SCHEMA = {"cross_entropy": "cross_entropy_loss"}
"""Ops whose schema has another name."""

_NEEDS_MORE = frozenset(("clamp", "embedding"))
"""Ops that need more than their schema requires, or take it in another order."""


def float32_call(record: OpRecord) -> str:
    """Return the call of an op on `x` and `other` in float32; empty if it takes more arguments.

    >>> float32_call(OpRecord(0, "sum", "aten.sum.default", "forward", "", (), (), ""))
    'torch.sum(x.float())'
    >>> float32_call(OpRecord(0, "linear", "aten.addmm.default", "forward", "", (), (), ""))
    'torch.nn.functional.linear(x.float(), other.float())'
    """
    home = next((name for name, at in (("torch", torch), ("torch.nn.functional", F)) if hasattr(at, record.op)), "")
    overload = _overload(record)
    if not home or overload is None or record.op in _NEEDS_MORE:
        return ""
    _, *others = _required(overload)
    given = [_given(each, bare=torch.Tag.pointwise in overload.tags) for each in others]
    return "" if "" in given or len(given) > 1 else f"{home}.{record.op}({', '.join(['x.float()', *given])})"


def _overload(record: OpRecord) -> Any:
    """Return the called overload if the dispatcher's op has its name, else the one with the fewest arguments."""
    name = _OF_SCHEMA.get(record.op, record.op)
    packet = getattr(torch.ops.aten, name, None)
    _, base, called = (*record.aten.split("."), "", "")[:3]
    known = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    fitting = [each for each in known if _is_of_tensor(each)]
    if base == name and (own := [each for each in fitting if each._overloadname == called]):
        return own[0]
    return min(fitting, key=lambda each: len(_required(each)), default=None)


def _required(overload: Any) -> list[Any]:
    return [each for each in overload._schema.arguments if not each.has_default_value()]


def _is_of_tensor(overload: Any) -> bool:
    arguments = overload._schema.arguments
    return bool(arguments) and str(arguments[0].type) == "Tensor" and not any(each.is_out for each in arguments)


def _given(argument: Any, *, bare: bool) -> str:
    """Return the code of an argument; `bare`: the op promotes its inputs and takes numbers too."""
    if argument.name == "dim":
        return "dim=-1"
    if argument.name == "normalized_shape":
        return "x.shape[-1:]"
    if str(argument.type) == "Tensor":
        return "other" if bare or argument.name == "target" else "other.float()"
    return "other" if str(argument.type) == "number" else ""
