"""Run somebody's whole training step once, watch what happens to the gradients on their way, and undo it.

    backward     delivers a gradient: its norm is noted
    a write      anything that changes gradients in place: unscaling, clipping; the factor is noted
    step         the optimizer sees a gradient: its norm is noted

What a gradient was multiplied by between backward and step follows from the norms alone, whichever functions did it.
The rules about it are in `gradient_rules`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.amp import Session
from amplab.diagnose.parameter_rules import model_parameters
from amplab.trace.untouched import untouched

__all__ = ["GradientWrite", "Rehearsal", "SteppedGradient", "rehearse"]

_current_node = torch._C._current_autograd_node


class GradientWrite(NamedTuple):
    """An op, outside of autograd, that changed gradients in place.

    Args:
        op: the aten op.
        names: of the parameters whose gradients it changed.
        before: their norm before, divided by the norm that backward had delivered.
        factor: norm after divided by norm before.
        norm: norm before.
    """

    op: str
    names: tuple[str, ...]
    before: float
    factor: float
    norm: float


class SteppedGradient(NamedTuple):
    """A gradient as an optimizer saw it.

    Args:
        name: of the parameter; of the half one where a master is stepped.
        optimizer: number of the optimizer.
        ratio: its norm divided by the norm that backward had delivered; NaN where one of them is 0 or not finite.
        backwards: how many times backward has delivered one since the last step.
        clipped: what writes other than by a power of two have multiplied it by.
        scaled_inside: the optimizer unscales by itself.
        of_master: it is that of a float32 master of a half parameter.
    """

    name: str
    optimizer: int
    ratio: float
    backwards: int
    clipped: float
    scaled_inside: bool
    of_master: bool


@dataclass(frozen=True)
class Rehearsal:
    """What one training step did with its gradients.

    Args:
        scales: the loss scales in force.
        writes: in order.
        stepped: in order, one for each parameter and step.
    """

    scales: tuple[float, ...]
    writes: tuple[GradientWrite, ...]
    stepped: tuple[SteppedGradient, ...]


def rehearse(
    model: nn.Module,
    train_step: Callable[[], Any],
    optimizers: Sequence[Optimizer],
    *,
    amp: Session | torch.amp.GradScaler | None = None,
    stateful: Sequence[Any] = (),
) -> Rehearsal:
    """Run `train_step` once and say what it did with the gradients; then everything is put back.

    Put back are parameters, masters, buffers, gradients, optimizer states, loss scales, random states, and what
    `stateful` names. A batch that `train_step` draws from an iterator is drawn.

    Args:
        model: the model, or a ModuleList of several.
        train_step: forward, backward, step, and whatever lies between.
        optimizers: those that it steps.
        amp: the session or GradScaler in it.
        stateful: anything else that it changes and that has state_dict and load_state_dict: schedulers, averages.

    Sync: many; this is for a look at a loop, once.
    """
    watch = _Watch(model, optimizers)
    with ExitStack() as undo:
        undo.enter_context(_kept(optimizers, [*stateful, *([] if amp is None else [amp])]))
        undo.enter_context(untouched(model))
        undo.enter_context(watch.watching())
        train_step()
    return Rehearsal(_scales(amp), tuple(watch.writes), tuple(watch.stepped))


def _scales(amp: Session | torch.amp.GradScaler | None) -> tuple[float, ...]:
    if amp is None:
        return (1.0,)
    scales = [scaler.scale for scaler in amp.scalers] if isinstance(amp, Session) else [amp.get_scale()]
    return tuple(dict.fromkeys(scales)) or (1.0,)


@contextmanager
def _kept(optimizers: Sequence[Optimizer], stateful: Sequence[Any]) -> Iterator[None]:
    saved = [_OptimizerState.of(optimizer) for optimizer in optimizers]
    states = [(each, copy.deepcopy(each.state_dict())) for each in stateful]
    try:
        yield
    finally:
        for optimizer in saved:
            optimizer.restore()
        for each, state in states:
            if state:  # that of a disabled scaler is empty
                each.load_state_dict(state)


class _OptimizerState(NamedTuple):
    optimizer: Optimizer
    values: list[tuple[Tensor, Tensor, Tensor | None]]
    state: dict[Tensor, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _OptimizerState:
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = [(each, each.detach().clone(), each.grad) for each in params]
        state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(optimizer, values, state, groups)

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value, grad in self.values:
            parameter.copy_(value)
            parameter.grad = grad
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, fields in zip(self.optimizer.param_groups, self.groups, strict=False):
            group.update(fields)


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else copy.copy(state)


@dataclass
class _Way:
    """What is known of one gradient since its last step."""

    delivered: float = math.nan
    backwards: int = 0
    clipped: float = 1.0


class _Watch:
    """Follows the gradients of a model's parameters, by the name of the parameter."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._optimizers = list(optimizers)
        self._ways: dict[str, _Way] = {name: _Way() for name in self._named}
        self._begun: set[int] = set()  # gradients of masters that were written since the last step
        self.writes: list[GradientWrite] = []
        self.stepped: list[SteppedGradient] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as undo:
            for name, parameter in self._named.items():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(lambda each, n=name: self._delivered(n, each))
                    undo.callback(hook.remove)
            # A global hook comes before those of the optimizer, which may hide gradients from a skipped step.
            undo.callback(register_optimizer_step_pre_hook(self._stepping).remove)
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
        if not was or not math.isfinite(was) or not math.isfinite(now) or now == was:
            return
        names = tuple(name for name, _ in touched)
        delivered = math.hypot(*(self._ways[name].delivered for name in names if name in self._ways))
        factor = now / was
        if not _is_power_of_two(factor):  # else it is an unscaling, which the ratio at the step shows
            for name in names:
                self._ways[name].clipped *= factor
        self.writes.append(GradientWrite(op, names, was / delivered if delivered else math.nan, factor, was))

    def _stepped_params(self) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._optimizers:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
                if id(own) in self._names:
                    yield self._names[id(own)], parameter

    def _delivered(self, name: str, parameter: Tensor) -> None:
        way = self._ways[name]
        way.delivered, way.backwards, way.clipped = _norm(parameter.grad), way.backwards + 1, 1.0

    def _stepping(self, optimizer: Optimizer, _args: tuple, kwargs: dict[str, Any]) -> None:
        number = next((n for n, each in enumerate(self._optimizers) if each is optimizer), None)
        if number is None:
            return
        inside = "grad_scaler" in kwargs or getattr(optimizer, "grad_scale", None) is not None
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, own in zip(stepped, model_parameters(optimizer), strict=True):
            name = self._names.get(id(own))
            if name is not None and parameter.grad is not None:
                way = self._ways[name]
                ratio = _ratio(_norm(parameter.grad), way.delivered)
                self.stepped.append(
                    SteppedGradient(name, number, ratio, way.backwards, way.clipped, inside, own is not parameter)
                )
                self._ways[name] = _Way()
                self._begun.discard(id(parameter.grad))


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
            return func(*args, **kwargs)
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
    return torch.linalg.vector_norm(values.float()).item()


def _ratio(seen: float, delivered: float) -> float:
    known = seen > 0 and delivered > 0 and math.isfinite(seen) and math.isfinite(delivered)
    return seen / delivered if known else math.nan


def _is_power_of_two(factor: float) -> bool:
    """Whether a factor is one, up to the rounding of two norms."""
    return factor > 0 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-4
