"""Run somebody's whole training step once, watch what happens to the gradients on their way, and undo it.

    backward     delivers a gradient: its norm is noted
    a write      anything that changes gradients in place: unscaling, clipping; the factor is noted
    step         the optimizer sees a gradient: its norm is noted; what its 16-bit weights lose is counted
    a schedule   whether it moves before the step, and where there is none

What a gradient was multiplied by between backward and step follows from the norms alone, whichever functions did it.
The rules about it are in `rules.gradients`, `rules.updates` and `rules.schedule`; which rehearsals a loop needs, in
`rehearsals`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.diagnose.loop_state import kept, scales_of, set_scale
from amplab.diagnose.rehearsed import GradientWrite, MixedStep, SteppedGradient, UnsteppedOptimizer
from amplab.diagnose.rules.parameters import model_parameters
from amplab.diagnose.train_step.lost_updates import LostUpdates, ShadowStep
from amplab.diagnose.train_step.named_code import clips_of_model_parameters, leads_to
from amplab.diagnose.train_step.schedules import ScheduleMove, ScheduleWatch, schedulers_of
from amplab.trace.handed_step import Scaler
from amplab.trace.untouched import untouched

__all__ = ["Rehearsal", "rehearse"]

_current_node = torch._C._current_autograd_node


@dataclass(frozen=True)
class Rehearsal:
    """What one training step did with its gradients.

    Args:
        scales: the loss scales in force.
        writes: in order.
        stepped: in order, one for each parameter and step.
        overflowed: backward delivered inf or NaN, or was made to.
        lost: what 16-bit weights have lost of each optimizer's step.
        schedules: the schedulers that moved.
        unstepped: the optimizers that were not stepped, though their parameters got gradients and still have them.
        mixed: the steps that added up gradients of several scales.
        in_half: an op wrote float16.
        looked_through: parameters whose gradients a clipping went through and left as they were.
        clips_by_name: the clipping that the step's code gives the model's parameters; empty for none.
        elsewhere: the same at another loss scale, where it was looked at.
        skipped: the same with an overflow, where it was looked at.
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
    """Run `train_step` once and say what it did with the gradients; then everything is put back.

    Put back are parameters, masters, buffers, gradients, optimizer states, loss scales, random states, schedulers that
    the step's code names, and what `stateful` names. A batch that `train_step` draws from an iterator is drawn.

    Args:
        model: the model, or a ModuleList of several.
        train_step: forward, backward, step, and whatever lies between.
        optimizers: those that it steps.
        scaler: the session or GradScaler in it.
        stateful: anything else that it changes and that has state_dict and load_state_dict: schedulers, averages.
        loss_scale: run it at this scale; None for the present one.
        overflows: let every gradient be inf, whatever the scale.

    Sync: many; this is for a look at a loop, once.
    """
    schedulers = schedulers_of(train_step, stateful)
    named = {id(each) for each in stateful}
    watch = _Watch(model, optimizers, ScheduleWatch(schedulers, optimizers), scaler, overflows=overflows)
    with ExitStack() as undo:
        others = [each for each in schedulers if id(each) not in named]
        before = undo.enter_context(kept(optimizers, scaler, [*stateful, *others]))
        undo.enter_context(untouched(model))
        undo.enter_context(watch.watching())
        if loss_scale is not None:
            set_scale(scaler, loss_scale)
        scales = watch.scales = scales_of(scaler)
        train_step()
        moves = watch.schedules.moves([each.is_unmoved() for each in before])
        left_out = [(each, leads_to(train_step, optimizers[each.optimizer])) for each in watch.unstepped()]
    return Rehearsal(
        scales,
        tuple(watch.writes),
        tuple(watch.stepped),
        watch.overflowed,
        tuple(watch.lost),
        moves,
        tuple(each._replace(named=named) for each, named in left_out),
        tuple(watch.mixed),
        watch.in_half,
        frozenset(watch.looked_through),
        clips_of_model_parameters(train_step),
    )


@dataclass
class _Way:
    """What is known of one gradient since its last step."""

    gradient: Tensor | None = None
    scales: tuple[float, ...] = ()  # of the backwards that this gradient adds up
    delivered: float = math.nan
    backwards: int = 0
    clipped: float = 1.0


