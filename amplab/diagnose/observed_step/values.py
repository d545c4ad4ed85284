"""The values of one step: what every op read and wrote, how large it was, and which op had written it.

`observe_step` traces a step with an observer that measures each tensor once and follows it from the op that writes it
to the ops that read it. It follows the memory, so views and in-place writes are resolved. No tensor is kept. Records
and values are created when they are first read, because only a few of a long step are read.

    trace.records[i]       the op, its module, its phase, its dtypes
    ops[i].inputs          places in `values`: what it read
    values[k].op           the op that wrote it, None for what was there before the step
    begun[i]               counts of what it read and wrote, if it made inf or NaN from finite numbers

`blame` finds where inf and NaN come from; `rules` judges the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from amplab.diagnose.observed_step.read_arguments import arguments_read, statistics_updated
from amplab.diagnose.observed_step.tensor_summary import MEASURED, Measurements, TensorSummary, counted
from amplab.formats.stored_values import has_values, stored_values
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.nested_tensors import named_tensors_in, tensors_in
from amplab.trace import Trace
from amplab.trace.argument_checks import check_step
from amplab.trace.dispatch_mode import INTO_GRAD
from amplab.trace.lazy_tuple import LazyTuple
from amplab.trace.reasons import lazy_records_of
from amplab.trace.recorder import Event
from amplab.trace.step import record_step

__all__ = [
    "Begun",
    "NamedMemory",
    "ObservedStep",
    "OpValues",
    "StepWatcher",
    "Value",
    "measured_in",
    "memory_of",
    "named_tensors",
    "observe_step",
    "writes_values",
]

_FILLS = frozenset(("masked_fill", "masked_fill_", "fill", "fill_", "full", "full_like", "new_full", "scalar_tensor"))
_ALLOCATES = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_VIEWS = frozenset(
    ("_unsafe_view", "detach", "lift_fresh", "_reshape_alias")
)  # in addition to those whose schema says so


@dataclass(frozen=True)
class Value:
    """A tensor at one moment.

    Args:
        summary: how large its elements were.
        op: number of the op that wrote it; None if no op of the step did.
        name: of a parameter, a buffer or a tensor of the batch; empty for others.
        kind: "parameter", "buffer", "batch", or "" for the output of an op and for tensors of unknown origin.
        parts: places of the values that it consists of, if it was written in pieces, or of the one that it is a piece
            of.
    """

    summary: TensorSummary
    op: int | None = None
    name: str = ""
    kind: str = ""
    parts: tuple[int, ...] = ()


class OpValues(NamedTuple):
    """What one op read and wrote.

    Args:
        inputs: places in `ObservedStep.values` of the floating-point tensors that the result depends on, in argument
            order.
        outputs: of those written.
        numbers: the Python numbers among its arguments that are values (an eps, a fill) rather than sizes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[float, ...]


class Begun(NamedTuple):
    """Inputs and outputs of an op that made inf or NaN from finite numbers, with counts.

    Args:
        inputs: of the floating-point tensors read, in argument order, counted.
        outputs: of those written.
    """

    inputs: tuple[TensorSummary, ...]
    outputs: tuple[TensorSummary, ...]


@dataclass(frozen=True)
class ObservedStep:
    """One forward and backward with the values of every op.

    Args:
        trace: the ops' records.
        ops: their values, one for each record.
        values: every tensor measured.
        loss: place of the loss in `values`.
        gradients: (parameter name, place in `values`), in the order in which backward reached them.
        loss_scale: what the loss was multiplied by.
        begun: number of an op -> its tensors, for ops on the CPU with finite inputs and a non-finite output. On the CPU
            this is known while the tensors still exist.
    """

    trace: Trace
    ops: tuple[OpValues, ...]
    values: Sequence[Value]
    loss: int
    gradients: tuple[tuple[str, int], ...]
    loss_scale: float
    begun: Mapping[int, Begun] = field(default_factory=dict)

    def inputs(self, op: int) -> list[Value]:
        """The values that an op read."""
        return [self.values[place] for place in self.ops[op].inputs]

    def outputs(self, op: int) -> list[Value]:
        """The values that an op wrote."""
        return [self.values[place] for place in self.ops[op].outputs]


