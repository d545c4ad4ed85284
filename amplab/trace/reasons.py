"""Make records of events: the name of each op, whether it is a cast or a view, and the reason for its dtypes.

All functions are pure functions of a step's events.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies import CastPolicy
from amplab.trace.engines import REQUESTS_DTYPE, TORCH_AUTOCAST
from amplab.trace.lazy_tuple import LazyTuple
from amplab.trace.recorder import Event, Place
from amplab.trace.records import OpRecord, TensorInfo

__all__ = ["change_of_dtype", "is_view", "record_of", "records_of", "lazy_records_of"]

SCALE_LOSS = "scale_loss"
_ALLOCATES = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view")
)
_ADDS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))
_PROMOTING = (CastPolicy.PROMOTE, CastPolicy.SEQUENCE_PROMOTE, CastPolicy.MATCH_SELF)
_GRADIENTS_OF_CASTS = ("ToCopyBackward", "CopyBackwards")


def records_of(events: Iterable[Event]) -> tuple[OpRecord, ...]:
    """Return the records of a step's events, in order."""
    seen = tuple(events)
    records: list[OpRecord] = []
    for index in range(len(seen)):
        records.append(record_of(seen, index, records))
    return tuple(records)


def lazy_records_of(events: Iterable[Event]) -> Sequence[OpRecord]:
    """Return the same records, each made when it is first read."""
    seen = tuple(events)
    return LazyTuple(len(seen), lambda records, index: record_of(seen, index, records))


def record_of(events: Sequence[Event], index: int, records: Sequence[OpRecord]) -> OpRecord:
    """Return the record of one event.

    Args:
        events: the events of a step.
        index: index of the event, and of its record.
        records: the records so far, among them that of the event's forward op.
    """
    event = events[index]
    place = event.place
    origin = _origin(place, records)
    change = change_of_dtype(event)
    inner = change is not None and _is_inside_an_op(place, origin)
    cast = None if inner else change
    return OpRecord(
        index=index,
        op="cast" if cast else _op(event, origin),
        aten=_aten_name(event.overload),
        phase="backward" if place.backward else "forward",
        module=_module(place, origin),
        inputs=event.inputs,
        outputs=event.outputs,
        reason=_reason(event, cast is not None, origin, lambda: _follows_a_cast(events, index, records), events),
        is_cast=cast is not None,
        cast_bytes=sum(info.nbytes for info in cast or ()),
        note=_note(event, inner),
        is_view=is_view(event.overload),
        line=place.line or (origin.line if origin is not None else None),
        parameter=place.parameter or event.casts,
        from_cache=event.from_cache,
    )


def _origin(place: Place, records: Sequence[OpRecord]) -> OpRecord | None:
    return None if place.origin is None else records[place.origin]


def _follows_a_cast(events: Sequence[Event], index: int, records: Sequence[OpRecord]) -> bool:
    """Whether the event before is a cast; its record may not exist yet."""
    if index == 0:
        return False
    event = events[index - 1]
    return change_of_dtype(event) is not None and not _is_inside_an_op(event.place, _origin(event.place, records))


def change_of_dtype(event: Event) -> tuple[TensorInfo, TensorInfo] | None:
    """Return the tensor read and the tensor written if `event` only changes a floating-point dtype, else None."""
    name = event.overload.overloadpacket.__name__
    if name == "_to_copy":
        source, target = event.inputs[0], event.outputs[0]
    elif name == "copy_" and len(event.inputs) == 2:
        target, source = event.inputs
    else:
        return None
    if source.dtype == target.dtype or not (source.dtype.is_floating_point and target.dtype.is_floating_point):
        return None
    return source, target


def _is_inside_an_op(place: Place, origin: OpRecord | None) -> bool:
    """Whether a change of dtype is part of how torch computes an op, such as attention on the CPU."""
    if _is_of_autograd(place):
        return place.node.startswith(_GRADIENTS_OF_CASTS) and origin is not None and not origin.is_cast
    if not place.call or place.call in REQUESTS_DTYPE or place.call == SCALE_LOSS:
        return False
    return place.table != TORCH_AUTOCAST if place.decision is None else place.decision.kind == "op"


