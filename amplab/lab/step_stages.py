"""One training step recorded in its stages: what the tensors of each parameter were before and after each of them.

    cast weights → forward → loss × scale → backward → unscale, check → clip → step or skip → update scale

The step is a real one, run once and as a whole; no stage is computed a second time. Official hooks copy what they see
and return nothing, so the step is bit for bit the one that would have run without them::

    stage               seen by
    cast weights        the session's cache of cast weights, after each forward of the layer and of its parents
    forward             a forward hook of the layer
    loss × scale        the experiment, when it calls backward
    backward            hooks of the layer's output, of the cast weight, and of the parameter
    unscale, check      the session's `ScaleRecord`
    clip                a step pre-hook of the optimizer: the gradients have changed since the check
    step or skip        a step post-hook of the optimizer
    update scale        the state of the loss scaler before and after the step

A hook that fails is noted in `StepStages.problems`; the step goes on. The widgets are in `amplab.views`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from amplab.amp import ScaleRecord, Session
from amplab.formats.exponents import BINS, LOWEST_EXPONENT
from amplab.formats.stored_values import stored_values
from amplab.kernels import TensorStats, tensor_stats
from amplab.policies.casting.function_modes import without_function_modes
from amplab.scalers import DynamicScale
from amplab.trace.optimizer_hooks import once_a_step

if TYPE_CHECKING:
    from amplab.lab.events import StepRecord

__all__ = [
    "KEPT",
    "GradientCheck",
    "ParameterStages",
    "ScaleChange",
    "Snapshot",
    "StageRecorder",
    "StepStages",
    "snapshot",
]

KEPT = 2**18
"""Elements that a snapshot copies; its statistics are of all elements."""

BUDGET = 2**23
"""Elements of all recorded parameters together; those of a larger model are left out, the chosen one first in."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A tensor at one moment of a step.

    Attributes:
        name: What it is, such as "hidden1.weight".
        dtype: Its dtype.
        shape: Its shape.
        kept: `(kept,)` in its dtype on the CPU: the first `KEPT` elements, of an activation those of its first sample.
        kept_shape: Shape of what `kept` begins: `shape`, or for an activation the shape of a sample.
        stats: Statistics of all elements.
        mean: Mean of the finite magnitudes, 0 if there are none.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: Tensor
    kept_shape: tuple[int, ...]
    stats: TensorStats
    mean: float

    @property
    def nonfinite(self) -> int:
        """How many elements are inf or NaN."""
        return self.stats.infs + self.stats.nans

    def value(self, index: int) -> float:
        """Return a kept element as a float."""
        return float(self.kept[index].item())


def snapshot(name: str, tensor: Tensor, *, sample: bool = False) -> Snapshot:
    """Copy a tensor and measure it.

    Args:
        name: What it is.
        tensor: Floating-point, any shape, any device; not modified. A sparse one is copied as a dense one.
        sample: Keep only the first entry along the first dimension, if there are several dimensions.

    Sync: a few.
    """
    with torch.no_grad(), without_function_modes():
        values = tensor.detach()
        values = values.to_dense() if values.is_sparse else values
        (stats,) = tensor_stats([values], low=LOWEST_EXPONENT, bins=BINS).read()
        magnitudes = values.double().abs()
        finite = magnitudes[magnitudes.isfinite()]
        shown = values[0] if sample and values.ndim > 1 and len(values) else values
        kept = shown.reshape(-1)[:KEPT].to("cpu", copy=True)
        mean = float(finite.mean().item()) if finite.numel() else 0.0
        return Snapshot(name, values.dtype, tuple(values.shape), kept, tuple(shown.shape), stats, mean)