def observe_step(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    casting: AbstractContextManager[Any] | None = None,
    loss_scale: float = 1.0,
    batch: Any = None,
    detailed: bool = False,
) -> ObservedStep:
    """Run one forward and backward and measure every tensor in it; all state is restored.

    Args:
        model: as `trace_step` takes it.
        step: as there: runs the forward on a batch of its own and returns the loss.
        casting: context in which forward and backward run; by default that of the caller.
        loss_scale: what the loss is multiplied by before backward.
        batch: the batch, tensors in nested lists, tuples and dicts, so that they get names.
        detailed: also count zeros, subnormals, inf and NaN; otherwise measure the smallest and largest element only.

    Raises:
        As `trace_step`.

    Sync: one, at the end.
    """
    check_step(model, step, loss_scale, values=True)
    watcher = StepWatcher(named_tensors(model, batch), detailed=detailed)

    def noted() -> Tensor:
        loss = step()
        if isinstance(loss, Tensor):
            with without_function_modes():
                watcher.note_loss(loss)
        return loss

    events = record_step(model, noted, casting=casting or nullcontext(), loss_scale=loss_scale, observer=watcher)
    return watcher.observed(events, loss_scale)


class NamedMemory(NamedTuple):
    """The name and the kind of the tensor in a piece of memory, as in `Value`."""

    name: str
    kind: str


