"""The body of the user's function around an op, computed in float32, where one op in float32 would not be enough.

a norm written by hand      its squares overflow, and the other ops round what the squares were computed from
a loss of large sums        an op overflows because it reads a number that is itself close to 65504
"""

from __future__ import annotations

import torch

from amplab.diagnose.observed_step.dataflow import forward_ops, squares, writers
from amplab.diagnose.observed_step.tensor_summary import HALF_MAX
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import without_casts
from amplab.diagnose.remedies.users_code import UsersFunction, function_around
from amplab.trace import OpRecord

__all__ = ["body_in_float32"]

_NEAR = 8.0
"""A number within this factor of 65504 leaves float16 after three doublings."""

_MOST_LINES = 20
"""Longer bodies are not repeated in a remedy."""

_LAYERS = ("linear", "conv", "embedding", "lstm", "gru", "rnn")


def body_in_float32(step: ObservedStep, record: OpRecord, note: str = "", *, api: Api, always: bool = False) -> str:
    """Return the body of the function around an op in float32; empty where the op alone is enough, or for half weights.

    Args:
        step: the step.
        record: the op that overflowed in forward.
        note: an alternative, added as a comment.
        api: what the training loop uses.
        always: also where nothing shows that the op alone is not enough.
    """
    if api.casting in (ApiStyle.APEX_HALF, ApiStyle.HALF) or record.is_cast:
        return ""
    function = function_around(record.line)
    if function is None or function.body.count("\n") >= _MOST_LINES:
        return ""
    if not (always or squares(step, record.index) or _reads_what_is_near(step, record, function)):
        return ""
    given = _read_in_half(step, function)
    if not given:
        return ""
    cast = f"{', '.join(given)} = {', '.join(f'{each}.float()' for each in given)}"
    first, _, rest = without_casts([cast, function.body], api, given[0]).partition("\n")
    code = f"{first}  # the whole body of {function.name}\n{rest}"
    return f"{code}\n# {note}" if note else code


def _reads_what_is_near(step: ObservedStep, record: OpRecord, function: UsersFunction) -> bool:
    """Whether an op reads a float16 number close to 65504 that another op of the function wrote."""
    for place in step.ops[record.index].inputs:
        read = step.values[place].summary
        above = (step.trace.records[op] for op in writers(step, place))
        if read.is_half and read.absmax * _NEAR > HALF_MAX and any(function.contains(each.line) for each in above):
            return True
    return False


def _read_in_half(step: ObservedStep, function: UsersFunction) -> list[str]:
    """The arguments that the function's ops read on lines that compute with float16.

    Empty if it calls layers, whose products belong in float16, or if a line reads integers too: which argument they are
    is not known.
    """
    inside = [each for each in forward_ops(step) if function.contains(each.line)]
    if any(each.op.startswith(_LAYERS) for each in inside):
        return []
    read: set[str] = set()
    for record in inside:
        dtypes = {info.dtype for info in (*record.inputs, *record.outputs)}
        line = record.line.number if record.line is not None else 0
        names = function.names.get(line, frozenset())
        if any(not dtype.is_floating_point for dtype in dtypes) and names:
            return []
        if not function.numbers.get(line, frozenset()).issuperset(step.ops[record.index].numbers):
            names &= function.tensors  # an argument may be a number, such as an eps
        if torch.float16 in dtypes:
            read |= names
    return [each for each in function.arguments if each in read]