@dataclass(frozen=True, eq=False)
class ParameterStages:
    """What one parameter, its gradient and its layer were in the stages of a step; None where nothing was seen.

    Attributes:
        name: Of the parameter, as the model names it.
        layer: Path of the module that owns it, empty for the model itself.
        kind: Class of that module.
        stored: What the optimizer steps, before the step: the parameter, or its float32 master.
        used: What the forward read: a cast copy, or the parameter as the model stores it.
        has_master: Whether `stored` is a float32 master.
        is_cast: Whether `used` is a copy that was cast for this step.
        inputs: First floating-point argument of the layer.
        outputs: What the layer returned.
        output_gradient: Gradient of the scaled loss with respect to `outputs`.
        computed: Gradient of the cast copy, in its dtype; None without a cast copy.
        scaled: Gradient of the parameter after backward.
        unscaled: Gradient of what the optimizer steps, after unscaling.
        clipped: The same just before the optimizer's step, if it had changed.
        stepped: What the optimizer steps, after its step, also after a skipped one.
        copied: The model's parameter after that, if `stored` is a master.
        backwards: How many backwards reached the parameter before the optimizer's step; the last one is recorded.
        check: Number of the check of its gradients among `StepStages.checks`; None if they were not checked.
        skipped: Whether the optimizer's step changed nothing.
    """

    name: str
    layer: str
    kind: str
    stored: Snapshot
    used: Snapshot
    has_master: bool
    is_cast: bool = False
    inputs: Snapshot | None = None
    outputs: Snapshot | None = None
    output_gradient: Snapshot | None = None
    computed: Snapshot | None = None
    scaled: Snapshot | None = None
    unscaled: Snapshot | None = None
    clipped: Snapshot | None = None
    stepped: Snapshot | None = None
    copied: Snapshot | None = None
    backwards: int = 0
    check: int | None = None
    skipped: bool = False


@dataclass(frozen=True)
class ScaleChange:
    """The loss scaler in one step.

    Attributes:
        before: Scale of the step.
        after: Scale of the next step.
        clean_before: Steps without overflow since the scale last moved, before the step.
        clean_after: The same after the step.
        growth_interval: Clean steps after which the scale grows; None for a static scale.
        skips: Whether an overflow skips the step.
    """

    before: float
    after: float
    clean_before: int
    clean_after: int
    growth_interval: int | None
    skips: bool


@dataclass(frozen=True, eq=False)
class GradientCheck:
    """A loss, its backward, and the check of the gradients. A step has several if it has several losses.

    Attributes:
        loss: The loss before scaling; None if it was not seen.
        scaled_loss: What backward started from.
        scale: The loss scaler.
        checked: Gradients that were checked, over all parameters of the optimizers that the backward reached.
        nonfinite: How many of them were inf or NaN.
        skipped: Whether the next step of these optimizers is skipped.
    """

    loss: Snapshot | None
    scaled_loss: Snapshot | None
    scale: ScaleChange
    checked: int
    nonfinite: int
    skipped: bool


@dataclass(frozen=True, eq=False)
class StepStages:
    """One recorded training step.

    Attributes:
        record: The step, as in the history.
        checks: Its losses and the checks of their gradients, in order.
        optimizers: Class of each optimizer.
        parameters: What was recorded, by the parameter's name in the model's order.
        left_out: Names of parameters that were not recorded, because the model is large.
        problems: What could not be recorded, and why.
    """

    record: StepRecord
    checks: tuple[GradientCheck, ...]
    optimizers: tuple[str, ...]
    parameters: dict[str, ParameterStages]
    left_out: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(eq=False)
class _Watched:
    """A parameter during the step: what is known so far, and whether its optimizer has stepped."""

    weight: Tensor
    stepped: Tensor
    optimizer: int
    layer: nn.Module
    seen: ParameterStages
    copy: weakref.ref[Tensor] | None = None  # the last cast copy that was seen
    has_new_gradient: bool = False
    is_done: bool = False

    def note(self, **seen: Any) -> None:
        if not self.is_done:
            self.seen = replace(self.seen, **seen)


