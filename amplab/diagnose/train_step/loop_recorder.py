"""`LoopRecorder`: records what happens to gradients between backward and the optimizer's step, as a `Rehearsal`.

It follows a step that is rehearsed, or a step of a running loop, which runs once and keeps its results. It runs inside
code of the user: what fails in it is kept in `failure`, and raises nothing there.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from amplab.diagnose.train_step.loop_state import scales_of
from amplab.diagnose.train_step.lost_updates import LostUpdates, ShadowStep
from amplab.diagnose.train_step.masters import model_parameters
from amplab.diagnose.train_step.rehearsal import (
    DroppedGradients,
    EmptyClip,
    GradientWrite,
    MisusedGradients,
    MixedStep,
    Rehearsal,
    SteppedGradient,
    UnsteppedOptimizer,
)
from amplab.diagnose.train_step.schedules import ScheduleWatch
from amplab.diagnose.train_step.weight_averages import WeightAverages
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.formats.stored_values import stored_values
from amplab.policies.nested_tensors import tensors_in
from amplab.policies.signals import DeferredSignals
from amplab.trace.as_found import Undo, remove_hook
from amplab.trace.dispatch_mode import INTO_GRAD, DispatchMode, current_backward, run_op
from amplab.trace.handed_step import Scaler
from amplab.trace.lines import call_of_user_line, user_line
from amplab.trace.optimizer_hooks import observe_steps, seeing_gradients

__all__ = ["LoopRecorder", "norm_of"]

T = TypeVar("T")
_current_node = torch._C._current_autograd_node


@dataclass
class _GradientState:
    """The record of one gradient since the last optimizer step that used it."""

    gradient: Tensor | None = None
    is_zeroed: bool = False  # in place, since the last backward
    is_used: bool = False  # by an op that read it outside of autograd, such as a clone
    unscaled: int = 0  # by how many calls of a scaler, since the last backward
    is_unscaled: bool = False  # by a scaler or by hand
    added_after: int = 0  # backwards that added to it after it was unscaled
    dropped: tuple[int, ...] = ()  # the passes whose gradients were dropped before this one came
    passed: int = -1  # the pass that delivered it
    scales: tuple[float, ...] = ()  # of the backwards that this gradient adds up
    delivered: float = math.nan
    backwards: int = 0
    clipped: float = 1.0
    nonzero: int = 0  # elements that backward delivered and that are not 0

    def is_at(self, address: int) -> bool:
        """Whether what the last backward delivered is still there, at this address; memory is used again."""
        if self.is_zeroed or self.gradient is None or self.gradient.layout is not torch.strided:
            return False
        return self.gradient.data_ptr() == address


class _OtherGradient(NamedTuple):
    """A gradient of something other than a parameter of the model, such as an input that an attack changes."""

    alive: Callable[[], Tensor | None]
    passed: int  # the pass that delivered it


class _Drop(NamedTuple):
    """The gradients of one parameter that were dropped before a step of an optimizer."""

    optimizer: int
    name: str
    passes: tuple[int, ...]  # those that delivered them
    last: int  # the pass whose gradient the step used


class _Touched(NamedTuple):
    """A gradient that an op is about to write to."""

    name: str
    grad: Tensor
    before: float  # its norm
    kept: Tensor | None  # its values, where the op adds


_Write = tuple[list[Tensor], list[_Touched]]


class LoopRecorder:
    """Records what happens to the gradients of a model's parameters, by the parameter's name.

    Args:
        model: the model, or several in one module.
        optimizers: those that the step steps.
        scaler: the session or GradScaler in it.
        schedules: which schedulers to follow; none by default.
        overflows: set every gradient to inf.

    Attributes:
        scales: the loss scales in force.
        schedules: as given.
        overflowed: whether backward delivered inf or NaN.
        loss_gradient: as in `Rehearsal`; `follow_loss` sees it.
        failure: the first error of the recorder itself; what it recorded is then incomplete.
        rests: whether the ops that run now are not recorded; set by another observer of the loop while it measures.
        batch: the number of the loop's present batch, set by who hands out the batches; 0 if nobody does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: Scaler | None = None,
        schedules: ScheduleWatch | None = None,
        *,
        overflows: bool = False,
    ) -> None:
        self._named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._optimizers = list(optimizers)
        self._states: dict[str, _GradientState] = {name: _GradientState() for name in self._named}
        self._written_masters: set[int] = set()  # ids of masters' gradients that were written since the last step
        self._held: dict[int, str] = {}  # address of a gradient that backward delivered -> parameter
        self._overflows = overflows
        self._shadows: dict[int, ShadowStep] = {}
        self._averages = WeightAverages(model, optimizers)
        self._copies: dict[str, Tensor] = {}  # the last 16-bit copy of each weight
        self._outdated: dict[int, str] = {}  # address of a copy from before a step -> weight
        self._stale: dict[str, None] = {}
        self._passes, self._passed_now = 0, set[str]()  # backward passes, and the parameters that the last one reached
        self._useful: set[int] = set()  # passes of which a step, or the loop itself, used a gradient
        self._looked_at: set[int] = set()  # passes of which the loop read a gradient, such as for its norm
        self._of_inputs: set[int] = set()  # passes that delivered gradients of tensors other than parameters
        self._others: dict[int, _OtherGradient] = {}  # by address
        self._batches: dict[int, int] = {}  # pass -> the loop's batch
        self._last_backward = -1  # torch's number of the last backward that reached a parameter
        self._in_step = 0
        self._places: dict[int, tuple[str, Tensor]] = {}  # address of a gradient -> name, and parameter or master
        self._is_looked_up = False  # in the present step of an optimizer
        self.scales: tuple[float, ...] = (1.0,)
        self.schedules = schedules or ScheduleWatch((), optimizers)
        self.overflowed = overflows
        self.loss_gradient: float | None = None
        self.failure: Exception | None = None
        self.rests = False
        self.batch = 0
        self.is_in_half = False
        self._is_own_scaler = False
        self._another: tuple[float, float] | None = None
        self._rewritten = False
        self._replaced_at = "", ""  # the call and the line that made gradients finite
        self._looked_through: set[str] = set()
        self._empty_clips: list[EmptyClip] = []
        self._lost: list[LostUpdates] = []
        self._writes: list[GradientWrite] = []
        self._stepped: list[SteppedGradient] = []
        self._mixed: list[MixedStep] = []
        self._before: dict[str, Tensor] = {}  # gradients that were not finite when the recording began
        self._left_over: list[str] = []
        self._early: list[MisusedGradients] = []
        self._by_two: list[MisusedGradients] = []
        self._unguarded: list[MisusedGradients] = []
        self._hidden: list[MisusedGradients] = []
        self._dropped: list[_Drop] = []
        self._called: set[int] = set()  # optimizers
        self._given = scaler
        self._scaler = (
            scaler if isinstance(scaler, torch.amp.GradScaler) else None
        )  # a session adds up what is unscaled

    def rehearsal(self) -> Rehearsal:
        """Return what was recorded so far. Sync: a few for each average of the weights."""
        for number in list(self._shadows):  # of a step whose hooks have not all run
            self._compare_updates(number)
        return Rehearsal(
            self.scales,
            tuple(self._writes),
            tuple(self._stepped),
            self.overflowed,
            tuple(self._lost),
            mixed=tuple(self._mixed),
            in_half=self.is_in_half,
            looked_through=frozenset(self._looked_through),
            empty_clips=tuple(self._empty_clips),
            early=tuple(self._early),
            unscaled_by_two=tuple(self._by_two),
            unguarded=tuple(self._unguarded),
            hidden=tuple(self._hidden),
            hidden_at=self._replaced_at,
            rewritten=self._rewritten,
            another_scaler=None if self._is_own_scaler else self._another,
            dropped=tuple(self._useless_drops()),
            left_over=tuple(self._left_over),
            averages=tuple(self._averages.lost()),
            stale=tuple(self._stale),
            loss_gradient=self.loss_gradient,
        )

    def follow_loss(self, loss: Tensor) -> None:
        """Record what the gradient of `loss` is when backward begins. Sync: one, in backward."""
        if loss.requires_grad and loss.numel() == 1:
            loss.register_hook(self._see_loss_gradient)

    def _see_loss_gradient(self, gradient: Tensor) -> None:
        self.loss_gradient = abs(float(gradient))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs; every hook is removed at its end. Sync: one for each gradient that is there."""
        with Undo() as undo:
            self.record(undo)
            yield

    def record(self, undo: Undo) -> None:
        """As `recording`, until `undo` ends."""
        there = {name: each.grad for name, each in self._named.items() if each.grad is not None}
        self._before = {name: grad for name, grad in there.items() if not math.isfinite(norm_of(grad))}
        for name, parameter in self._named.items():
            if parameter.requires_grad:
                delivered = partial(self._safely, self._deliver, name)
                undo.add(partial(_remove_gradient_hook, delivered, parameter))
                parameter.register_post_accumulate_grad_hook(delivered)
        # Before the hooks of the optimizer, which may hide gradients in a skipped step.
        stepping = seeing_gradients(partial(self._safely, self._stepping))
        stepped = partial(self._safely, self._has_stepped)
        observe_steps(undo, before=stepping, after=stepped)
        undo.enter(_Writes(self))

    def _safely(self, record: Callable[..., T], *given: Any) -> T | None:
        """Call a method that records; keep its error. An interrupt waits, so that no record is half made."""
        with DeferredSignals():
            try:
                return record(*given)
            except Exception as error:  # noqa: BLE001  the user's loop goes on
                self.failure = self.failure or error
                return None

    def _gradients_among(self, tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
        """Return those of `tensors` that are gradients, with the names of the model's parameters, also of masters.

        Where all gradients are is looked up at most once between two backwards in an optimizer's step, which has
        several ops for each, and otherwise only if another tensor is among `tensors`. A gradient that the step itself
        replaces later is missed.
        """
        addresses = [each.data_ptr() for each in tensors]
        if not (self._in_step and self._is_looked_up) and not all(map(self._gradient_at, addresses)):
            self._places = {}
            for name, parameter in (*self._named.items(), *self._stepped_params()):
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    self._places[parameter.grad.data_ptr()] = (name, parameter)
            self._is_looked_up = self._in_step > 0
        return [found for address in addresses if (found := self._gradient_at(address)) is not None]

    def _gradient_at(self, address: int) -> tuple[str, Tensor] | None:
        """Return the gradient that was there when it was looked up, unless its parameter has another one now."""
        name, parameter = self._places.get(address, ("", None))
        grad = None if parameter is None else parameter.grad
        return (name, grad) if grad is not None and grad.data_ptr() == address else None

    def unstepped(self) -> Iterator[UnsteppedOptimizer]:
        """Yield the optimizers that were not stepped, with their parameters that no other optimizer stepped."""
        waiting = {id(self._named[name]): name for name, state in self._states.items() if state.delivered > 0}
        for number, optimizer in enumerate(self._optimizers):
            names = [waiting[id(own)] for own in model_parameters(optimizer) if id(own) in waiting]
            kept = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
            if number not in self._called and names and kept:
                yield UnsteppedOptimizer(number, tuple(names), len(self._called))

    def _useless_drops(self) -> Iterator[DroppedGradients]:
        """Yield the optimizers that used only the last of several backwards, if nothing used the others.

        In a GAN, the generator's backward also writes gradients of the discriminator, which are dropped. That is
        correct, because the generator's step used this backward.
        """
        for number in range(len(self._optimizers)):
            of_it = [each for each in self._dropped if each.optimizer == number]
            useless = [
                (each, {passed for passed in each.passes if self._is_useless(passed, each.last)}) for each in of_it
            ]
            names = [each.name for each, passes in useless if passes]
            stepped = [each for each in self._stepped if each.optimizer == number]
            if names and len(names) >= len({each.name for each in stepped}) / 2:
                times = max(len(passes) for _, passes in useless)
                moved_on = any(self._is_of_another_batch(one, drop.last) for drop, passes in useless for one in passes)
                yield DroppedGradients(number, tuple(names), times, moved_on)

    def _is_useless(self, passed: int, last: int) -> bool:
        """Whether no step and nothing in the loop used the gradients of a pass before the one that a step used.

        An attack on the inputs uses their gradients; where it reads them by NumPy no op shows that, but the pass for
        the step delivers none. Gradients that are read, as for their norm, may have been computed for that alone, as
        long as the loop stays at its batch.
        """
        if passed in self._useful or (passed in self._of_inputs and last not in self._of_inputs):
            return False
        return passed not in self._looked_at or self._is_of_another_batch(passed, last)

    def _is_of_another_batch(self, passed: int, last: int) -> bool:
        return self._batches.get(passed) != self._batches.get(last)

    def reads(self, values: Any, result: Any) -> None:
        """Note gradients that an op outside of autograd read, and those that it turned into something as large."""
        for each in tensors_in(values):
            if each.layout is not torch.strided or not (address := each.data_ptr()):
                continue
            other, name = self._others.get(address), self._held.get(address)
            if other is not None and other.alive() is not None and not self._in_step:
                self._useful.add(other.passed)
            if name is not None and self._states[name].is_at(address):
                state = self._states[name]
                state.is_used |= any(out.numel() >= each.numel() > 1 for out in tensors_in((result,)))
                if not self._in_step:
                    self._looked_at.add(state.passed)

    def ran_in_backward(self, node: Any, func: Any, result: Any) -> None:
        """Note an op of a backward: gradients of other tensors than the model's parameters.

        AccumulateGrad writes that of a leaf, and `retain_grad` a clone of that of another tensor. A clone that torch
        makes for itself is not alive when the loop goes on.
        """
        if not isinstance(result, Tensor):
            return
        self.is_in_half |= result.dtype == torch.float16
        is_of_leaf = node.name() == INTO_GRAD
        if result.layout is not torch.strided or not (is_of_leaf or func is _CLONE):
            return
        if is_of_leaf and id(node.variable) in self._names:
            return
        passed = self._passes + (current_backward() > self._last_backward)  # before the first parameter, or after it
        alive = (lambda: result) if is_of_leaf else weakref.ref(result)
        self._others[result.data_ptr()] = _OtherGradient(alive, passed)
        if is_of_leaf and not isinstance(node.variable, nn.Parameter):
            self._of_inputs.add(passed)

    def ran(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note an op outside of autograd that writes nothing in place."""
        self.is_in_half |= isinstance(result, Tensor) and result.dtype == torch.float16
        if (self._held or self._others) and not (func.is_view or func in _VIEWS):
            self.reads(args, result)
        if not self._in_step and not func.is_view:
            self._follow_copies(func, args, result)
        if func is _NEW_NUMBER and not self._in_step and (call := call_of_user_line()) in _CLIPS_BY_NORM:
            self._empty_clips.append(EmptyClip(call, str(user_line() or "")))

    def _follow_copies(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note 16-bit copies of weights, and reads of those older than the weight. Sync: one for such a read."""
        if func is _CAST and isinstance(result, Tensor) and result.dtype in LOW_PRECISION_DTYPES:
            name = self._names.get(id(args[0]))
            if name is not None:
                self._outdated = {at: each for at, each in self._outdated.items() if each != name}
                self._copies[name] = result
        for each in tensors_in(args) if self._outdated else ():
            name = self._outdated.get(each.data_ptr()) if each.layout is torch.strided else None
            if name is not None and not torch.equal(self._copies[name], self._named[name].to(each.dtype)):
                self._stale[name] = None

    def ran_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op outside of autograd that writes in place, and record what it writes to."""
        writes = self._safely(self._before_write, func, args, kwargs)
        result = run_op(func, args, kwargs)
        if writes is not None:
            self._safely(self._after_write, func, args, *writes)
        return result

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Write:
        """Return the tensors that an op will write to, and the gradients among them."""
        to = list(_written_by(func, args, kwargs))
        written = self._gradients_among(to)
        adds = "add" in str(func) and not self._in_step
        touched = [
            _Touched(name, grad, norm_of(grad), grad.clone() if adds else None)
            for name, grad in written
            if self.has_values(name, grad)
        ]
        if not written and not self._in_step:
            self._averages.before(func, to, args, kwargs)
        return to, touched

    def _after_write(self, func: Any, args: tuple[Any, ...], to: list[Tensor], touched: list[_Touched]) -> None:
        if touched and any(word in str(func) for word in _UNSCALERS):
            self._note_unscaling(func, args)
        if touched:
            call = call_of_user_line() or func.overloadpacket.__name__.removeprefix("_foreach_")
            self.written(str(func), touched, call=call, line=str(user_line() or ""))
        elif (self._held or self._others) and not self._in_step and func not in _ZEROS:
            self.reads(args, tuple(to))

    def _note_unscaling(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note the loss scale by which a scaler divides, if it is not that of the one that was passed. Sync: a few."""
        names = [argument.name for argument in func._schema.arguments]
        factor = args[names.index("inv_scale")] if "inv_scale" in names else None
        if not isinstance(factor, Tensor | float) or not float(factor) > 0 or float(factor) == 1:
            return  # with a factor of 1 torch only looks for inf and NaN
        used, passed = 1 / float(factor), scales_of(self._given)
        # A GradScaler makes its scale when it first scales a loss.
        is_unused = self._scaler is not None and self._scaler.is_enabled() and self._scaler._scale is None
        if not is_unused and any(math.isclose(used, scale, rel_tol=1e-6) for scale in passed):
            self._is_own_scaler = True
        elif self._another is None:
            self._another = used, max(passed)

    def has_values(self, name: str, grad: Tensor) -> bool:
        """Whether a gradient has values: a master's has none before the first write to it."""
        parameter = self._named[name]
        if grad is parameter.grad or id(grad) in self._written_masters:
            return True
        self._written_masters.add(id(grad))
        return False

    def written(self, op: str, touched: list[_Touched], *, call: str, line: str) -> None:
        """Record a write to gradients."""
        names, before = tuple(each.name for each in touched), [each.before for each in touched]
        after = [norm_of(each.grad) for each in touched]
        was, now = math.hypot(*before), math.hypot(*after)
        by_scaler = any(word in op for word in _UNSCALERS)
        self._rewritten |= any(word in op for word in _REWRITES) and not self._in_step
        if math.isfinite(now) and not math.isfinite(was) and now > 0:
            self._replaced_at = call, line
        for name in names:
            state = self._states[name]
            if now == 0:
                state.scales, state.is_zeroed = (), True
            elif not by_scaler:  # a clipping has read the norm for itself
                self._looked_at.discard(state.passed)
            state.unscaled += by_scaler
            state.is_unscaled |= by_scaler or (0 < now < was and self._is_one_scale(now / was))
        if now == was and any(word in op for word in ("mul", "clamp")):
            self._looked_through.update(names)
        if not was or not math.isfinite(was) or not math.isfinite(now) or now == was:
            return
        delivered = math.hypot(*(self._states[name].delivered for name in names if name in self._states))
        factor = now / was
        if not self._unscales(factor, [each.grad.dtype for each in touched]):  # the ratio at the step shows unscaling
            for name in names:
                self._states[name].clipped *= factor
        ratio = was / delivered if delivered else math.nan
        ratios = tuple(_ratio(norm, self._states[name].delivered) for name, norm in zip(names, before, strict=True))
        added = math.hypot(*(norm_of(each.grad - each.kept) for each in touched if each.kept is not None))
        self._writes.append(GradientWrite(op, names, ratio, factor, was, call, line, ratios, added))

    def _is_one_scale(self, factor: float) -> bool:
        return any(scale > 1 and _log2(factor * scale) < 1e-4 for scale in self.scales)

    def _unscales(self, factor: float, dtypes: list[torch.dtype]) -> bool:
        """Whether a factor is a power of two, or one over a scale up to rounding."""
        rounding = 2e-4 if torch.float32 in dtypes else 2 * max(torch.finfo(dtype).eps for dtype in dtypes)
        divides = any(_log2(factor * scale) < rounding for scale in self.scales)
        return divides or _is_power_of_two(factor)

    def _stepped_params(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._optimizers:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
                if id(own) in self._names:
                    yield self._names[id(own)], parameter

    def _deliver(self, name: str, parameter: Tensor) -> None:
        self._is_looked_up = False  # a closure has its backward in the step
        with _disable_current_modes():  # a mode that follows values must not see the norm of this hook
            self._delivered(name, parameter)

    def _delivered(self, name: str, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:  # another hook has taken it
            return
        if self._overflows and grad.layout is torch.strided:
            grad.fill_(math.inf)
        state = self._states[name]
        self._begin_pass(name)
        is_same = state.gradient is grad and not state.is_zeroed
        if state.backwards and not is_same and not state.is_used:
            state.dropped = (*state.dropped, state.passed)
        if is_same and state.is_unscaled and self._scaler is not None:
            state.added_after += 1
        elif not is_same:
            state.added_after, state.unscaled, state.is_unscaled, state.is_used = 0, 0, False, False
        if self._scaler is not None:
            state.scales = (*(state.scales if is_same else ()), self._scaler.get_scale())
        was_zeroed = state.is_zeroed
        state.gradient, state.is_zeroed, state.passed, state.unscaled = grad, False, self._passes, 0
        state.delivered, state.backwards, state.clipped = norm_of(grad), state.backwards + 1, 1.0
        state.nonzero = int(torch.count_nonzero(grad)) if grad.layout is torch.strided else 0
        self._held[grad.data_ptr() if grad.layout is torch.strided else 0] = name
        self.overflowed |= not math.isfinite(state.delivered)
        if self._before.pop(name, None) is grad and not was_zeroed and not math.isfinite(state.delivered):
            self._left_over.append(name)

    def _begin_pass(self, name: str) -> None:
        """A parameter that is reached for a second time, or after a step, is reached by another backward.

        A step uses those of its closure. The backwards of its first call come before `_stepping`, which judges them.
        """
        if name in self._passed_now or not self._passed_now:
            self._passes, self._passed_now = self._passes + 1, set()
            self._batches[self._passes] = self.batch
        self._last_backward = max(self._last_backward, current_backward())
        if self._in_step:
            self._useful.add(self._passes)
        self._passed_now.add(name)

    def _stepping(self, optimizer: Optimizer, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = self._number(optimizer)
        if number is None:
            return
        self._called.add(number)
        self._in_step += 1
        self._is_looked_up = False
        self._passed_now = set()
        self.schedules.at_step(number)
        if not self.overflowed:
            self._begin_shadow(optimizer, number)
        self._compare_scales(optimizer, number)
        inside = "grad_scaler" in kwargs or getattr(optimizer, "grad_scale", None) is not None
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        misused: dict[str, list[tuple[str, int]]] = {"early": [], "by_two": [], "unguarded": [], "hidden": []}
        for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
            name = self._names.get(id(own))
            if name is not None and parameter.grad is not None:
                state = self._states[name]
                ratio, master = _ratio(norm_of(parameter.grad), state.delivered), own is not parameter
                known = name, number, ratio, state.backwards, state.clipped, inside, master, state.delivered
                self._stepped.append(SteppedGradient(*known, _flushed(parameter.grad, state)))
                misused["early"] += [(name, state.added_after)] * (state.added_after > 0)
                misused["by_two"] += [(name, state.unscaled)] * (state.unscaled > 1)
                self._rewritten |= state.gradient is not None and parameter.grad is not state.gradient and not master
                if self._scaler is not None and state.backwards and not math.isfinite(state.delivered):
                    # That backward delivered since the last step. A scaler skips the step of a gradient that is not
                    # finite, unless the loop replaced the values.
                    was_replaced = math.isfinite(norm_of(parameter.grad))
                    misused["hidden"] += [(name, 1)] * was_replaced
                    misused["unguarded"] += [(name, 1)] * (not was_replaced and not inside)
                self._useful.add(state.passed)
                if state.dropped and self._is_the_last_alone(self._stepped[-1]):
                    self._dropped.append(_Drop(number, name, state.dropped, state.passed))
                self._begin_anew(name)
                self._written_masters.discard(id(parameter.grad))
        records = {"early": self._early, "by_two": self._by_two, "unguarded": self._unguarded, "hidden": self._hidden}
        for kind, found in misused.items():
            if found:
                names = tuple(name for name, _ in found)
                records[kind].append(MisusedGradients(number, names, max(times for _, times in found)))

    def _begin_anew(self, name: str) -> None:
        """Forget what was delivered until a step has used it.

        The gradient stays where it is, so that a second scaler that unscales it is noticed.
        """
        state = self._states[name]
        kept = _GradientState(gradient=state.gradient, unscaled=state.unscaled, is_unscaled=state.is_unscaled)
        self._states[name] = kept

    def _is_the_last_alone(self, gradient: SteppedGradient) -> bool:
        """Whether a step uses what the last backward delivered and nothing else; a session adds up what it unscales."""
        factors = [1.0, *(() if gradient.scaled_inside else (1 / scale for scale in self.scales))]
        return any(_log2(gradient.unclipped / factor) < 1e-3 for factor in factors)

    def _compare_scales(self, optimizer: Optimizer, number: int) -> None:
        own = [self._names[id(each)] for each in model_parameters(optimizer) if id(each) in self._names]
        several = [self._states[name].scales for name in own if len(set(self._states[name].scales)) > 1]
        if several:
            self._mixed.append(MixedStep(number, tuple(dict.fromkeys(several[0]))))

    def _begin_shadow(self, optimizer: Optimizer, number: int) -> None:
        """Prepare to compare a step of 16-bit weights; skip an optimizer that cannot be copied."""
        if ShadowStep.applies_to(optimizer):
            with contextlib.suppress(Exception):
                self._shadows[number] = ShadowStep(optimizer)

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        number = self._number(optimizer)
        self._in_step -= number is not None and self._in_step > 0
        if number is not None:
            self._passed_now = set()
            self._compare_updates(number)
            own = {self._names.get(id(each), "") for each in model_parameters(optimizer)}
            for name in own & {name for name, state in self._states.items() if state.backwards}:  # in the closure
                self._begin_anew(name)
            self._outdated |= {copy.data_ptr(): name for name, copy in self._copies.items() if name in own}

    def _compare_updates(self, number: int) -> None:
        shadow = self._shadows.pop(number, None)
        if shadow is not None:
            with contextlib.suppress(Exception):
                self._lost += filter(None, [shadow.compared(number)])

    def _number(self, optimizer: Optimizer) -> int | None:
        return next((n for n, each in enumerate(self._optimizers) if each is optimizer), None)


def _remove_gradient_hook(hook: Callable[..., Any], parameter: Tensor) -> None:
    remove_hook(hook, parameter._post_accumulate_grad_hooks or {})


class _Writes(DispatchMode):
    """Reports every op outside of autograd that writes to a gradient or to an average of the weights."""

    def __init__(self, recorder: LoopRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorder.rests:
            return run_op(func, args, kwargs)
        node = _current_node()
        if node is not None:
            result = run_op(func, args, kwargs)
            self._recorder._safely(self._recorder.ran_in_backward, node, func, result)
            return result
        if func._schema.is_mutable:
            return self._recorder.ran_in_place(func, args, kwargs)
        result = run_op(func, args, kwargs)
        self._recorder._safely(self._recorder.ran, func, args, result)
        return result


_CLONE = torch.ops.aten.clone.default
_ZEROS = frozenset(
    (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default, torch.ops.aten.detach_.default)
)
_CAST = torch.ops.aten._to_copy.default
_VIEWS = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._unsafe_view.default))
_NEW_NUMBER, _CLIPS_BY_NORM = torch.ops.aten.lift_fresh.default, ("clip_grad_norm_", "clip_grad_norm")
"""What torch's clipping runs where no parameter has a gradient: it returns a norm of 0.0."""
_UNSCALERS = ("_amp_foreach_non_finite_check_and_unscale_", "multi_tensor_unscale_")
"""The ops by which torch's and amplab's scalers unscale in place."""
_REWRITES = ("nan_to_num", "masked_fill", "masked_scatter", "index_put", "copy_", "clamp")
"""The ops that can make a gradient finite that is not."""


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an op writes to, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Tensor) and each.layout is torch.strided:
                    yield each


@torch.no_grad()
def norm_of(grad: Tensor) -> float:
    """Return the Euclidean norm of a gradient, computed in float64. Sync: one."""
    values = stored_values(grad)
    values = torch.view_as_real(values) if values.is_complex() else values
    norm: float = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm


def _flushed(grad: Tensor, state: _GradientState) -> float:
    """Return which share of the elements that backward delivered became 0, if float16 holds what a gradient has now."""
    if grad.dtype != torch.float32 or not state.nonzero or not math.isfinite(state.delivered):
        return 0.0
    left = int(torch.count_nonzero(grad))
    # A gradient that is 0 altogether was set to 0, for example to freeze its weight.
    return 1 - left / state.nonzero if 0 < left < state.nonzero and torch.equal(grad, grad.half().float()) else 0.0


def _ratio(seen: float, delivered: float) -> float:
    known = seen > 0 and delivered > 0 and math.isfinite(seen) and math.isfinite(delivered)
    return seen / delivered if known else math.nan


def _is_power_of_two(factor: float) -> bool:
    """Whether a factor is a power of two up to the rounding of two norms."""
    return 0 < factor < math.inf and abs(math.log2(factor) - round(math.log2(factor))) < 1e-4


def _log2(factor: float) -> float:
    """Return |log2(factor)|, how far a factor is from 1; inf for one that is 0 or not finite."""
    return abs(math.log2(factor)) if 0 < factor < math.inf else math.inf
