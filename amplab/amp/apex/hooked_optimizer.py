"""One optimizer under a session: its masters, its gradients around a backward, and its skipped steps.

    enter scale_loss    gradients of earlier backwards are set aside
    leave scale_loss    new gradients are unscaled and added to those; half ones go on to the masters
    before step         a step that is skipped finds every gradient parked, and so changes nothing
    after step          gradients are put back, or the masters rounded into the model

What is written to the model's half weights before the first of these, such as the weights of rank 0, goes on to the
masters. Where there are other ranks masters start from rounded weights, the only ones that ranks come to share.

Official hooks of `torch.optim.Optimizer` only. The scale itself is in `loss_scaler`.
"""

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.model_weights import Uncast, set_values
from amplab.amp.apex.optimizer_names import AmpStash, give_hooks, lend_names, take_names_back
from amplab.amp.backward.gradients import (
    SetAside,
    add_scaled,
    add_unscaled,
    bookkeeping,
    put_back,
    reached_first,
    set_aside,
)
from amplab.amp.backward.loss_scaler import LossScaler
from amplab.amp.backward.optimizer_params import cast_state, follow_model, params_of, replace_params
from amplab.amp.backward.records import StepOutcome
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.policies.casting_mode import resume_casts, suspend_casts
from amplab.policies.running_calls import is_running
from amplab.scalers import FlatGrads, MasterWeights, Unscaler

__all__ = ["HookedOptimizer"]

_NO_STEP_YET = StepOutcome(False, "no step since initialize")
_STEPPED = StepOutcome(True, "parameters updated")
_NO_GRADIENT = StepOutcome(False, "no parameter had a gradient: no backward has reached one since they were cleared")


class _Skip(NamedTuple):
    """An overflow that the next step answers for."""

    loss_id: int
    scaler: LossScaler
    loss_scale: float
    first_nonfinite: str | None


class _Step(NamedTuple):
    """A step that has begun: its frame, the gradients that it must not see, and whether there were any."""

    frame: FrameType
    parked: list[SetAside]
    had_gradients: bool