class StageRecorder:
    """Records the step that runs in its block.

        with StageRecorder(model, [optimizer], session) as recorder:
            record = train_one_step()          # calls recorder.see_loss(loss, scaled) before backward
        stages = recorder.stages(record)

    Args:
        model: The model, initialized by the session.
        optimizers: Its optimizers, initialized by the session.
        session: The session.
        first: Name of the parameter that is recorded even if the model is too large to record all.

    Sync: several; a step takes the time of a few.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        session: Session,
        *,
        first: str | None = None,
    ) -> None:
        self._model, self._optimizers, self._session, self._first = model, tuple(optimizers), session, first
        self._watched: dict[str, _Watched] = {}
        self._left_out: list[str] = []
        self._problems: list[str] = []
        self._undo: list[Callable[[], object]] = []
        self._loss: Snapshot | None = None
        self._scaled_loss: Snapshot | None = None
        self._checks: list[GradientCheck] = []
        self._clean_steps: list[int] = []  # of each loss scaler, before its next change

    def __enter__(self) -> Self:
        """Copy the parameters and install the hooks."""
        try:
            self._clean_steps = [scaler.state.clean_steps for scaler in self._session.scalers]
            self._choose()
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Remove every hook."""
        self._remove()

    def see_loss(self, loss: Tensor, scaled: Tensor) -> None:
        """Note the loss before scaling, and what backward starts from. Sync: a few."""
        self._attempt("the loss", lambda: self._note_loss(loss, scaled))

    def stages(self, record: StepRecord) -> StepStages:
        """Return what was recorded of the step that `record` describes."""
        return StepStages(
            record=record,
            checks=tuple(self._checks),
            optimizers=tuple(type(optimizer).__name__ for optimizer in self._optimizers),
            parameters={name: each.seen for name, each in self._watched.items()},
            left_out=tuple(self._left_out),
            problems=tuple(self._problems),
        )

    # -- before the step ---------------------------------------------------------------------------

    def _choose(self) -> None:
        """Decide what to record, and copy it as it is before the step."""
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        found: dict[str, tuple[Tensor, Tensor, int]] = {}
        for number, optimizer in enumerate(self._optimizers):
            pairs = zip(self._session.model_params(optimizer), self._session.master_params(optimizer), strict=True)
            for weight, stepped in pairs:
                if id(weight) in names and weight.requires_grad and weight.is_floating_point():
                    found[names[id(weight)]] = weight, stepped, number
        ordered = [name for name in names.values() if name in found]  # as the model orders them
        left = BUDGET
        for name in sorted(ordered, key=lambda each: each != self._first):
            left -= found[name][0].numel()
            if left >= 0 or name == self._first:
                self._attempt(name, partial(self._watch, name, *found[name]))
            else:
                self._left_out.append(name)
        self._watched = {name: self._watched[name] for name in ordered if name in self._watched}

    def _watch(self, name: str, weight: Tensor, stepped: Tensor, optimizer: int) -> None:
        path = name.rpartition(".")[0]
        layer = self._model.get_submodule(path)
        stored = snapshot(name, stepped)
        used = stored if stepped is weight else snapshot(name, weight)
        seen = ParameterStages(name, path, type(layer).__name__, stored, used, has_master=stepped is not weight)
        self._watched[name] = _Watched(weight, stepped, optimizer, layer, seen)

    def _install(self) -> None:
        self._undo.append(self._session.subscribe(self._on_check))
        for layer in {id(each.layer): each.layer for each in self._watched.values()}.values():
            self._keep(layer.register_forward_hook(self._after_forward, with_kwargs=True))
        for path, module in self._model.named_modules():
            inside = [each for each in self._watched.values() if f"{each.seen.layer}.".startswith(path and f"{path}.")]
            if inside:  # a parent may read a weight without calling the module that owns it
                self._keep(module.register_forward_hook(partial(self._look_for_casts, inside)))
        for each in self._watched.values():
            self._keep(each.weight.register_post_accumulate_grad_hook(self._gradient_hook(each)))
        for number, optimizer in enumerate(self._optimizers):
            self._keep(optimizer.register_step_pre_hook(self._step_hook(number, self._before_step)))
            self._keep(optimizer.register_step_post_hook(self._step_hook(number, self._after_step)))

    def _keep(self, hook: torch.utils.hooks.RemovableHandle) -> None:
        self._undo.append(hook.remove)

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    # -- during the step ---------------------------------------------------------------------------

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        """Call `act`; the step goes on if it fails."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - what cannot be shown must not end the run
            self._problems.append(f"{what}: {type(error).__name__}: {error}")

    def _after_forward(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if layer.training and torch.is_grad_enabled():  # else it measures the score
            owned = [each for each in self._watched.values() if each.layer is layer and not each.is_done]
            if owned:
                label = owned[0].seen.layer or "the model"
                self._attempt(label, partial(self._see_forward, owned, label, (args, kwargs), output))

    def _see_forward(self, owned: list[_Watched], label: str, arguments: Any, output: Any) -> None:
        given, returned = _first_floating(arguments), _first_floating(output)
        inputs = None if given is None else snapshot(f"input of {label}", given, sample=True)
        outputs = None if returned is None else snapshot(f"output of {label}", returned, sample=True)
        for each in owned:
            each.note(inputs=inputs, outputs=outputs)
        if returned is not None:
            self._follow(returned, owned, "output_gradient", f"gradient of the output of {label}", sample=True)

    def _look_for_casts(self, inside: list[_Watched], module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            for each in inside:
                if not each.is_done:
                    self._attempt(each.seen.name, partial(self._see_cast, each))

    def _see_cast(self, each: _Watched) -> None:
        engine = self._session.engine
        for copy in () if engine is None else engine.cache.copies_of(each.weight):
            if each.copy is None or each.copy() is not copy:
                each.copy = weakref.ref(copy)
                each.note(used=snapshot(f"{each.seen.name}, cast", copy), is_cast=True)
                self._follow(copy, [each], "computed", f"gradient of {each.seen.name}, cast", sample=False)

    def _follow(self, tensor: Tensor, seen_by: list[_Watched], stage: str, name: str, *, sample: bool) -> None:
        """Copy the gradient of `tensor` when backward computes it."""

        def copy(grad: Tensor) -> None:
            taken = snapshot(name, grad, sample=sample)
            for each in seen_by:
                each.note(**{stage: taken})

        def see(grad: Tensor) -> None:
            self._attempt(name, partial(copy, grad))

        with without_function_modes():
            if tensor.requires_grad:
                self._keep(tensor.register_hook(see))

    def _gradient_hook(self, each: _Watched) -> Callable[[Tensor], None]:
        name = f"gradient of {each.seen.name}"

        def see(weight: Tensor) -> None:
            with without_function_modes():
                grad = weight.grad
            if grad is not None and not each.is_done:
                each.has_new_gradient = True
                each.note(backwards=each.seen.backwards + 1)
                self._attempt(name, lambda: each.note(scaled=snapshot(name, grad)))

        return see

    def _note_loss(self, loss: Tensor, scaled: Tensor) -> None:
        self._loss, self._scaled_loss = snapshot("loss", loss), snapshot("loss × scale", scaled)

    def _on_check(self, record: ScaleRecord) -> None:
        reached = [each for each in self._watched.values() if each.has_new_gradient and not each.is_done]
        self._attempt("the check", partial(self._note_check, record, {each.optimizer for each in reached}))
        for each in reached:
            each.has_new_gradient = False
            self._attempt(each.seen.name, partial(self._see_unscaled, each))

    def _note_check(self, record: ScaleRecord, optimizers: set[int]) -> None:
        with torch.no_grad(), without_function_modes():
            grads = [grad for number in optimizers for grad in _gradients(self._session, self._optimizers[number])]
            stats = tensor_stats(grads).read() if grads else ()
        change = self._scale_change(record)
        checked, nonfinite = sum(each.numel for each in stats), sum(each.infs + each.nans for each in stats)
        made = GradientCheck(self._loss, self._scaled_loss, change, checked, nonfinite, record.skipped)
        self._checks.append(made)

    def _scale_change(self, record: ScaleRecord) -> ScaleChange:
        scaler, number = self._session.scalers[record.loss_id], record.loss_id
        before, self._clean_steps[number] = self._clean_steps[number], scaler.state.clean_steps
        interval = scaler.rule.growth_interval if isinstance(scaler.rule, DynamicScale) else None
        return ScaleChange(
            before=record.loss_scale,
            after=record.next_loss_scale,
            clean_before=before,
            clean_after=scaler.state.clean_steps,
            growth_interval=interval,
            skips=scaler.dynamic,
        )

    def _see_unscaled(self, each: _Watched) -> None:
        with without_function_modes():
            grad = each.stepped.grad
        seen = None if grad is None else snapshot(f"gradient of {each.seen.name}, unscaled", grad)
        each.note(unscaled=seen, check=len(self._checks) - 1)

    def _step_hook(self, number: int, see: Callable[[_Watched], None]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for each in self._watched.values():
                if each.optimizer == number and not each.is_done:
                    self._attempt(each.seen.name, partial(see, each))

        return once_a_step(hook, self._optimizers[number])

    def _before_step(self, each: _Watched) -> None:
        with without_function_modes():
            grad = each.stepped.grad
        checked = each.seen.unscaled
        if grad is None or checked is None:  # the gradients of a skipped step are parked
            return
        now = snapshot(f"gradient of {each.seen.name}, clipped", grad)
        same = torch.equal(now.kept.nan_to_num(), checked.kept.nan_to_num()) and now.mean == checked.mean
        if not same:
            each.note(clipped=now)

    def _after_step(self, each: _Watched) -> None:
        name = each.seen.name
        outcome = self._session.last_step(self._optimizers[each.optimizer])
        each.note(stepped=snapshot(name, each.stepped), skipped=not outcome.stepped)
        if each.seen.has_master:
            each.note(copied=snapshot(name, each.weight))
        each.is_done = True


def _gradients(session: Session, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for weight in session.master_params(optimizer):
        grad = weight.grad
        if grad is not None and grad.is_floating_point():
            yield stored_values(grad)


def _first_floating(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        with without_function_modes():
            return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _first_floating(each)) is not None), None)
    return None