def named_tensors(model: nn.Module, batch: Any) -> dict[int, NamedMemory]:
    """Return memory -> the tensor in it, for parameters, buffers and the batch."""
    found = {memory_of(tensor): NamedMemory(name, "batch") for name, tensor in named_tensors_in(batch, "batch")}
    found |= {memory_of(tensor): NamedMemory(name, "buffer") for name, tensor in model.named_buffers()}
    found |= {memory_of(tensor): NamedMemory(name, "parameter") for name, tensor in model.named_parameters()}
    found.pop(0, None)  # tensors without elements
    return found


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor; 0 for a tensor without its own."""
    has_its_own = tensor.layout is torch.strided and not tensor._is_zerotensor()
    return tensor.untyped_storage().data_ptr() if has_its_own else 0


@dataclass
class _Memory:
    """The values in one storage: by region since the last write, and those written before."""

    regions: dict[tuple[int, int, torch.dtype], int] = field(default_factory=dict)
    before: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.before, *self.regions.values())))


class StepWatcher:
    """The observer of `observe_step`; see `amplab.trace.recorder.Observer`.

    Args:
        named: memory -> tensor, see `named_tensors`.
        detailed: count zeros, subnormals, inf and NaN of every tensor too.
    """

    def __init__(self, named: dict[int, NamedMemory], *, detailed: bool = False) -> None:
        self._named, self._detailed = named, detailed
        self._measured = Measurements()
        self._made: list[tuple[int | None, NamedMemory, tuple[int, ...]]] = []
        self._memories: dict[int, _Memory] = {}
        self._ops: list[OpValues] = []
        self._begun: dict[int, Begun] = {}
        self._gradients: list[tuple[str, int]] = []
        self._loss: int | None = None

    def before(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure the inputs of an op that have not been measured yet."""
        given = (*args, *kwargs.values()) if kwargs else args
        if _kind(overload) == "allocates":
            return (), (), given
        tensors = measured_in(arguments_read(overload, args, kwargs))
        for updated in measured_in(statistics_updated(overload, args)):
            self._read(updated)  # a norm in evaluation may read them later in the step, as they were at its start
        # An in-place op overwrites its input before its output shows that counts are needed.
        read = [_counted(each) if each.is_cpu else each for each in tensors] if _overwrites(overload) else tensors
        return tuple(map(self._read, tensors)), read, given

    def after(self, seen: Any, event: Event, result: Any) -> None:
        """Measure the outputs of the op."""
        inputs, read, given = seen
        kind, tensors = _kind(event.overload), measured_in((result,))
        outputs: tuple[int, ...] = ()
        if kind == "allocates":
            for tensor in tensors:
                self._memories[memory_of(tensor)] = _Memory()
        elif kind == "view":
            viewed = [self._view(tensor, inputs) for tensor in tensors]
            outputs = tuple(place for place in viewed if place is not None)
        else:
            outputs = tuple(self._write(tensor, len(self._ops)) for tensor in tensors)
            if self._begins(inputs, outputs):
                self._begun[len(self._ops)] = Begun(tuple(map(_counted, read)), tuple(map(_counted, tensors)))
        place = event.place
        if place.node == INTO_GRAD and place.parameter and (outputs or inputs):
            self._gradients.append((place.parameter, (outputs or inputs)[-1]))
        self._ops.append(OpValues(inputs, outputs, _numbers(event.overload, given)))

    def note_loss(self, loss: Tensor) -> None:
        """Remember which value the loss is."""
        known = self._memories.get(memory_of(loss))
        if known is not None and known.all:
            self._loss = known.regions.get(_region(loss), known.all[-1])

    def observed(self, events: Sequence[Event], loss_scale: float) -> ObservedStep:
        """Return the observed step with all measurements on the host. Sync: one if tensors are on a device."""
        self._measured.settle()
        gradients = tuple(dict(self._gradients).items())  # the last one counts: what was accumulated
        values = LazyTuple(len(self._made), lambda _, place: self._value(place))
        trace = Trace(lazy_records_of(events))
        ops = tuple(self._ops[: len(events)])
        return ObservedStep(trace, ops, values, self._loss_place(events), gradients, loss_scale, self._begun)

    def _loss_place(self, events: Sequence[Event]) -> int:
        """Return the place of the loss; if the caller did not name it, of the last scalar before the first backward."""
        if self._loss is not None or not events:
            return self._loss or 0
        forward = takewhile(lambda pair: not pair[0].place.backward, zip(events, self._ops, strict=False))
        scalars = [place for _, op in forward for place in op.outputs if self._measured.kind(place)[1] == 1]
        return scalars[-1] if scalars else 0

    def _value(self, place: int) -> Value:
        op, named, parts = self._made[place]
        return Value(self._measured[place], op, named.name, named.kind, parts)

    def _begins(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
        """Whether all inputs are finite and an output is not; False if that is not known yet."""
        is_finite = self._measured.is_finite
        return any(is_finite(place) is False for place in outputs) and all(map(is_finite, inputs))

    def _read(self, tensor: Tensor) -> int:
        memory, region = memory_of(tensor), _region(tensor)
        known = self._memories.setdefault(memory, _Memory())
        place = known.regions.get(region)
        if place is None:
            named = self._named.get(memory, _UNNAMED) if not known.all else _UNNAMED
            place = known.regions[region] = self._add(tensor, None, named, known.all)
        return place

    def _view(self, tensor: Tensor, inputs: tuple[int, ...]) -> int | None:
        """A view of the whole input is the same value; a view of a piece is measured when it is read."""
        known = self._memories.get(memory_of(tensor))
        whole = len(inputs) == 1 and tensor.numel() >= self._measured.kind(inputs[0])[1]
        if known is None or not whole:
            return None
        return known.regions.setdefault(_region(tensor), inputs[0])

    def _write(self, tensor: Tensor, op: int) -> int:
        place = self._add(tensor, op, _UNNAMED, ())
        memory, region = memory_of(tensor), _region(tensor)
        covers = tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
        known = self._memories.get(memory)
        before = () if covers or known is None else known.all
        self._memories[memory] = _Memory({region: place}, before)
        return place

    def _add(self, tensor: Tensor, op: int | None, named: NamedMemory, parts: tuple[int, ...]) -> int:
        self._made.append((op, named, parts))
        return self._measured.add(tensor, detailed=self._detailed)


_UNNAMED = NamedMemory("", "")


def measured_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an op that are measured, in order; a ZeroTensor needs no measuring."""
    found = []
    for value in tensors_in(tuple(values)):
        each = value._values() if value.layout is torch.sparse_coo else value  # the elements that it holds
        is_dense = each.dtype in MEASURED and each.layout is torch.strided and each.numel() > 0
        if is_dense and has_values(each) and not each._is_zerotensor():
            found.append(stored_values(each))
    return found


def writes_values(overload: torch._ops.OpOverload) -> bool:
    """Whether an op writes values: it is not a view, and does more than allocate memory."""
    return _kind(overload) == "writes"


@cache
def _kind(overload: torch._ops.OpOverload) -> Literal["allocates", "view", "writes"]:
    name = overload.overloadpacket.__name__
    if name in _ALLOCATES:
        return "allocates"
    return "view" if overload.is_view or name in _VIEWS else "writes"


def _region(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return int(tensor.storage_offset()), tensor.numel(), tensor.dtype


@cache
def _overwrites(overload: torch._ops.OpOverload) -> bool:
    return overload._schema.is_mutable


def _counted(tensor: Tensor | TensorSummary) -> TensorSummary:
    """The summary of a tensor with counts; it may have been taken before the tensor was overwritten."""
    return tensor if isinstance(tensor, TensorSummary) else counted([tensor])[0]


def _numbers(overload: torch._ops.OpOverload, given: tuple[Any, ...]) -> tuple[float, ...]:
    """Floats are values; integers are values in elementwise ops and fills, and sizes elsewhere."""
    kinds = _kinds_of_numbers(overload)
    return tuple(float(each) for each in given if type(each) in kinds)


@cache
def _kinds_of_numbers(overload: torch._ops.OpOverload) -> tuple[type, ...]:
    counts = torch.Tag.pointwise in overload.tags or overload.overloadpacket.__name__ in _FILLS
    return (float, int) if counts else (float,)
