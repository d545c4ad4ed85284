"""`rehearse`: run a whole train step once, record what happens to its gradients, and restore all state.

    backward     delivers a gradient: its norm is recorded
    a write      changes gradients in place, such as unscaling or clipping: the factor is recorded
    step         the optimizer gets a gradient: its norm is recorded, and what 16-bit weights lose is counted
    a schedule   moves: whether it does so before the step, or without one

The norms alone show what a gradient was multiplied by between backward and step, whichever functions did it.
The rules about it are in `rules.gradients`, `rules.updates` and `rules.schedule`; `rehearse_loop`
decides which rehearsals a loop needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amplab.diagnose.rules.parameters import model_parameters
from amplab.diagnose.train_step.loop_state import kept, scales_of, set_scale
from amplab.diagnose.train_step.lost_updates import LostUpdates, ShadowStep
from amplab.diagnose.train_step.named_code import clips_of_model_parameters, leads_to
from amplab.diagnose.train_step.schedules import ScheduleMove, ScheduleWatch, schedulers_of
from amplab.trace.dispatch_mode import DispatchMode
from amplab.trace.handed_step import Scaler
from amplab.trace.untouched import untouched

__all__ = ["GradientWrite", "MixedStep", "Rehearsal", "SteppedGradient", "UnsteppedOptimizer", "rehearse"]

_current_node = torch._C._current_autograd_node


class GradientWrite(NamedTuple):
    """An op outside of autograd that changed gradients in place.

    Args:
        op: name of the aten op.
        names: names of the parameters whose gradients it changed.
        before: norm of these gradients before the op, divided by the norm that backward delivered.
        factor: norm after the op divided by the norm before it.
        norm: norm before the op.
    """

    op: str
    names: tuple[str, ...]
    before: float
    factor: float
    norm: float


class SteppedGradient(NamedTuple):
    """A gradient at the step of an optimizer.

    Args:
        name: of the parameter; for a master, of the model's parameter.
        optimizer: the optimizer's number.
        ratio: its norm divided by the norm that backward delivered; NaN if one of them is 0 or not finite.
        backwards: how many backwards delivered one since the last step.
        clipped: the factor of all writes that are not a power of two.
        scaled_inside: whether the optimizer itself unscales.
        of_master: whether it is the gradient of a float32 master.
        delivered: its norm when backward delivered it.
    """

    name: str
    optimizer: int
    ratio: float
    backwards: int
    clipped: float
    scaled_inside: bool
    of_master: bool
    delivered: float


class MixedStep(NamedTuple):
    """A step of an optimizer with gradients of several scales.

    Args:
        optimizer: its number.
        scales: the distinct scales of the backwards that were added up, in order.
    """

    optimizer: int
    scales: tuple[float, ...]


class UnsteppedOptimizer(NamedTuple):
    """An optimizer that was not stepped.

    Args:
        optimizer: its number.
        names: its parameters with a gradient.
        others: how many other optimizers were stepped.
        named: whether the code of the train step names it, for example to set its gradients to zero.
    """

    optimizer: int
    names: tuple[str, ...]
    others: int
    named: bool = True


@dataclass(frozen=True)
class Rehearsal:
    """What one train step does with its gradients.

    Args:
        scales: the loss scales in force.
        writes: in order.
        stepped: in order, one for each parameter and step.
        overflowed: whether backward delivered inf or NaN, or was forced to.
        lost: what 16-bit weights lose of each optimizer's step.
        schedules: the schedulers that moved.
        unstepped: the optimizers that were not stepped, though their parameters got gradients and still have them.
        mixed: the steps that added up gradients of several scales.
        in_half: whether an op wrote float16.
        looked_through: parameters whose gradients a clipping read and did not change.
        clips_by_name: the clipping function that the step's code calls with the model's parameters; empty for none.
        elsewhere: a rehearsal at another loss scale, if there was one.
        skipped: a rehearsal with an overflow, if there was one.
    """

    scales: tuple[float, ...]
    writes: tuple[GradientWrite, ...]
    stepped: tuple[SteppedGradient, ...]
    overflowed: bool = False
    lost: tuple[LostUpdates, ...] = ()
    schedules: tuple[ScheduleMove, ...] = ()
    unstepped: tuple[UnsteppedOptimizer, ...] = ()
    mixed: tuple[MixedStep, ...] = ()
    in_half: bool = False
    looked_through: frozenset[str] = frozenset()
    clips_by_name: str = ""
    elsewhere: Rehearsal | None = None
    skipped: Rehearsal | None = None

    @property
    def scale(self) -> float:
        """The largest loss scale."""
        return max(self.scales)


def rehearse(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    *,
    scaler: Scaler | None = None,
    stateful: Sequence[Any] = (),
    loss_scale: float | None = None,
    overflows: bool = False,
) -> Rehearsal:
    """Run `train_step` once and return what it does with the gradients; then restore all state.

    Restored are parameters, masters, buffers, gradients, optimizer states, loss scales, random states, schedulers that
    the step's code names, and `stateful`. A batch that `train_step` takes from an iterator is lost.

    Args:
        model: the model, or several in one module.
        train_step: a whole iteration: forward, backward, optimizer step, and what is between them.
        optimizers: those that it steps.
        scaler: the session or GradScaler in it.
        stateful: other objects that it changes and that have state_dict and load_state_dict: schedulers, averages.
        loss_scale: run it at this scale; None for the present one.
        overflows: set every gradient to inf.

    Sync: many.
    """
    schedulers = schedulers_of(train_step, stateful)
    named = {id(each) for each in stateful}
    recorder = _Recorder(model, optimizers, ScheduleWatch(schedulers, optimizers), scaler, overflows=overflows)
    with ExitStack() as undo:
        others = [each for each in schedulers if id(each) not in named]
        before = undo.enter_context(kept(optimizers, scaler, [*stateful, *others]))
        undo.enter_context(untouched(model))
        undo.enter_context(recorder.recording())
        if loss_scale is not None:
            set_scale(scaler, loss_scale)
        scales = recorder.scales = scales_of(scaler)
        train_step()
        moves = recorder.schedules.moves([each.is_unmoved() for each in before])
        left_out = [(each, leads_to(train_step, optimizers[each.optimizer])) for each in recorder.unstepped()]
    return Rehearsal(
        scales,
        tuple(recorder.writes),
        tuple(recorder.stepped),
        recorder.overflowed,
        tuple(recorder.lost),
        moves,
        tuple(each._replace(named=named) for each, named in left_out),
        tuple(recorder.mixed),
        recorder.in_half,
        frozenset(recorder.looked_through),
        clips_of_model_parameters(train_step),
    )


@dataclass
class _GradientState:
    """The record of one gradient since the last optimizer step that used it."""

    gradient: Tensor | None = None
    scales: tuple[float, ...] = ()  # of the backwards that this gradient adds up
    delivered: float = math.nan
    backwards: int = 0
    clipped: float = 1.0


class _Recorder:
    """Records what happens to the gradients of a model's parameters, by the parameter's name."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: ScheduleWatch,
        scaler: Any,
        *,
        overflows: bool,
    ) -> None:
        self._named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._optimizers = list(optimizers)
        self._states: dict[str, _GradientState] = {name: _GradientState() for name in self._named}
        self._written_masters: set[int] = set()  # ids of masters' gradients that were written since the last step
        self._overflows = overflows
        self._shadows: dict[int, ShadowStep] = {}
        self.scales: tuple[float, ...] = (1.0,)
        self.schedules = schedules
        self.overflowed = overflows
        self.in_half = False
        self.looked_through: set[str] = set()
        self.lost: list[LostUpdates] = []
        self.writes: list[GradientWrite] = []
        self.stepped: list[SteppedGradient] = []
        self.mixed: list[MixedStep] = []
        self._called: set[int] = set()  # optimizers
        self._scaler = (
            scaler if isinstance(scaler, torch.amp.GradScaler) else None
        )  # a session adds up what is unscaled

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as undo:
            for name, parameter in self._named.items():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(lambda each, n=name: self._delivered(n, each))
                    undo.callback(hook.remove)
            # A global hook runs before those of the optimizer, which may hide gradients in a skipped step.
            undo.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            undo.callback(register_optimizer_step_post_hook(self._has_stepped).remove)
            undo.enter_context(_Writes(self))
            yield

    def grads(self) -> dict[int, tuple[str, Tensor]]:
        """Return {address: (name, gradient)}; the gradient of a master has the name of the model's parameter."""
        found = {}
        for name, parameter in (*self._named.items(), *self._stepped_params()):
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided:
                found[grad.data_ptr()] = (name, grad)
        return found

    def unstepped(self) -> Iterator[UnsteppedOptimizer]:
        """Yield the optimizers that were not stepped, with their parameters that no other optimizer stepped."""
        waiting = {id(self._named[name]): name for name, state in self._states.items() if state.delivered > 0}
        for number, optimizer in enumerate(self._optimizers):
            names = [waiting[id(own)] for own in model_parameters(optimizer) if id(own) in waiting]
            kept = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
            if number not in self._called and names and kept:
                yield UnsteppedOptimizer(number, tuple(names), len(self._called))

    def has_values(self, name: str, grad: Tensor) -> bool:
        """Whether a gradient has values: a master's has none before the first write to it."""
        parameter = self._named[name]
        if grad is parameter.grad or id(grad) in self._written_masters:
            return True
        self._written_masters.add(id(grad))
        return False

    def written(self, op: str, touched: list[tuple[str, Tensor]], before: list[float]) -> None:
        """Record a write to gradients, whose norms were `before`."""
        after = [_norm(grad) for _, grad in touched]
        was, now = math.hypot(*before), math.hypot(*after)
        for name, _ in touched if now == 0 else ():
            self._states[name].scales = ()
        if now == was and any(word in op for word in ("mul", "clamp")):
            self.looked_through.update(name for name, _ in touched)
        if not was or not math.isfinite(was) or not math.isfinite(now) or now == was:
            return
        names = tuple(name for name, _ in touched)
        delivered = math.hypot(*(self._states[name].delivered for name in names if name in self._states))
        factor = now / was
        if not self._unscales(factor, [grad.dtype for _, grad in touched]):  # the ratio at the step shows unscaling
            for name in names:
                self._states[name].clipped *= factor
        self.writes.append(GradientWrite(op, names, was / delivered if delivered else math.nan, factor, was))

    def _unscales(self, factor: float, dtypes: list[torch.dtype]) -> bool:
        """Whether a factor is a power of two, or one over a scale up to rounding."""
        rounding = 2e-4 if torch.float32 in dtypes else 2 * max(torch.finfo(dtype).eps for dtype in dtypes)
        divides = factor > 0 and any(abs(math.log2(factor * scale)) < rounding for scale in self.scales)
        return divides or _is_power_of_two(factor)

    def _stepped_params(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._optimizers:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
                if id(own) in self._names:
                    yield self._names[id(own)], parameter

    def _delivered(self, name: str, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:  # another hook has taken it
            return
        if self._overflows and grad.layout is torch.strided:
            grad.fill_(math.inf)
        state = self._states[name]
        if self._scaler is not None:
            before = state.scales if state.gradient is grad else ()
            state.gradient, state.scales = grad, (*before, self._scaler.get_scale())
        state.delivered, state.backwards, state.clipped = _norm(grad), state.backwards + 1, 1.0
        self.overflowed |= not math.isfinite(state.delivered)

    def _stepping(self, optimizer: Optimizer, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = self._number(optimizer)
        if number is None:
            return
        self._called.add(number)
        self.schedules.at_step(number)
        if not self.overflowed:
            self._begin_shadow(optimizer, number)
        self._compare_scales(optimizer, number)
        inside = "grad_scaler" in kwargs or getattr(optimizer, "grad_scale", None) is not None
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
            name = self._names.get(id(own))
            if name is not None and parameter.grad is not None:
                state = self._states[name]
                ratio, master = _ratio(_norm(parameter.grad), state.delivered), own is not parameter
                known = name, number, ratio, state.backwards, state.clipped, inside, master, state.delivered
                self.stepped.append(SteppedGradient(*known))
                self._states[name] = _GradientState()
                self._written_masters.discard(id(parameter.grad))

    def _compare_scales(self, optimizer: Optimizer, number: int) -> None:
        own = [self._names[id(each)] for each in model_parameters(optimizer) if id(each) in self._names]
        several = [self._states[name].scales for name in own if len(set(self._states[name].scales)) > 1]
        if several:
            self.mixed.append(MixedStep(number, tuple(dict.fromkeys(several[0]))))

    def _begin_shadow(self, optimizer: Optimizer, number: int) -> None:
        """Prepare to compare a step of 16-bit weights; skip an optimizer that cannot be copied."""
        if ShadowStep.applies_to(optimizer):
            with contextlib.suppress(Exception):
                self._shadows[number] = ShadowStep(optimizer)

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        number = self._number(optimizer)
        shadow = None if number is None else self._shadows.pop(number, None)
        if number is not None and shadow is not None:
            with contextlib.suppress(Exception):
                self.lost += filter(None, [shadow.compared(number)])

    def _number(self, optimizer: Optimizer) -> int | None:
        return next((n for n, each in enumerate(self._optimizers) if each is optimizer), None)


class _Writes(DispatchMode):
    """Reports every op outside of autograd that writes to a gradient."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable or _current_node() is not None:
            result = func(*args, **kwargs)
            self._recorder.in_half |= isinstance(result, Tensor) and result.dtype == torch.float16
            return result
        grads = self._recorder.grads()
        written = [grads[each.data_ptr()] for each in _written_by(func, args, kwargs) if each.data_ptr() in grads]
        touched = [(name, grad) for name, grad in written if self._recorder.has_values(name, grad)]
        before = [_norm(grad) for _, grad in touched]
        result = func(*args, **kwargs)
        if touched:
            self._recorder.written(str(func), touched, before)
        return result


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an op writes to, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Tensor) and each.layout is torch.strided:
                    yield each


@torch.no_grad()
def _norm(grad: Tensor) -> float:
    values = grad.coalesce().values() if grad.is_sparse else grad
    norm: float = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm


def _ratio(seen: float, delivered: float) -> float:
    known = seen > 0 and delivered > 0 and math.isfinite(seen) and math.isfinite(delivered)
    return seen / delivered if known else math.nan


def _is_power_of_two(factor: float) -> bool:
    """Whether a factor is a power of two up to the rounding of two norms."""
    return factor > 0 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-4
