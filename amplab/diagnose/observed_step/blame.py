"""Where inf and NaN come from: the path back from a non-finite loss or gradient to the op that caused it.

Not every inf does harm: a mask of -inf before a softmax does not, nor does the log of 0 that a later `where` discards.
So the search does not take the first non-finite value of a step. It starts at the first *result* that is not finite,
the loss or else the gradient of a parameter, and goes from each op to the inputs that explain its output:

    output holds NaN, an input holds NaN             NaN spreads: follow the NaN
    output is not finite, an input is inf            follow the inf
    output is not finite, every input is finite      the cause

A constant inf in the code is not an overflow. If the search finds only such constants, the op that made the first NaN
from one is named: a softmax over a row that is masked completely.

All functions are pure functions of an `ObservedStep`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from amplab.diagnose.observed_step.values import ObservedStep, Value
from amplab.trace import OpRecord

__all__ = ["Blame", "blame", "first_bad_result"]


Kind = Literal["op", "given", "constant", "masked"]


@dataclass(frozen=True)
class Blame:
    """The first non-finite value, and the ops from there to the result.

    Args:
        result: "loss", or "gradient of NAME".
        op: number of the op that wrote the first non-finite value; None if it existed before the step.
        value: the first non-finite value.
        chain: numbers of the ops from there to the result; each reads the output of an earlier one.
        kind: "op" if finite inputs gave a non-finite output; "given" if a tensor was not finite before the step;
            "constant" if a number too large for its dtype became inf; "masked" if a constant -inf became NaN.
    """

    result: str
    op: int | None
    value: Value
    chain: tuple[int, ...]
    kind: Kind

    def records(self, step: ObservedStep) -> tuple[OpRecord, ...]:
        """The records of the chain, without views and casts of values that are already infinite."""
        first = self.op
        return tuple(
            record
            for record in (step.trace.records[number] for number in self.chain)
            if record.index == first or not (record.is_view or record.is_cast)
        )


def blame(step: ObservedStep) -> Blame | None:
    """Return where the first non-finite loss or gradient of a step comes from; None if all are finite."""
    found = first_bad_result(step)
    if found is None:
        return None
    result, place = found
    cause = _causes(step, place)
    begun = sorted((place for place in cause if _begins(step, place)), key=lambda place: _when(step, place))
    kind: Kind
    accidents = [place for place in begun if not _is_written_so(step, place)]
    if accidents:
        first = accidents[0]
        kind = "given" if step.values[first].op is None else ("constant" if _is_constant(step, first) else "op")
    else:
        born = [place for place in cause if _makes_nan(step, place)]
        first, kind = min(born or begun or [place], key=lambda place: _when(step, place)), "masked"
    return Blame(result, step.values[first].op, step.values[first], _chain(step, cause, first, place), kind)


def first_bad_result(step: ObservedStep) -> tuple[str, int] | None:
    """Return name and place of the loss if it is not finite, else of the first non-finite gradient in backward."""
    if not step.values[step.loss].summary.is_finite:
        return "loss", step.loss
    for name, place in step.gradients:
        if not step.values[place].summary.is_finite:
            return f"gradient of {name}", place
    return None


def _causes(step: ObservedStep, result: int) -> dict[int, int]:
    """Every value that explains `result`, each with the value that it explains."""
    towards, waiting = {result: result}, [result]
    while waiting:
        place = waiting.pop()
        for earlier in _explaining(step, place):
            if earlier not in towards:
                towards[earlier] = place
                waiting.append(earlier)
    return towards


def _explaining(step: ObservedStep, place: int) -> list[int]:
    bad = [each for each in _sources(step, place) if not step.values[each].summary.is_finite]
    if step.values[place].summary.has_nan:
        nans = [each for each in bad if step.values[each].summary.has_nan]
        return nans or bad
    return bad


def _sources(step: ObservedStep, place: int) -> tuple[int, ...]:
    value = step.values[place]
    return value.parts if value.op is None else step.ops[value.op].inputs


def _begins(step: ObservedStep, place: int) -> bool:
    return not _explaining(step, place)


def _when(step: ObservedStep, place: int) -> int:
    op = step.values[place].op
    return -1 if op is None else op


def _is_written_so(step: ObservedStep, place: int) -> bool:
    """Whether this inf is intended: a number in the code, or a mask of -inf in the batch."""
    value = step.values[place]
    if value.op is None:
        return value.kind != "parameter" and value.summary.lowest == -math.inf and value.summary.highest <= 0
    return any(math.isinf(number) for number in step.ops[value.op].numbers)


def _is_constant(step: ObservedStep, place: int) -> bool:
    """Whether a finite number in the code is too large for the dtype."""
    value = step.values[place]
    largest = torch.finfo(value.summary.dtype).max
    return value.op is not None and any(abs(number) > largest for number in step.ops[value.op].numbers)


def _makes_nan(step: ObservedStep, place: int) -> bool:
    explaining = [step.values[each].summary for each in _explaining(step, place)]
    return step.values[place].summary.has_nan and not any(each.has_nan for each in explaining)


def _chain(step: ObservedStep, towards: dict[int, int], first: int, result: int) -> tuple[int, ...]:
    ops = list(_ops_on_the_way(step, towards, first, result))
    return tuple(dict.fromkeys(op for op in ops if op is not None))


def _ops_on_the_way(step: ObservedStep, towards: dict[int, int], first: int, result: int) -> Iterator[int | None]:
    place = first
    yield step.values[place].op
    while place != result:
        place = towards[place]
        yield step.values[place].op
