"""Walk an observed step from op to op: who wrote what an op read, and who read what it wrote. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from amplab.diagnose.finding import Place
from amplab.diagnose.observed_step.values import ObservedStep
from amplab.trace import OpRecord

__all__ = [
    "computes_in_half",
    "forward_ops",
    "line_of",
    "place_of",
    "readers_by_op",
    "short_name",
    "squares",
    "upstream",
    "nearest_constant",
    "writers",
]


def short_name(record: OpRecord) -> str:
    """The aten op without namespace, overload and trailing underscore: `log`, `addmm`.

    >>> short_name(OpRecord(0, "log", "aten.log_.default", "forward", "", (), (), ""))
    'log'
    """
    return record.aten.split(".")[1].strip("_")


def forward_ops(step: ObservedStep) -> Iterator[OpRecord]:
    """The ops of the forward that write values of their own."""
    for record in step.trace.records:
        if record.phase == "forward" and not record.is_view and step.ops[record.index].outputs:
            yield record


def computes_in_half(step: ObservedStep, op: int) -> bool:
    """Whether an op has inputs, and all its inputs and outputs are float16."""
    values = (*step.inputs(op), *step.outputs(op))
    return bool(step.inputs(op)) and all(value.summary.is_half for value in values)


def writers(step: ObservedStep, place: int) -> Iterator[int]:
    """The ops that wrote the value at `place`, or the pieces it consists of."""
    waiting, seen = [place], {place}
    while waiting:
        value = step.values[waiting.pop()]
        if value.op is not None:
            yield value.op
        waiting += [part for part in value.parts if part not in seen]
        seen.update(value.parts)


def line_of(record: OpRecord) -> str:
    """The line of the user's code behind an op, `model.py:12`; empty where there is none."""
    return str(record.line) if record.line is not None else ""


def place_of(record: OpRecord) -> Place:
    """The op, module and line of a record, as fields of a `Finding`."""
    return {"op": record.op, "module": record.module, "line": line_of(record)}


def upstream(step: ObservedStep, op: int, depth: int) -> Iterator[int]:
    """The ops that led to `op`, nearest first, at most `depth` ops away; `op` itself is not among them."""
    level, seen = [op], {op}
    for _ in range(depth):
        found = [each for number in level for place in step.ops[number].inputs for each in writers(step, place)]
        level = [each for each in dict.fromkeys(found) if each not in seen]
        seen.update(level)
        yield from level


def readers_by_op(step: ObservedStep) -> dict[int, list[int]]:
    """Op -> the ops that read what it wrote, in order."""
    readers: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(step.ops):
        for place in op.inputs:
            for writer in writers(step, place):
                if writer != number and number not in readers[writer]:
                    readers[writer].append(number)
    return readers


def nearest_constant(
    step: ObservedStep, op: int, constant_of: Callable[[int], float | None]
) -> tuple[int, float] | None:
    """The nearest op for which `constant_of` returns a constant, `op` itself or up to four ops before it."""
    for number in (op, *upstream(step, op, 4)):
        constant = constant_of(number)
        if constant is not None:
            return number, constant
    return None


def squares(step: ObservedStep, op: int) -> bool:
    """Whether an op multiplies a tensor by itself."""
    name, (places, _, numbers) = short_name(step.trace.records[op]), step.ops[op]
    if name == "mul":
        return len(places) == 2 and places[0] == places[1]
    return name == "square" or (name == "pow" and 2.0 in numbers)
