"""`Recorder`: one event for each op of a step, forward and backward, without keeping tensors.

Two modes are used. A dispatch mode intercepts every aten op, including those of autograd's backward. A function mode
records the call in the model's code that the op belongs to (`linear` for `t` and `addmm`). Sequence numbers of autograd
connect a backward op with its forward op: just before a forward op is dispatched, autograd creates its node with a
number, which the event stores; when the gradient is computed, that node is the current one.

Reference: torch.utils._python_dispatch.TorchDispatchMode, torch.overrides.TorchFunctionMode,
torch._C._autograd._get_sequence_nr, torch._C._current_autograd_node.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from amplab.policies import (
    Decision,
    Explanation,
    accumulate_fp32,
    cpu_half,
    cpu_half_mode,
    explaining,
)
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.half_on_cpu import is_product
from amplab.policies.modules.module_regions import module_rule_of_op
from amplab.policies.signals import is_interrupt
from amplab.trace.as_found import Undo
from amplab.trace.calls import Calls
from amplab.trace.dispatch_mode import INTO_GRAD, DispatchMode, run_op
from amplab.trace.dtype_sources import DtypeSources
from amplab.trace.engines import NO_ENGINE, REQUESTS_DTYPE, TORCH_AUTOCAST, current_table
from amplab.trace.half_products import HalfProducts
from amplab.trace.kept_tensors import KeptTensors
from amplab.trace.lines import CodeLine
from amplab.trace.modules import ModuleStack, Stage
from amplab.trace.records import TensorInfo, shape_of
from amplab.trace.weight_casts import WeightCasts

__all__ = ["Event", "Observer", "Place", "Recorder"]

T = TypeVar("T")
_current_node = torch._C._current_autograd_node
_next_sequence_number = torch._C._autograd._get_sequence_nr
_CAST = torch.ops.aten._to_copy.default
_CACHES_NOTHING = "", ()
_NO_NODE = "", "", None, ""
_NO_SOURCE = None, ""
_IN_FORWARD = False, False, *_NO_NODE
_LISTS = list, tuple


class Place(NamedTuple):
    """The state of a step when an op ran.

    Args:
        call: the Python call that the op belongs to (`linear`); empty for ops that C++ runs by itself.
        module: path of the module whose forward is running.
        stage: `before` or `after` while a hook around that forward runs, else empty.
        table: the current op table, see `engines.current_table`.
        decision: the engine's decision about the op, or None.
        rule: the user's module rule in force, e.g. `head=float32 in head`, or empty.
        backward: True while autograd computes gradients.
        recomputed: True while a checkpointed block runs again for its backward.
        node: name of the current autograd node; empty in forward.
        function: name of the custom `autograd.Function` whose backward is running, or empty.
        origin: number of the forward event that the node belongs to, or None.
        parameter: name of the parameter whose gradient is accumulated, or empty.
        line: the line of the user's code that made the call; None for ops that C++ runs by itself.
    """

    call: str
    module: str
    stage: Stage
    table: str | None
    decision: Decision | None
    rule: str = ""
    backward: bool = False
    recomputed: bool = False
    node: str = ""
    function: str = ""
    origin: int | None = None
    parameter: str = ""
    line: CodeLine | None = None


class Event(NamedTuple):
    """One op as it ran; `reasons.record_of` makes its record.

    Args:
        overload: the aten op.
        place: the state of the step.
        inputs: tensors read, in argument order.
        outputs: tensors returned.
        accumulated: True if a float16 product was computed in float32 and rounded once.
        casts: name of the parameter that an engine casts here, or empty.
        from_cache: numbers of the events whose casts of weights the call got from the weight cache.
        source: number of the event that gave its input the dtype of its output, in forward; else None.
        weight: name of a parameter in the dtype of its output that it reads, in forward; else empty.
    """

    overload: torch._ops.OpOverload
    place: Place
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    accumulated: bool
    casts: str = ""
    from_cache: tuple[int, ...] = ()
    source: int | None = None
    weight: str = ""


class Observer(Protocol):
    """Reads the tensors of every recorded op; events keep none."""

    def before(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read the arguments of an op before it may overwrite them; the result is passed to `after`."""

    def after(self, seen: Any, event: Event, result: Any) -> None:
        """Read what the op wrote; `event.place.origin` is an index into the events passed here."""