class _Watch:
    """Follows the gradients of a model's parameters, by the name of the parameter."""

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
        self._ways: dict[str, _Way] = {name: _Way() for name in self._named}
        self._begun: set[int] = set()  # gradients of masters that were written since the last step
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
    def watching(self) -> Iterator[None]:
        with ExitStack() as undo:
            for name, parameter in self._named.items():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(lambda each, n=name: self._delivered(n, each))
                    undo.callback(hook.remove)
            # A global hook comes before those of the optimizer, which may hide gradients from a skipped step.
            undo.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            undo.callback(register_optimizer_step_post_hook(self._has_stepped).remove)
            undo.enter_context(_Writes(self))
            yield

    def grads(self) -> dict[int, tuple[str, Tensor]]:
        """Memory -> whose gradient lies there; a master's goes by the name of its half parameter."""
        found = {}
        for name, parameter in (*self._named.items(), *self._stepped_params()):
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided:
                found[grad.data_ptr()] = (name, grad)
        return found

    def unstepped(self) -> Iterator[UnsteppedOptimizer]:
        """The optimizers left out, with those of their parameters that no other one has stepped either."""
        waiting = {id(self._named[name]): name for name, way in self._ways.items() if way.delivered > 0}
        for number, optimizer in enumerate(self._optimizers):
            names = [waiting[id(own)] for own in model_parameters(optimizer) if id(own) in waiting]
            kept = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
            if number not in self._called and names and kept:
                yield UnsteppedOptimizer(number, tuple(names), len(self._called))

    def has_values(self, name: str, grad: Tensor) -> bool:
        """Whether a gradient holds numbers: that of a master does not before the first write to it."""
        parameter = self._named[name]
        if grad is parameter.grad or id(grad) in self._begun:
            return True
        self._begun.add(id(grad))
        return False

    def written(self, op: str, touched: list[tuple[str, Tensor]], before: list[float]) -> None:
        """Take note of a write to gradients, whose norms were `before`."""
        after = [_norm(grad) for _, grad in touched]
        was, now = math.hypot(*before), math.hypot(*after)
        for name, _ in touched if now == 0 else ():
            self._ways[name].scales = ()
        if now == was and any(word in op for word in ("mul", "clamp")):
            self.looked_through.update(name for name, _ in touched)
        if not was or not math.isfinite(was) or not math.isfinite(now) or now == was:
            return
        names = tuple(name for name, _ in touched)
        delivered = math.hypot(*(self._ways[name].delivered for name in names if name in self._ways))
        factor = now / was
        if not self._unscales(factor, [grad.dtype for _, grad in touched]):  # which the ratio at the step shows
            for name in names:
                self._ways[name].clipped *= factor
        self.writes.append(GradientWrite(op, names, was / delivered if delivered else math.nan, factor, was))

    def _unscales(self, factor: float, dtypes: list[torch.dtype]) -> bool:
        """Whether a factor is a power of two, as scales are, or one over the scale; a division by 1000 rounds."""
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
        if self._overflows and parameter.grad.layout is torch.strided:
            parameter.grad.fill_(math.inf)
        way = self._ways[name]
        if self._scaler is not None:
            before = way.scales if way.gradient is parameter.grad else ()
            way.gradient, way.scales = parameter.grad, (*before, self._scaler.get_scale())
        way.delivered, way.backwards, way.clipped = _norm(parameter.grad), way.backwards + 1, 1.0
        self.overflowed |= not math.isfinite(way.delivered)

    def _stepping(self, optimizer: Optimizer, _args: tuple, kwargs: dict[str, Any]) -> None:
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
                way = self._ways[name]
                ratio, master = _ratio(_norm(parameter.grad), way.delivered), own is not parameter
                known = name, number, ratio, way.backwards, way.clipped, inside, master, way.delivered
                self.stepped.append(SteppedGradient(*known))
                self._ways[name] = _Way()
                self._begun.discard(id(parameter.grad))

    def _compare_scales(self, optimizer: Optimizer, number: int) -> None:
        own = [self._names[id(each)] for each in model_parameters(optimizer) if id(each) in self._names]
        several = [self._ways[name].scales for name in own if len(set(self._ways[name].scales)) > 1]
        if several:
            self.mixed.append(MixedStep(number, tuple(dict.fromkeys(several[0]))))

    def _begin_shadow(self, optimizer: Optimizer, number: int) -> None:
        """Make ready to compare the step of 16-bit weights; an optimizer that cannot be copied is left alone."""
        if ShadowStep.applies_to(optimizer):
            with contextlib.suppress(Exception):
                self._shadows[number] = ShadowStep(optimizer)

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        shadow = self._shadows.pop(number, None) if (number := self._number(optimizer)) is not None else None
        if shadow is not None:
            with contextlib.suppress(Exception):
                self.lost += filter(None, [shadow.compared(number)])

    def _number(self, optimizer: Optimizer) -> int | None:
        return next((n for n, each in enumerate(self._optimizers) if each is optimizer), None)


class _Writes(TorchDispatchMode):
    """Show a watch every op outside of autograd that writes to a gradient."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it stands for would import the compiler, seconds at the first op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable or _current_node() is not None:
            result = func(*args, **kwargs)
            self._watch.in_half |= isinstance(result, Tensor) and result.dtype == torch.float16
            return result
        grads = self._watch.grads()
        written = [grads[each.data_ptr()] for each in _written_by(func, args, kwargs) if each.data_ptr() in grads]
        touched = [(name, grad) for name, grad in written if self._watch.has_values(name, grad)]
        before = [_norm(grad) for _, grad in touched]
        result = func(*args, **kwargs)
        if touched:
            self._watch.written(str(func), touched, before)
        return result


def _written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to, after its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Tensor) and each.layout is torch.strided:
                    yield each


@torch.no_grad()
def _norm(grad: Tensor) -> float:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


def _ratio(seen: float, delivered: float) -> float:
    known = seen > 0 and delivered > 0 and math.isfinite(seen) and math.isfinite(delivered)
    return seen / delivered if known else math.nan


def _is_power_of_two(factor: float) -> bool:
    """Whether a factor is one, up to the rounding of two norms."""
    return factor > 0 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-4