def _op(event: Event, origin: OpRecord | None) -> str:
    place = event.place
    if _is_simulated_rounding(event):
        return "round_to_format"
    if _accumulates(event):
        return "accumulate_grad"
    if _is_seed(place):
        return "backward"
    if place.call:
        return place.call
    return origin.op if origin is not None else event.overload.overloadpacket.__name__.lstrip("_")


def _is_simulated_rounding(event: Event) -> bool:
    return event.overload is torch.ops.amplab.round_to_format.default


def _module(place: Place, origin: OpRecord | None) -> str:
    if place.parameter:
        return place.parameter.rpartition(".")[0]
    return origin.module if origin is not None else place.module


def _reason(
    event: Event,
    is_cast: bool,
    origin: OpRecord | None,
    follows_a_cast: Callable[[], bool],
    events: Sequence[Event],
) -> str:
    if _is_simulated_rounding(event):
        return "simulated format: the gradient is rounded, too" if event.place.backward else _cast_reason(event)
    if _is_of_autograd(event.place):
        return _autograd_reason(event, is_cast, origin)
    if event.place.call == SCALE_LOSS:
        return "the loss is scaled in float32, so that small gradients stay in the range of float16"
    if is_cast:
        return _cast_reason(event)
    if is_view(event.overload):
        return "a view: computes nothing"
    return _policy_reason(event, follows_a_cast, events)


def _policy_reason(event: Event, follows_a_cast: Callable[[], bool], events: Sequence[Event]) -> str:
    """Why an op that Python code called has its dtypes."""
    place, decision = event.place, event.place.decision
    dtypes = list(dict.fromkeys(info.dtype_name for info in event.inputs if info.dtype.is_floating_point))
    if decision is not None and decision.rule is not None and decision.rule.by_user:
        return decision.reason
    if decision is not None and decision.rule is not None:
        agreed = decision.rule.cast in _PROMOTING and len(dtypes) == 1 and not follows_a_cast()
        why = f"{decision.op}: its arguments are already {dtypes[0]}" if agreed else decision.reason
        return _with_module_rule(place, f"{decision.rule.cast.value} list, {why}")
    if not dtypes:
        return "reads no floating-point tensor"
    if place.table == TORCH_AUTOCAST:
        listed = "under torch.autocast"
    elif place.rule and not place.table:
        listed = "no casts"
    else:
        listed = "in no list" if place.table else "no op list applies"
    if len(dtypes) > 1 and torch.Tag.pointwise in event.overload.tags:
        promoted = f"{listed}: torch promotes {' and '.join(dtypes)} to {event.outputs[0].dtype_name}"
        return _with_module_rule(place, promoted)
    cause = "" if place.rule else _cause(event, events)
    if cause and not place.table:
        return cause  # without lists the cause is the whole reason
    return _with_module_rule(place, f"{listed}: {cause or 'runs in its input dtype'}")


def _cause(event: Event, events: Sequence[Event]) -> str:
    """Say where the input of an op on no list got its dtype; empty for float32 that nothing has cast."""
    dtype = event.outputs[0] if event.outputs else None
    if dtype is None or not dtype.dtype.is_floating_point:
        return ""
    source = None if event.source is None else events[event.source]
    hook = "" if source is None or change_of_dtype(source) is None else _given(source)
    is_low = dtype.dtype in LOW_PRECISION_DTYPES
    if event.weight and is_low:
        return f"runs in {dtype.dtype_name}, the dtype of the weights of {_owner(event)}" + (
            f"; {hook}" if hook else ""
        )
    if hook:
        return f"runs in its input dtype: {hook}"
    if source is None or not is_low:
        return ""
    root = _root(source, events)
    weights = f"; the weights of {_owner(root)} are {dtype.dtype_name}" if root.weight else ""
    return f"runs in its input dtype, {dtype.dtype_name} from {source.place.call or 'an op before'}{weights}"