class Recorder:
    """Collect the events of one step of `model`.

    Args:
        model: the model, which names modules and parameters.
        observer: reads the tensors of every op, outside of this recorder's modes; None to read none.
        kept: counts the bytes saved for backward; None to count none.
        outlives: whether the ops are those of a program that goes on if one cannot be recorded.

    Attributes:
        failure: of a recorder that `outlives`, why it records no more.

    Inside `recording()`, use `calls` around the model's code, `calls.named(...)` around ops that belong to no call, and
    `calls.in_backward()` around backward.
    """

    def __init__(
        self,
        model: nn.Module,
        observer: Observer | None = None,
        kept: KeptTensors | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.failure: Exception | None = None
        self._outlives = outlives
        self._observer, self._kept = observer, kept
        self._weight_casts = WeightCasts()
        self._modules = ModuleStack(model)
        self.calls = Calls(self._modules)
        self._parameters = self._modules.parameter_names()
        self._sources = DtypeSources(model, self._parameters)
        self._infos: dict[tuple[torch.dtype, tuple[int, ...]], TensorInfo] = {}
        self._numbers: list[int] = []  # sequence numbers that forward events took, ascending
        self._takers: list[int] = []  # the events that took them
        self._first_number = 0
        self._accumulates = False
        self._products: HalfProducts | None = None
        self._explanation = Explanation()
        self._last_place: Place | None = None
        self._last_node: tuple[str, int] | None = None
        self._last_told: tuple[str, str, int | None, str] = _NO_NODE

    @contextmanager
    def recording(self, *, as_it_runs: bool = False) -> Iterator[None]:
        """Record every op of the block.

        Inside it engines run float16 products natively, and `_record` computes them as `cpu_half_mode()` says.

        Args:
            as_it_runs: let engines run float16 products as they do without a recorder, so that gradients of gradients
                have the same bits, and only record ops on halves. The bytes saved for backward are those in float32.
        """
        self._first_number = _next_sequence_number()
        self._accumulates = not as_it_runs and cpu_half_mode() == "fp32_accumulate"
        self._products = HalfProducts() if as_it_runs else None
        kept = self._kept.following(self._keeper, self._weight_casts) if self._kept else nullcontext()
        # No ExitStack: only scopes that a `with` statement enters end after an interrupt of their exit.
        with (
            nullcontext() if as_it_runs else cpu_half("native"),
            explaining() as self._explanation,
            self._modules.following(),
            kept,
            Undo() as undo,
        ):
            undo.enter(_Ops(self._record))
            yield

    def follow(self, undo: Undo) -> None:
        """Record every op until `undo` ends, and treat those of this thread as the model's code."""
        undo.enter_block(partial(self.recording, as_it_runs=True))
        undo.add(self.calls.__exit__)
        self.calls.__enter__()

    def _record(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbered = len(self._numbers)
        place = self._place()
        if self._products is not None and self.failure is None:
            node = self._numbers[-1] if len(self._numbers) > numbered else None
            return self._record_as_it_runs(self._products, overload, args, kwargs, place, node)
        before = self._safely(self._before, overload, args, kwargs)
        result = NotImplemented
        if self._accumulates and self._under_engine(place):
            result = accumulate_fp32(overload, args, kwargs)
        accumulated = result is not NotImplemented
        if not accumulated:
            result = run_op(overload, args, kwargs)
        self._note(overload, (args, kwargs), place, accumulated, before, result)
        return result

    def _record_as_it_runs(
        self,
        products: HalfProducts,
        overload: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place,
        number: int | None,
    ) -> Any:
        """Run an op and record it; one inside a float16 product is recorded as an op on halves.

        Args:
            products: the float16 products of the step.
            overload, args, kwargs: the op.
            place: the state of the step.
            number: the sequence number that the op's autograd node took, if it has one.
        """
        running = None if place.recomputed or not place.node else _current_node()
        node = None if running is None else running._sequence_nr()
        if self._safely(products.widens, overload, args, kwargs, self._explanation.accumulates, node):
            wide = run_op(overload, args, kwargs)
            self._safely(products.widened, args[0], wide)
            return wide
        shown = self._safely(products.shown, args, kwargs) or (args, kwargs)
        is_inside = shown[0] is not args
        if is_inside and products.rounds(overload, args, kwargs):
            half = run_op(overload, args, kwargs)
            rounded = self._safely(products.rounded, args[0], half, number)
            if rounded is not None and rounded is not half:
                if number is not None:
                    self._takers[-1] = max(0, len(self.events) - 1)  # the node belongs to the op that is rounded
                return rounded
            self._note(overload, shown, place, False, self._safely(self._before, overload, *shown), half)
            return half
        before = self._safely(self._before, overload, *shown)
        result = run_op(overload, args, kwargs)
        seen = self._safely(products.written, overload, shown, result) if is_inside else result
        self._note(overload, shown, place, is_inside and is_product(overload), before, seen)
        return result

    def _note(
        self,
        overload: torch._ops.OpOverload,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        place: Place,
        accumulated: bool,
        before: tuple[tuple[TensorInfo, ...], Any] | None,
        result: Any,
    ) -> None:
        """Append the event of an op that has run, without tensors if these cannot be recorded."""
        count = len(self.events)
        if before is not None:
            self._safely(self._after, overload, *given, place, accumulated, *before, result)
        if len(self.events) == count:  # it failed: what is computed in backward depends on the places of forward
            self.events.append(Event(overload, place, (), (), accumulated, *_CACHES_NOTHING, *_NO_SOURCE))

    def _safely(self, act: Callable[..., T], *given: Any) -> T | None:
        """Do a part of the recording around an op."""
        if self.failure is not None:
            return None
        try:
            return act(*given)
        except Exception as error:
            if not self._outlives or is_interrupt(error):
                raise
            self.failure = error
            return None

    def _before(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[TensorInfo, ...], Any]:
        """Read what an op is given, before it may change that in place."""
        inputs = self._infos_of((*args, *kwargs.values()) if kwargs else args)
        return inputs, self._observer.before(overload, args, kwargs) if self._observer else None

    def _after(
        self,
        overload: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place,
        accumulated: bool,
        inputs: tuple[TensorInfo, ...],
        observed: Any,
        result: Any,
    ) -> None:
        """Make the event of an op."""
        given = (*args, *kwargs.values()) if kwargs else args
        autograds = place.backward and not place.recomputed
        caching = _CACHES_NOTHING if autograds else self._caching(overload, place, args, result)
        outputs = (self._info(result),) if isinstance(result, Tensor) else self._infos_of((result,))
        source = _NO_SOURCE if autograds or not outputs else self._source(given, result, outputs[0].dtype, place)
        event = Event(overload, place, inputs, outputs, accumulated, *caching, *source)
        self.events.append(event)
        if self._observer:
            self._observer.after(observed, event, result)

    def _place(self) -> Place:
        calls, modules, node = self.calls, self._modules, _current_node()
        table = current_table(calls.autocast)
        called = calls.name, modules.path, modules.stage, table, self._explanation.decision, module_rule_of_op()
        if node is None and not calls.in_autograd:
            self._take_number()
            fields = (*called, *_IN_FORWARD, calls.line)
        else:
            if torch.is_grad_enabled():
                self._take_number()  # for a gradient of the gradient, or for a recomputed block
            recomputed = modules.depth > calls.autograd_depth
            at_work = _NO_NODE if node is None or recomputed else self._node_fields(node)
            fields = (*called, True, recomputed, *at_work, calls.line)
        if self._last_place != fields:  # most ops of one call, and of one node, have the same place
            self._last_place = Place._make(fields)
        return self._last_place

    def _node_fields(self, node: torch.autograd.graph.Node) -> tuple[str, str, int | None, str]:
        """The fields of a place that describe an autograd node: node, function, origin and parameter."""
        name = node.name()
        if name == INTO_GRAD:
            variable = node.variable  # type: ignore[attr-defined]  # AccumulateGrad has one
            return name, "", None, self._parameters.get(id(variable), "")
        known = name, node._sequence_nr()
        if self._last_node != known:
            custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            function = name.removesuffix("Backward") if custom else ""
            self._last_node, self._last_told = known, (name, function, self._taker_of(known[1]), "")
        return self._last_told

    def _caching(
        self, overload: torch._ops.OpOverload, place: Place, args: tuple[Any, ...], result: Any
    ) -> tuple[str, tuple[int, ...]]:
        """The parameter that an engine casts in this op, and the casts that its call got from the weight cache."""
        if overload is not _CAST or not _casts_for_an_op(place):
            return "", self._weight_casts.read_from_cache(args, self.calls.count)
        weight = self._parameters.get(id(args[0]), "")
        if weight:
            self._weight_casts.made(len(self.events), result)
        return weight, ()

    def _source(self, given: Any, result: Any, dtype: torch.dtype, place: Place) -> tuple[int | None, str]:
        """Return what gave an op its dtype. A hook or a conversion in the code is passed on to the ops after it."""
        source, weight = self._sources.read(given, dtype)
        decides = weight or (place.decision is not None and place.decision.rule is not None)
        passes = source is not None and not decides and _sets_dtype(self.events[source].place)
        self._sources.written((result,), source if passes and source is not None else len(self.events))
        return source, weight

    def _keeper(self) -> str | None:
        """Path of the module that saves tensors now; None while a block runs again for its backward."""
        again = self._modules.depth > self.calls.autograd_depth and _current_node() is not None
        return None if again else self._modules.path

    def _take_number(self) -> None:
        number = _next_sequence_number() - 1
        if number >= self._first_number and (not self._numbers or number > self._numbers[-1]):
            self._numbers.append(number)
            self._takers.append(len(self.events))

    def _taker_of(self, number: int) -> int | None:
        """The event that took `number`, or the nearest one before it for a node that dispatched no op of its own."""
        place = bisect_right(self._numbers, number)
        return self._takers[place - 1] if place else None

    def _under_engine(self, place: Place) -> bool:
        """Whether an engine decides how a product is computed; for an op of autograd, whether one did in forward."""
        decisive = place if place.call or place.origin is None else self.events[place.origin].place
        return decisive.table not in (NO_ENGINE, TORCH_AUTOCAST)

    def _infos_of(self, values: Iterable[Any]) -> tuple[TensorInfo, ...]:
        known = self._infos  # read here without a call, since this runs twice for each op
        found: list[TensorInfo] = []
        for value in values:
            if isinstance(value, Tensor):
                info = None if value.is_nested else known.get((value.dtype, value.shape))
                found.append(info or self._info(value))
            elif isinstance(value, _LISTS):
                found += [self._info(item) for item in value if isinstance(item, Tensor)]
        return tuple(found)

    def _info(self, tensor: Tensor) -> TensorInfo:
        key = tensor.dtype, shape_of(tensor)
        info = self._infos.get(key)
        if info is None:
            info = self._infos[key] = TensorInfo(*key)
        return info


def _casts_for_an_op(place: Place) -> bool:
    """Whether an engine casts the arguments of an op here, rather than the code itself."""
    if place.decision is not None:
        return place.decision.kind == "cast"
    return place.table == TORCH_AUTOCAST and place.call not in REQUESTS_DTYPE


def _sets_dtype(place: Place) -> bool:
    """Whether a hook or the code itself chose the dtype here."""
    return bool(place.stage) or place.call in REQUESTS_DTYPE


class _Ops(DispatchMode):
    """Pass every op to `record`, which runs it."""

    def __init__(self, record: Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._record = record

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Calls in here are not the model's: they are neither named nor cast.
        with without_function_modes():
            return self._record(func, args, kwargs)