class HookedOptimizer:
    """What a session keeps about one optimizer; it does not keep the optimizer alive.

    Args:
        optimizer: any optimizer built on `torch.optim.Optimizer`.
        uncast: what its parameters held before the model was cast, for those that were.
        master_weights: let it step float32 masters of its half parameters.
        casts_in_step: False runs ``step`` with casts disabled.
        announce: print a line for each skipped step.
        unscaler: makes what takes the scale out of gradients, one for the optimizer's own and one for the masters'.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        uncast: Mapping[Tensor, Uncast],
        *,
        master_weights: bool,
        casts_in_step: bool,
        announce: bool,
        unscaler: Callable[[], Unscaler] = Unscaler,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        give_hooks(optimizer)
        self.masters = MasterWeights()
        self.outcome = _NO_STEP_YET
        self._master_weights, self._casts_in_step, self._announce = master_weights, casts_in_step, announce
        self._unscaler, self._into_masters = unscaler(), unscaler()
        self._params: list[Tensor] = []
        self._own: list[Tensor] = []
        self._scaled_by: float | None = None
        self._skip: _Skip | None = None
        self._step: _Step | None = None
        self._in_closure, self._in_backward = False, False
        self._take_over(optimizer, uncast)
        lend_names(optimizer, AmpStash(self.masters, self._model_groups, self._flags), self.masters.copy_to_model)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def model_params(self) -> list[Tensor]:
        """The parameters that a backward reaches, in the order of the groups: never masters."""
        return list(itertools.chain.from_iterable(self._model_groups()))

    @property
    def passes_gradients_through(self) -> bool:
        """Whether at scale 1.0 there is nothing to do with its gradients."""
        return not self.masters.pairs and self._scaled_by is None and type(self._unscaler) is Unscaler

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers that gradients lie in: those of its own, then those of its masters."""
        return self._unscaler.buffers + self._into_masters.buffers

    def set_grads_aside(self) -> list[SetAside]:
        """Clear the way for a backward; the gradients that are there keep out of its unscaling."""
        if not self._in_closure:
            self._leave_step()
        self._in_backward = True
        self._refresh()
        self._follow_edits()
        halves = [pair.model for pair in self.masters.pairs]
        if self._scaled_by is None:
            # Whatever lies on the half parameters came from a backward that belonged to other optimizers.
            for param in halves:
                param.grad = None
        return set_aside([*self._own, *halves], copy_shared=type(self._unscaler) is Unscaler)

    def put_grads_back(self, aside: list[SetAside]) -> None:
        """Undo `set_grads_aside` after a backward that failed; what it left behind is dropped."""
        self._in_backward = False
        for param in [*self._own, *(pair.model for pair in self.masters.pairs)]:
            param.grad = None
        put_back(aside)

    @torch.no_grad()
    def keep_scaled(self, aside: list[SetAside], scale: float) -> None:
        """Add up gradients that stay scaled by ``scale`` until a later backward unscales them all."""
        add_scaled(aside, scale / (self._scaled_by or 1.0))
        self._scaled_by, self._in_backward = scale, False

    @torch.no_grad()
    def unscale(self, aside: list[SetAside], scale: float, found_inf: Tensor | None) -> Tensor:
        """Unscale the new gradients, and bring those of half parameters to their masters.

        Returns:
            ``(1,)`` float32, 1.0 where one of them is inf or NaN.

        Sync: none.
        """
        if self._scaled_by is not None:
            self.keep_scaled(aside, scale)
            self._scaled_by, aside = None, []
        self._in_backward = False
        found_inf = add_unscaled(self._own, aside, scale, self._unscaler, found_inf)
        if self.masters.pairs:
            place = self._into_masters.place
            found_inf = self.masters.unscale_grads(scale, accumulate=True, found_inf=found_inf, place=place)
            for pair in self.masters.pairs:
                pair.model.grad = None
            self._into_masters.settle(self._masters())
        return found_inf

    def flat_grads(self) -> FlatGrads:
        """What the optimizer is going to step with, in as few tensors as it lies in: flat buffers where combined.

        Raises:
            RuntimeError: gradients wait scaled.

        Sync: none.
        """
        if self._scaled_by is not None:
            raise RuntimeError(
                f"The gradients are still scaled by {self._scaled_by}, after delay_unscale=True: clip them when the "
                "last backward before the step has unscaled them."
            )
        self._refresh()
        own, masters = self._unscaler.flat_grads(self._own), self._into_masters.flat_grads(self._masters())
        return FlatGrads(own.tensors + masters.tensors, own.parts + masters.parts)

    def first_nonfinite(self) -> Tensor | None:
        """Return the model's parameter whose non-finite gradient backward reached first. Sync: many."""
        reached = reached_first(self._current_params())
        if reached is None:
            return None
        return next((pair.model for pair in self.masters.pairs if pair.master is reached), reached)

    def skip_next_step(self, loss_id: int, scaler: LossScaler, loss_scale: float, first_nonfinite: str | None) -> None:
        """Let the next step change nothing; of several overflows before it the first one counts.

        Raises:
            RuntimeError: called from the closure of a step, which cannot be skipped any more.
        """
        if self._in_closure:
            raise RuntimeError(
                f"The gradients overflowed at loss scale {loss_scale} inside the closure of "
                f"{type(self._optimizer()).__name__}.step(), which cannot be skipped half-way. The scale is now "
                f"{scaler.scale}: call step(closure) again, or use a static loss_scale."
            )
        self._skip = self._skip or _Skip(loss_id, scaler, loss_scale, first_nonfinite)

    def release(self) -> Optimizer | None:
        """Take the hooks off and give the optimizer back the model's parameters, with the masters' float32 values.

        Returns:
            The optimizer, if there still is one. State of parameters that are cast back later is left to do.
        """
        self._leave_step()
        self._follow_edits()
        for handle in self._handles:
            handle.remove()
        if self._scaled_by is not None:
            for param, grad in set_aside(self._own):
                param.grad = grad / self._scaled_by
        by_master = {id(pair.master): pair.model for pair in self.masters.pairs}
        for pair in self.masters.pairs:
            pair.model.grad = None
            set_values(pair.model, pair.master.data)
            pair.model.grad = pair.master.grad
        optimizer = self._optimizer()
        if optimizer is not None:
            take_names_back(optimizer)
            replace_params(optimizer, lambda param: by_master.get(id(param), param))
        return optimizer

    def _take_over(self, optimizer: Optimizer, uncast: Mapping[Tensor, Uncast]) -> None:
        self._refresh()
        for pair in self.masters.pairs:
            if pair.model in uncast:  # the values that the model has rounded
                values, grad = uncast[pair.model]
                if not _has_other_ranks():
                    pair.master.data = values.float()
                pair.master.grad = None if grad is None else grad.float()
                pair.model.grad = None
        for param in self._own:
            if param in uncast:
                cast_state(optimizer, param)
        self.masters.watch_model()

    def _follow_edits(self) -> None:
        """Let masters take what was written to the model since `initialize` or ``load_state_dict``; later edits not."""
        self.masters.follow_edits()
        self.masters.stop_watching()

    def _model_groups(self) -> list[list[Tensor]]:
        optimizer = self._optimizer()
        by_master = {id(pair.master): pair.model for pair in self.masters.pairs}
        groups = [] if optimizer is None else optimizer.param_groups
        return [[by_master.get(id(param), param) for param in group["params"]] for group in groups]

    def _masters(self) -> list[Tensor]:
        return [pair.master for pair in self.masters.pairs]

    def _flags(self) -> tuple[bool, bool]:
        """Whether a skip is due, and whether gradients wait scaled."""
        return self._skip is not None, self._scaled_by is not None

    def _current_params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else list(params_of(optimizer))

    def _refresh(self) -> None:
        """Meet parameters that were added to a group since, and masters whose model has moved."""
        optimizer, params = self._optimizer(), self._current_params()
        for pair in self.masters.pairs if optimizer is not None else ():
            if pair.model.device != pair.master.device or pair.model.dtype not in LOW_PRECISION_DTYPES:
                follow_model(optimizer, pair.model, pair.master)
        if optimizer is None or (len(params) == len(self._params) and all(map(operator.is_, params, self._params))):
            return
        if self._master_weights:
            replace_params(optimizer, lambda param: self.masters.add_pairs([param])[0])
        masters = {id(pair.master) for pair in self.masters.pairs}
        self._params = self._current_params()
        self._own = [param for param in self._params if id(param) not in masters]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch runs no hook after a step that raises, so state that is valid during the step is tied to its frame.
        # torch runs the hooks again for super().step() of a subclass: those calls are part of the step that runs.
        frame = sys._getframe(1)
        if self._step is not None and is_running(self._step.frame):
            return None
        self._leave_step()
        if self._in_backward:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside of the block of scale_loss, where gradients are still "
                "scaled: call it after the block."
            )
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        with bookkeeping():
            if self._skip is not None or not self.passes_gradients_through:
                self._follow_edits()
                self._refuse_scaled_grads(optimizer)
            had_gradients = any(param.grad is not None for param in params_of(optimizer))
            parked = set_aside(self._current_params()) if self._skip else []
        self._step = _Step(frame, parked, had_gradients)
        if not self._casts_in_step:
            suspend_casts(frame)
        return None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure`` so wrapped that a backward inside it is known to run within a step."""
        if self._skip is not None or self.masters.pairs:
            raise RuntimeError(
                "Currently, Amp does not support closure use with optimizers. Call step() without a closure, after "
                "scale_loss; optimizers that need one work without masters (O0, O1, O3), with a static loss_scale."
            )

        def run() -> Any:
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return run

    def _refuse_scaled_grads(self, optimizer: Optimizer) -> None:
        if self._scaled_by is not None and self._skip is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() with gradients still scaled by {self._scaled_by}: the last "
                "backward before a step must run in scale_loss without delay_unscale=True."
            )
        pairs = self.masters.pairs
        if all(pair.master.grad is None for pair in pairs) and any(pair.model.grad is not None for pair in pairs):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() found gradients on half parameters that never reached their "
                "masters: run the backward in `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`."
            )

    def _after_step(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._step is not None and self._step.frame is not sys._getframe(1):
            return
        empty = self._step is not None and not self._step.had_gradients
        self._leave_step()
        if self.masters.pairs:
            with bookkeeping():
                if self._skip is None:
                    self.masters.copy_to_model()
                for pair in self.masters.pairs:
                    pair.master.grad = None
        done = _NO_GRADIENT if empty else _STEPPED
        self.outcome = done if self._skip is None else self._skipped(self._skip)
        self._skip = None

    def _leave_step(self) -> None:
        """End the step, or what is left of one that raised."""
        step, self._step = self._step, None
        if step is not None:
            resume_casts(step.frame)
            put_back(step.parked)

    def _skipped(self, skip: _Skip) -> StepOutcome:
        where = f", first in the gradient of {skip.first_nonfinite}" if skip.first_nonfinite else ""
        reason = f"gradient overflow at loss scale {skip.loss_scale} of loss scaler {skip.loss_id}{where}"
        if self._announce:
            print(  # noqa: T201  the line that apex prints
                f"Gradient overflow.  Skipping step, loss scaler {skip.loss_id} "
                f"reducing loss scale to {skip.scaler.scale}"
            )
        return StepOutcome(False, reason, skip.first_nonfinite)


def _has_other_ranks() -> bool:
    """Whether a group of several processes runs, whose ranks a wrapper may give the half weights of rank 0."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