def _root(event: Event, events: Sequence[Event]) -> Event:
    """Return the event that a dtype goes back to: the first that reads a weight, or that a list decided."""
    while not event.weight and event.source is not None:
        decision = event.place.decision
        if decision is not None and decision.rule is not None:
            break
        event = events[event.source]
    return event


def _owner(event: Event) -> str:
    return event.weight.rpartition(".")[0] or "the model"


def _given(cast: Event) -> str:
    """Say which hook or which call chose a dtype; empty for a cast of an engine."""
    place, dtype = cast.place, cast.outputs[0].dtype_name
    if place.decision is not None and place.decision.kind == "cast":
        return ""
    if place.stage:
        return f"a hook on {place.module} cast its {'input' if place.stage == 'before' else 'output'} to {dtype}"
    return f"the code requested {dtype}: {place.call}" if place.call in REQUESTS_DTYPE else ""


def _with_module_rule(place: Place, reason: str) -> str:
    return f"your rule {place.rule}: {reason}" if place.rule else reason


def _cast_reason(event: Event) -> str:
    place, decision = event.place, event.place.decision
    if decision is not None and decision.kind == "cast" and decision.rule is None:
        return decision.detail  # at the border of a module with a rule
    if place.stage:
        what = "input" if place.stage == "before" else "output"
        return f"a hook on {place.module} casts its {what} to {event.outputs[0].dtype_name}"
    if decision is not None and decision.kind == "cast" and decision.rule is not None:
        listed = "your rule" if decision.rule.by_user else f"{decision.rule.cast.value} list"
        return _with_module_rule(place, f"{decision.detail} for {decision.op}: {listed}")
    if place.call in REQUESTS_DTYPE:
        return f"requested in the code: {place.call}"
    return f"torch.autocast casts for {place.call}" if place.call else "inside torch"


def _is_of_autograd(place: Place) -> bool:
    """Whether autograd itself ran the op, not Python code that it called."""
    return place.backward and not place.recomputed and (not place.call or _is_seed(place) or bool(place.parameter))


def _is_seed(place: Place) -> bool:
    return place.backward and not place.node and not place.recomputed


def _autograd_reason(event: Event, is_cast: bool, origin: OpRecord | None) -> str:
    place = event.place
    if place.parameter:
        return f"autograd adds the gradient into {place.parameter}.grad"
    if _accumulates(event):
        return "autograd adds the gradients of a value used more than once"
    if _is_seed(place):
        return "start of backward: the gradient of the loss is 1"
    if origin is None:
        return f"autograd: {place.node}"
    if is_cast and not origin.is_cast:
        return f"autograd casts the gradient to the input dtype of {origin.op} #{origin.index}"
    return f"gradient of {origin.op} #{origin.index}"


def _accumulates(event: Event) -> bool:
    """Whether autograd itself adds gradients; no node of torch calls a plain add on its gradients."""
    place = event.place
    adds_fan_in = place.node and not place.call and event.overload in _ADDS
    return bool(place.parameter or adds_fan_in)


def _note(event: Event, inner: bool) -> str:
    place = event.place
    notes = (
        "fp32 accumulate, rounded once" if event.accumulated else "",
        "inside the op" if inner else "",
        "recomputed for backward" if place.recomputed else "",
        f"in the backward of {place.function}" if place.function and place.call else "",
        "in a hook on a gradient" if place.node and place.call and not place.function and not place.recomputed else "",
    )
    return "; ".join(filter(None, notes))


_aten_name = functools.cache(str)


@functools.cache
def is_view(overload: torch._ops.OpOverload) -> bool:
    """Return whether `overload` computes and moves nothing: views, in-place shape changes, uninitialized storage."""
    return overload.is_view or torch.Tag.inplace_view in overload.tags or overload.overloadpacket.__name__ in _ALLOCATES
