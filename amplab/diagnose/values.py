"""The values of one step: what every op read and wrote, how large it was, and which op had written it.

`observe_step` traces a step with an observer that measures each tensor once and follows it from the op that writes it
to the ops that read it: by its memory, so that views and writes in place are seen through. No tensor is kept.

    trace.records[i]       the op, its module, its phase, its dtypes
    ops[i].inputs          places in `values`: what it read
    values[k].op           the op that wrote it, None for what was there before the step

What the values mean is in `blame` (where inf and NaN come from) and in the files named ``…_rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amplab.diagnose.statistics import MEASURED, Statistics, extremes, read, statistics
from amplab.trace import Trace, trace_step
from amplab.trace.recorder import Event

__all__ = [
    "ObservedStep",
    "OpValues",
    "StepWatcher",
    "Value",
    "measured_in",
    "named_tensors",
    "observe_step",
    "tensors_in",
    "writes_values",
]

_FILLS = frozenset(("masked_fill", "masked_fill_", "fill", "fill_", "full", "full_like", "new_full", "scalar_tensor"))
_ALLOCATES = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_VIEWS = frozenset(("_unsafe_view", "detach", "lift_fresh", "_reshape_alias"))  # beside those that say so
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_unseen_by_engines = torch._C.DisableTorchFunction


@dataclass(frozen=True)
class Value:
    """A tensor as it was at one moment.

    Args:
        statistics: how large its elements were.
        op: number of the op that wrote it; None for what no op of the step wrote.
        name: of a parameter, a buffer or a tensor of the batch; empty for others.
        kind: "parameter", "buffer", "batch", or "" for what an op wrote and for tensors of no known origin.
        parts: places of the values that it is put together from, where it was written piece by piece, or of the one
            that it is a piece of.
    """

    statistics: Statistics
    op: int | None = None
    name: str = ""
    kind: str = ""
    parts: tuple[int, ...] = ()


class OpValues(NamedTuple):
    """What one op read and wrote.

    Args:
        inputs: places in `ObservedStep.values` of the floating-point tensors read, in argument order.
        outputs: of those written.
        numbers: the Python numbers among its arguments that are values (an eps, a fill) rather than sizes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[float, ...]


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
    """

    trace: Trace
    ops: tuple[OpValues, ...]
    values: tuple[Value, ...]
    loss: int
    gradients: tuple[tuple[str, int], ...]
    loss_scale: float

    def inputs(self, op: int) -> list[Value]:
        """The values that an op read."""
        return [self.values[place] for place in self.ops[op].inputs]

    def outputs(self, op: int) -> list[Value]:
        """The values that an op wrote."""
        return [self.values[place] for place in self.ops[op].outputs]


def observe_step(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    casting: AbstractContextManager | None = None,
    loss_scale: float = 1.0,
    batch: Any = None,
    detailed: bool = False,
) -> ObservedStep:
    """Run one forward and backward and measure every tensor in it; the model is left as it was.

    Args:
        model: as `trace_step` takes it.
        loss_fn: as there: runs the forward on a batch of its own and returns the loss.
        casting: context in which forward and backward run; the caller's own by default.
        loss_scale: what the loss is multiplied by before backward.
        batch: the tensors of the batch, in any nesting of lists, tuples and dicts, to have them by name.
        detailed: count zeros, subnormals, inf and NaN too, instead of smallest and largest alone.

    Raises:
        As `trace_step`.

    Sync: one, at the end.
    """
    watcher = StepWatcher(named_tensors(model, batch), statistics if detailed else extremes)

    def noted() -> Tensor:
        loss = loss_fn()
        if isinstance(loss, Tensor):
            with _unseen_by_engines():
                watcher.note_loss(loss)
        return loss

    trace = trace_step(model, noted, casting=casting or nullcontext(), loss_scale=loss_scale, observer=watcher)
    return watcher.observed(trace, loss_scale)


def tensors_in(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested batch with a name each: `batch`, `batch[0]`, `batch['x']`."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_in(value, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from tensors_in(value, f"{path}[{place}]")


class _Named(NamedTuple):
    name: str
    kind: str


def named_tensors(model: nn.Module, batch: Any) -> dict[int, _Named]:
    """Memory -> what lies in it."""
    found = {_memory(tensor): _Named(name, "batch") for name, tensor in tensors_in(batch)}
    found |= {_memory(tensor): _Named(name, "buffer") for name, tensor in model.named_buffers()}
    found |= {_memory(tensor): _Named(name, "parameter") for name, tensor in model.named_parameters()}
    found.pop(0, None)  # tensors without elements
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


@dataclass
class _Memory:
    """What is known of one storage: values by region since the last write, and those that were there before."""

    regions: dict[tuple[int, int, torch.dtype], int] = field(default_factory=dict)
    before: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.before, *self.regions.values())))


class StepWatcher:
    """The observer of `observe_step`; see `amplab.trace.recorder.Observer`."""

    def __init__(self, named: dict[int, _Named], measure: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self._named, self._measure = named, measure
        self._measured: list[tuple[Tensor, ...]] = []
        self._made: list[tuple[int | None, _Named, tuple[int, ...], torch.dtype, int]] = []
        self._memories: dict[int, _Memory] = {}
        self._ops: list[OpValues] = []
        self._gradients: list[tuple[str, int]] = []
        self._loss: int | None = None

    def before(self, overload: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Measure what an op will read and has not been measured."""
        allocates = overload.overloadpacket.__name__ in _ALLOCATES
        given = (*args, *kwargs.values())
        inputs = () if allocates else tuple(self._read(each) for each in measured_in(given))
        return inputs, _numbers(overload, given)

    def after(self, seen: Any, event: Event, result: Any) -> None:
        """Measure what it wrote."""
        inputs, numbers = seen
        name = event.overload.overloadpacket.__name__
        tensors = measured_in((result,))
        if name in _ALLOCATES:
            for tensor in tensors:
                self._memories[_memory(tensor)] = _Memory()
            outputs: tuple[int, ...] = ()
        elif event.overload.is_view or name in _VIEWS:
            viewed = [self._view(tensor, inputs) for tensor in tensors]
            outputs = tuple(place for place in viewed if place is not None)
        else:
            outputs = tuple(self._write(tensor, len(self._ops)) for tensor in tensors)
        place = event.place
        if place.node == _ACCUMULATES and place.parameter and (outputs or inputs):
            self._gradients.append((place.parameter, (outputs or inputs)[-1]))
        self._ops.append(OpValues(inputs, outputs, numbers))

    def note_loss(self, loss: Tensor) -> None:
        """Remember which value the loss is."""
        known = self._memories.get(_memory(loss))
        if known is not None and known.all:
            self._loss = known.regions.get(_region(loss), known.all[-1])

    def observed(self, trace: Trace, loss_scale: float) -> ObservedStep:
        """Read every measure, and put it beside the trace's records. Sync: one."""
        measured = read(self._measured, [(dtype, numel) for *_, dtype, numel in self._made])
        values = tuple(
            Value(statistics, op, named.name, named.kind, parts)
            for statistics, (op, named, parts, _, _) in zip(measured, self._made, strict=True)
        )
        gradients = tuple(dict(self._gradients).items())  # the last one counts: what was accumulated
        return ObservedStep(trace, tuple(self._ops), values, self._loss or 0, gradients, loss_scale)

    def _read(self, tensor: Tensor) -> int:
        known = self._memories.setdefault(_memory(tensor), _Memory())
        region = _region(tensor)
        if region not in known.regions:
            named = self._named.get(_memory(tensor), _UNNAMED) if not known.all else _UNNAMED
            known.regions[region] = self._add(tensor, None, named, known.all)
        return known.regions[region]

    def _view(self, tensor: Tensor, inputs: tuple[int, ...]) -> int | None:
        """A view of all of what was read is the same value; one of a piece is measured when it is read."""
        known = self._memories.get(_memory(tensor))
        whole = len(inputs) == 1 and tensor.numel() >= self._made[inputs[0]][-1]
        if known is None or not whole:
            return None
        return known.regions.setdefault(_region(tensor), inputs[0])

    def _write(self, tensor: Tensor, op: int) -> int:
        place = self._add(tensor, op, _UNNAMED, ())
        memory, region = _memory(tensor), _region(tensor)
        covers = tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
        known = self._memories.get(memory)
        before = () if covers or known is None else known.all
        self._memories[memory] = _Memory({region: place}, before)
        return place

    def _add(self, tensor: Tensor, op: int | None, named: _Named, parts: tuple[int, ...]) -> int:
        self._measured.append(self._measure(tensor))
        self._made.append((op, named, parts, tensor.dtype, tensor.numel()))
        return len(self._made) - 1


_UNNAMED = _Named("", "")


def measured_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an op that are measured, in order."""
    return [each for each in _flat(values) if _is_measured(each)]


def writes_values(overload: torch._ops.OpOverload) -> bool:
    """Whether an op writes values of its own: it is no view, and does not only allocate memory."""
    name = overload.overloadpacket.__name__
    return not (overload.is_view or name in _VIEWS or name in _ALLOCATES)


def _is_measured(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in MEASURED and value.layout is torch.strided and value.numel() > 0


def _region(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.storage_offset(), tensor.numel(), tensor.dtype


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The items of `values` and of the lists among them; a sparse tensor by the elements that it holds."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            sparse = isinstance(value, Tensor) and value.layout is torch.sparse_coo
            yield value._values() if sparse else value


def _numbers(overload: torch._ops.OpOverload, given: tuple) -> tuple[float, ...]:
    """Floats are values; so are whole numbers where the op is elementwise or fills. Elsewhere they are sizes."""
    counts = torch.Tag.pointwise in overload.tags or overload.overloadpacket.__name__ in _FILLS
    kinds = (float, int) if counts else (float,)
    return tuple(float(each) for each in given if isinstance(each, kinds) and not isinstance(each, bool))
