"""Rules about numbers that float16 holds, but with too few digits for what reads them.

Pure functions from an `ObservedStep` to findings:

    digits-lost-in-half   sin or cos of large numbers; a small difference of large inputs; large numbers as integers;
                          predictions for targets that differ by less than float16 numbers of their size do

From 2048 on the neighbors of a float16 number are 2 apart, from 8192 on 8. Ops that scale or add do not mind: the
relative error is the same for all numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding
from amplab.diagnose.observed_step.dataflow import computes_in_half, forward_ops, place_of, short_name, upstream
from amplab.diagnose.observed_step.values import ObservedStep, Value
from amplab.diagnose.remedies.api_styles import Api, ApiStyle
from amplab.diagnose.remedies.float32 import in_float32
from amplab.diagnose.remedies.float32_function import body_in_float32
from amplab.diagnose.remedies.users_code import function_around
from amplab.diagnose.rules.arithmetic import cancellations
from amplab.trace import OpRecord

__all__ = ["digits_findings"]

PHASE = 512.0
"""From here on float16 rounds an angle by up to 0.25."""

INTEGERS = 2048.0
"""From here on float16 does not hold every integer."""

_STEPS = 4
"""Targets need at least so many float16 numbers between the smallest and the largest of them."""

_PERIODIC = frozenset(("sin", "cos", "tan"))
_LOSSES = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss", "sub", "rsub"))  # l1_loss is sub and abs
_DEPTH = 6


def digits_findings(step: ObservedStep, api: Api | None = None) -> list[Finding]:
    """Apply every rule of this file, once for each line; arguments as of `value_findings`."""
    api = api or Api()
    found = (
        *phases_lost(step, api),
        *differences_lost(step, api),
        *indices_lost(step, api),
        *targets_missed(step, api),
    )
    return list({(each.module, each.line): each for each in reversed(found)}.values())[::-1]


def phases_lost(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A sine or cosine of float16 numbers that are larger than `PHASE`."""
    for record in forward_ops(step):
        if short_name(record) in _PERIODIC and computes_in_half(step, record.index):
            read = step.inputs(record.index)[0].summary
            if read.is_finite and read.absmax >= PHASE:
                yield _lost(step, record, "", api, input_absmax=read.absmax)


def differences_lost(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A small difference in float16 of large numbers, which a cast has rounded."""
    for record, largest, left in cancellations(step):
        if largest >= INTEGERS and _rounded_input(step, record) is not None:
            yield _lost(step, record, "difference", api, input_absmax=largest, left=left.absmax)


def indices_lost(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """Large float16 numbers that are converted to integers: indices of an embedding."""
    for record in step.trace.records:
        if record.phase != "forward" or not any(info.dtype == torch.int64 for info in record.outputs):
            continue
        read = [value.summary for value in step.inputs(record.index) if value.summary.is_half]
        if short_name(record) == "to_copy" and read and read[0].is_finite and read[0].absmax > INTEGERS:
            yield _lost(step, record, "index", api, input_absmax=read[0].absmax)


def targets_missed(step: ObservedStep, api: Api) -> Iterator[Finding]:
    """A loss of float16 predictions and targets between which float16 has few numbers."""
    for record in forward_ops(step):
        if short_name(record) not in _LOSSES or len(step.inputs(record.index)) != 2:
            continue
        for predicted, target in itertools.permutations(step.inputs(record.index)):
            head = _half_behind(step, predicted)
            if head is None or target.kind == "parameter" or target.op is not None or not target.summary.is_finite:
                continue
            spread, spacing = target.summary.highest - target.summary.lowest, _spacing(target.summary.absmax)
            if 0 < spread < _STEPS * spacing:
                yield finding(
                    "digits-lost-in-half",
                    "target",
                    **place_of(head),
                    tensor=target.name,
                    evidence={"target_absmax": target.summary.absmax, "spread": spread, "spacing": spacing},
                    origin="",
                    code=in_float32(head, api=api, trace=step.trace),
                )


def _half_behind(step: ObservedStep, value: Value) -> OpRecord | None:
    """The op that wrote a value in float16, which may have been cast since; None for none."""
    while value.op is not None:
        record = step.trace.records[value.op]
        if value.summary.is_half and not record.is_cast:
            return record
        read = step.inputs(value.op)
        if (short_name(record) != "to_copy" and not record.is_view) or not read:
            return None
        value = read[0]
    return None


def _lost(step: ObservedStep, record: OpRecord, case: str, api: Api, **evidence: float) -> Finding:
    cast = _rounded_input(step, record)
    origin, tensor = "", ""
    if cast is not None:
        at, value = cast
        tensor = value.name
        line = f", {at.line}," if at.line is not None else ""
        origin = f" A cast{line} rounded {tensor or 'a float32 tensor'} with numbers up to {value.summary.absmax:.5g}."
    return finding(
        "digits-lost-in-half",
        case,
        **place_of(record),
        tensor=tensor,
        evidence={**evidence, "spacing": _spacing(evidence["input_absmax"])},
        origin=origin,
        code=_remedy(step, record, api),
    )


def _rounded_input(step: ObservedStep, record: OpRecord) -> tuple[OpRecord, Value] | None:
    """The cast to float16 of the largest number that an op reads, and what the cast read; None for none."""
    found: list[tuple[OpRecord, Value]] = []
    for number in upstream(step, record.index, _DEPTH):
        above = step.trace.records[number]
        if above.is_cast and any(value.summary.is_half for value in step.outputs(number)):
            found += [(above, each) for each in step.inputs(number)[-1:] if _is_input(each)]
    return max(found, key=lambda pair: pair[1].summary.absmax, default=None)


def _is_input(value: Value) -> bool:
    return value.kind != "parameter" and not value.summary.is_half and value.summary.absmax >= INTEGERS


def _spacing(number: float) -> float:
    """The distance of the float16 numbers next to a number."""
    return float(2.0 ** (math.floor(math.log2(max(number, 2.0**-14))) - 10))


def _remedy(step: ObservedStep, record: OpRecord, api: Api) -> str:
    """Compute in float32 what leads to the op: a .float() at the op itself would come too late."""
    function: Any = function_around(record.line)
    called = f"{function.name}(x.float())" if function is not None and function.name != "forward" else f"{record.op}(…)"
    before = f"compute {called} before the model, in float32, and pass its result instead of x"
    if api.casting is ApiStyle.APEX_HALF:
        o1 = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # O1 casts no inputs'
        return f"{o1}\n# or {before}"
    if api.casting is ApiStyle.HALF:
        return f"# {before}"
    body = body_in_float32(step, record, api=api, always=True)
    if body:
        return body
    written = (step.trace.records[op] for op in upstream(step, record.index, _DEPTH))
    return in_float32(next((each for each in written if not each.is_cast), record), api=api, trace=step.trace)
