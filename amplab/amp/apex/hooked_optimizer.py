"""One optimizer of a session: its masters, its gradients around a backward, and its skipped steps.

    scale_loss      new gradients are unscaled and added to earlier ones; half ones go to the float32 masters
    before step     a skipped step is taken by an optimizer `without_parameters`, and gradients are parked
    after step      parked gradients are put back, or the masters are written back to the model

Values that are written to half weights before the first of these (rank 0's weights, for example) reach the masters.
With several ranks masters start from rounded weights, since DistributedDataParallel sends rounded weights only; with
``combine_ddp`` they start from the values before rounding, which `initialize` has sent.

Uses the official hooks of `torch.optim.Optimizer` only.
"""

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amplab.amp.apex.clear_mark import ClearMark
from amplab.amp.apex.iteration_state import keep_of, use
from amplab.amp.apex.model_weights import Uncast, set_values
from amplab.amp.apex.optimizer_names import AmpStash, give_hooks, lend_names, take_names_back
from amplab.amp.backward.gradients import (
    SetAside,
    add_scaled,
    add_unscaled,
    gradients_of,
    put_back,
)
from amplab.amp.backward.optimizer_attributes import optimizers_in
from amplab.amp.backward.optimizer_params import cast_state, follow_model, replace_params
from amplab.amp.backward.records import ScaleRecord, StepOutcome
from amplab.amp.backward.without_parameters import without_parameters
from amplab.formats import LOW_PRECISION_DTYPES
from amplab.parallel.combined_reducer import CombinedReducer
from amplab.parallel.ranks import has_other_ranks, is_alone
from amplab.parallel.shards import RankGroup, agree_on_found_inf, rank_groups
from amplab.policies.casting.function_modes import without_function_modes
from amplab.policies.casting.thread_scopes import is_running, resume_casts, suspend_casts
from amplab.scalers import CombinedUnscaler, FlatGrads, MasterWeights, Unscaler, is_sharded, local_shard

__all__ = ["HookedOptimizer", "await_shards"]

_NO_STEP_YET = StepOutcome(False, "no step since initialize")
_STEPPED = StepOutcome(True, "parameters updated")
_NO_GRADIENT = StepOutcome(
    False, "no parameter had a gradient: no backward has reached one since gradients were cleared"
)


_OUTSIDE = {
    "_scaled_by": None,
    "_mark": None,
    "_kept_by_fsdp": False,
    "_overflow": None,
    "_step": None,
    "_in_closure": False,
    "_in_backward": False,
}
"""What a `HookedOptimizer` has noted outside of an iteration; a tool that runs a step meanwhile finds this."""


class _Overflow(NamedTuple):
    """The overflow for which the next step is skipped; `current_scale` returns the present scale of its loss."""

    record: ScaleRecord
    current_scale: Callable[[], float]
    had_gradients: bool


class _Step(NamedTuple):
    """A step that is running: its frame, the gradients that are parked, and whether there were any."""

    frame: FrameType
    parked: list[SetAside]
    had_gradients: bool


class HookedOptimizer:
    """The hooks of a session on one optimizer, and its masters. It holds the optimizer weakly.

    Args:
        optimizer: any subclass of `torch.optim.Optimizer`.
        uncast: the values of its parameters before the model was cast, for those that were.
        master_weights: step float32 masters of its half parameters.
        casts_in_step: whether ``step`` runs with casts.
        announce: print a line for each skipped step.
        unscaler: makes an unscaler; one is used for the optimizer's own gradients, one for those of the masters.
        reducer: averages gradients over ranks before they are unscaled; needs a `CombinedUnscaler`. None: no averages.

    Attributes:
        masters: the float32 masters of its half parameters.
        outcome: of the last step.
        rank_groups: the ranks that hold the shards of its parameters; empty if this rank holds all elements.
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
        reducer: CombinedReducer | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        for each in optimizers_in(optimizer):
            give_hooks(each)
        self.masters = MasterWeights()
        self.outcome = _NO_STEP_YET
        self._master_weights, self._casts_in_step, self._announce = master_weights, casts_in_step, announce
        self._unscaler, self._into_masters = unscaler(), unscaler()
        self._reducer = reducer
        self.rank_groups: tuple[RankGroup, ...] = ()
        self._params: list[Tensor] = []
        self._own: list[Tensor] = []
        self._scaled_by: float | None = None
        self._mark: ClearMark | None = None  # on the masters, while gradients are still scaled
        self._unscaled: list[SetAside] = []  # what `release` makes of gradients that are still scaled
        self._kept_by_fsdp = False  # whether fully_shard keeps gradients scaled by _scaled_by, for a later backward
        self._overflow: _Overflow | None = None
        self._step: _Step | None = None
        self._steps = 0  # with gradients, skipped ones too; not those of a tool that runs on this rank alone
        self._in_closure, self._in_backward = False, False
        keep_of(self, "outcome", "_unscaled", "_steps", **_OUTSIDE)
        keep_of(self.masters, "_watched", user=self, _are_ahead=False, _step=None)
        self._take_over(optimizer, uncast)
        if reducer is not None:
            reducer.prepare(self._own, self.halves)
        lend_names(optimizer, AmpStash(self.masters, self._model_groups, self._flags), self.masters.copy_to_model)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _take_over(self, optimizer: Optimizer, uncast: Mapping[Tensor, Uncast]) -> None:
        self._refresh()
        for pair in self.masters.pairs:
            if pair.model in uncast:  # the values before rounding
                values, grad = uncast[pair.model]
                # Else a wrapper may send the half weights of rank 0 to the others.
                if self._reducer is not None or not has_other_ranks():
                    pair.master.data = values.float()
                pair.master.grad = None if grad is None else grad.float()
                pair.model.grad = None
        for param in self._own:
            if param in uncast:
                cast_state(optimizer, param)
        self.masters.watch_model()

    def release(self) -> None:
        """Remove the hooks and return the model's parameters to the optimizer, with the masters' float32 values.

        The caller casts the state of parameters that it casts back. A second call finishes what an interrupt has left.
        """
        self._end_step()
        self._follow_edits()
        self._remove_mark()
        for handle in self._handles:
            handle.remove()
        if self._reducer is not None:
            self._reducer.release()
        if self._scaled_by is not None:
            self._unscaled = [SetAside(param, grad / self._scaled_by) for param, grad in gradients_of(self._own)]
            self._scaled_by = None
        put_back(self._unscaled)
        by_master = {id(pair.master): pair.model for pair in self.masters.pairs}
        for pair in self.masters.pairs:
            pair.model.grad = None
            set_values(pair.model, pair.master.data)
            pair.model.grad = pair.master.grad
        optimizer = self._optimizer()
        if optimizer is not None:
            take_names_back(optimizer)
            replace_params(optimizer, lambda param: by_master.get(id(param), param))

    # -- its parameters ----------------------------------------------------------------------------

    @property
    def model_params(self) -> list[Tensor]:
        """The model's parameters in the order of the groups, without masters."""
        return list(itertools.chain.from_iterable(self._model_groups()))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The flat gradient buffers: first those of parameters shared with the model, then those of masters."""
        return self._unscaler.buffers + self._into_masters.buffers

    @property
    def sent_buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers in which gradients are averaged over ranks; those of `buffers` may be among them."""
        return () if self._reducer is None else self._reducer.buffers

    @property
    def copies_shared(self) -> bool:
        """As `ReachedGradients`: gradients that are in no flat buffer are where the backward made them."""
        return self._reducer is not None or not self._unscaler.buffers

    def _model_groups(self) -> list[list[Tensor]]:
        optimizer = self._optimizer()
        by_master = {id(pair.master): pair.model for pair in self.masters.pairs}
        groups = [] if optimizer is None else optimizer.param_groups
        return [[by_master.get(id(param), param) for param in group["params"]] for group in groups]

    def _masters(self) -> list[Tensor]:
        return [pair.master for pair in self.masters.pairs]

    def pending_gradients(self) -> list[Tensor]:
        """Return the masters; see `keep_of`."""
        return self._masters()

    @property
    def halves(self) -> list[Tensor]:
        """The model's parameters that have a master."""
        return [pair.model for pair in self.masters.pairs]

    def _current_params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]

    def _refresh(self) -> None:
        """Handle parameters that were added to a group, and masters whose model has moved to another device."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for pair in self.masters.pairs:
            if pair.model.device != pair.master.device or pair.model.dtype not in LOW_PRECISION_DTYPES:
                follow_model(optimizer, pair.model, pair.master)
        params = self._current_params()
        if len(params) == len(self._params) and all(map(operator.is_, params, self._params)):
            return
        if self._master_weights:
            replace_params(optimizer, lambda param: self.masters.add_pairs([param])[0])
        masters = {id(pair.master) for pair in self.masters.pairs}
        self._params = self._current_params()
        self._own = [param for param in self._params if id(param) not in masters]
        self.rank_groups = rank_groups(self._own)
        if self.rank_groups:  # a flat buffer has no DTensor as its part
            self._unscaler = Unscaler()

    def _follow_edits(self) -> None:
        """Copy what was written to the model since `initialize` or ``load_state_dict`` to the masters, once."""
        self.masters.follow_edits()
        self.masters.stop_watching()

    def _flags(self) -> tuple[bool, bool]:
        """Whether the next step is skipped, and whether gradients are still scaled."""
        return self._overflow is not None, self._scaled_by is not None

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether these are the hooks on ``optimizer``."""
        return self._optimizer() is optimizer

    # -- around a backward -------------------------------------------------------------------------

    @property
    def passes_gradients_through(self) -> bool:
        """Whether its gradients need no work at scale 1.0."""
        return not self.masters.pairs and self._scaled_by is None and type(self._unscaler) is Unscaler

    def before_backward(self) -> list[Tensor]:
        """Prepare for a backward; return the parameters whose gradients it may write."""
        use(self)
        self._forget_cleared_overflow()
        if not self._in_closure:
            self._end_step()
        self._in_backward = True
        self._refresh()
        self._follow_edits()
        halves = self.halves
        if self._mark is not None and self._mark.is_cleared:
            self._mark = self._scaled_by = None
        if self._scaled_by is None:
            for param in halves:  # gradients from a backward that belonged to other optimizers
                param.grad = None
        if self._reducer is not None:
            self._reducer.follow(self._own, halves)
        return [*self._own, *halves]

    def factor_in_place(self, scale: float) -> float | None:
        """Return the factor of gradients that are scaled already, which the coming backward averages over ranks."""
        if self._scaled_by is None or self._reducer is not None or not has_other_ranks():
            return None
        return scale / self._scaled_by

    @property
    def has_shards(self) -> bool:
        """Whether a parameter that requires a gradient is sharded."""
        return any(param.requires_grad and is_sharded(param) for param in self._own) if self.rank_groups else False

    @property
    def has_gradients_of_shards(self) -> bool:
        """Whether a sharded parameter has a gradient."""
        return any(param.grad is not None and is_sharded(param) for param in self._own)

    def refuse_another_scale(self, scale: float) -> None:
        """Refuse a backward at another scale than that of gradients which ``fully_shard`` keeps, out of reach.

        Raises:
            RuntimeError: such gradients.
        """
        if self._kept_by_fsdp and self._scaled_by not in (None, scale):
            raise RuntimeError(
                f"A backward with loss scale {scale} after one with {self._scaled_by} whose gradients fully_shard "
                "still keeps, under set_requires_gradient_sync(False): both would be added. Leave the scale as it is "
                "until a backward under set_requires_gradient_sync(True), and use one loss_id for all of them."
            )

    def begin_averaging(self, settings: Mapping[str, str]) -> None:
        """Average gradients over ranks during the backward. If there are some kept scaled, after it, with their sum.

        Args:
            settings: what must be equal on all ranks: values as text, by name.
        """
        if self._reducer is not None:
            self._reducer.begin(settings, steps=self._steps, early=self._scaled_by is None)

    def after_failed_backward(self) -> None:
        """Undo `before_backward`; gradients have been put back."""
        self._in_backward = False
        if self._reducer is not None:
            self._reducer.cancel()

    @torch.no_grad()
    def keep_scaled(self, aside: list[SetAside], scale: float) -> None:
        """Add new gradients to those in ``aside``, all scaled by ``scale``, for a later backward to unscale.

        They are not averaged over ranks before that backward.
        """
        self._kept_by_fsdp |= self.has_shards and not self.has_gradients_of_shards
        self._add_scaled(aside, scale)
        self._mark = self._mark or ClearMark.on(self.masters.pairs)
        if self._reducer is not None:
            self._reducer.keep_local()

    def _add_scaled(self, aside: list[SetAside], scale: float) -> None:
        add_scaled(aside, scale / (self._scaled_by or 1.0))
        self._scaled_by, self._in_backward = scale, False

    def _remove_mark(self) -> None:
        if self._mark is not None:
            self._mark.remove()
            self._mark = None

    @torch.no_grad()
    def unscale_new(self, aside: list[SetAside], scale: float, found_inf: Tensor | None) -> Tensor:
        """Unscale the new gradients, add those in ``aside``, and bring half ones to the float32 masters.

        Returns:
            found_inf: ``(1,)`` float32, 1.0 if a gradient is inf or NaN, of sharded ones on any rank.

        Sync: none; one on the CPU if gradients are sharded.
        """
        if self._scaled_by is not None:
            self._add_scaled(aside, scale)
            self._remove_mark()
            self._scaled_by, aside = None, []
        self._in_backward = self._kept_by_fsdp = False
        self._average()
        found_inf = add_unscaled(self._own, aside, scale, self._unscaler, found_inf)
        if self.masters.pairs:
            place = self._into_masters.place
            found_inf = self.masters.unscale_grads(scale, accumulate=True, found_inf=found_inf, place=place)
            for pair in self.masters.pairs:
                pair.model.grad = None
            self._into_masters.settle(self._masters())
        return agree_on_found_inf(found_inf, self.rank_groups)

    def _average(self) -> None:
        """Average the new gradients over ranks; their own flat buffer is the one in which they are then unscaled."""
        if self._reducer is None:
            return
        self._reducer.finish()
        own, _halves = self._reducer.flats
        if isinstance(self._unscaler, CombinedUnscaler):
            self._unscaler.adopt(self._own, own)

    def first_nonfinite(self) -> Tensor | None:
        """Return the model's parameter whose non-finite gradient the backward reached first.

        That is the last one in the model's order, the nearest to the loss. Of sharded gradients only the shards of this
        rank are read. Sync: one for each parameter checked.
        """
        for param in reversed(self._current_params()):
            grad = param.grad
            if grad is not None and grad.is_sparse:
                grad = grad._values()  # in which found_inf was looked for
            if grad is not None and not local_shard(grad).isfinite().all():
                return next((pair.model for pair in self.masters.pairs if pair.master is param), param)
        return None

    def flat_grads(self) -> FlatGrads:
        """Return the gradients that the optimizer will step with, in as few tensors as possible.

        Raises:
            RuntimeError: gradients are still scaled.

        Sync: none.
        """
        if self._scaled_by is not None:
            raise RuntimeError(
                f"Gradients are still scaled by {self._scaled_by}, after delay_unscale=True: clip them after the last "
                "backward before the step, which unscales them."
            )
        self._refresh()
        own, masters = self._unscaler.flat_grads(self._own), self._into_masters.flat_grads(self._masters())
        return FlatGrads(own.tensors + masters.tensors, own.parts + masters.parts, own.summed + masters.summed)

    # -- a step, and a step that is skipped --------------------------------------------------------

    def skip_next_step(self, record: ScaleRecord, current_scale: Callable[[], float]) -> None:
        """Skip the next step. After several overflows the first one is reported.

        Args:
            record: the overflow.
            current_scale: returns the scale of its loss, which may move again before the step.

        Raises:
            RuntimeError: called in the closure of a step that is running.
        """
        if self._in_closure:
            raise RuntimeError(
                f"The gradients overflowed at loss scale {record.loss_scale} inside the closure of "
                f"{type(self._optimizer()).__name__}.step(), which cannot be skipped any more. The scale is now "
                f"{record.next_loss_scale}: call step(closure) again, or use a static loss_scale."
            )
        self._overflow = self._overflow or _Overflow(record, current_scale, self._has_gradients())

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for param in self._params)

    def _forget_cleared_overflow(self) -> None:
        """Skip no step for an overflow whose gradients are None now, as after an interrupt before its step or in it.

        Gradients of zeros are not looked at: ranks with shards could decide differently.
        """
        if self._overflow is not None and self._overflow.had_gradients and not self._has_gradients():
            self._overflow = None
            if self._step is not None:  # interrupted, while its gradients were parked
                self._step = self._step._replace(parked=[])

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch runs no hook after a step that raises, so state that is valid during the step is tied to its frame.
        # torch runs the hooks again for super().step() of a subclass: those calls are part of the step that runs.
        use(self)
        frame = sys._getframe(1)
        if self._step is not None and is_running(self._step.frame):
            return None
        self._end_step()
        if self._in_backward:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside the block of scale_loss, where gradients are still scaled: "
                "call it after the block."
            )
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        with without_function_modes():
            if self._overflow is not None or not self.passes_gradients_through:
                self._follow_edits()
                self._refuse_scaled_grads(optimizer)
            if self._reducer is not None:
                self._reducer.refuse_strays()
            gradients = gradients_of(self._current_params())
            self._step = _Step(frame, gradients if self._overflow else [], bool(gradients))
            for param, _ in self._step.parked:  # for an optimizer around another one
                param.grad = None
            if self._overflow is None and gradients and self.masters.pairs:
                self.masters.begin_step(partial(is_running, frame, get_ident()))
        if not self._casts_in_step:
            suspend_casts(frame)
        return ((without_parameters(optimizer), *args[1:]), kwargs) if self._overflow else None

    def _after_step(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._step is not None and self._step.frame is not sys._getframe(1):
            return
        done, overflow = _STEPPED if self._step is None or self._step.had_gradients else _NO_GRADIENT, self._overflow
        # First, and another object for each step: a watch sees that there was one, whatever stops the lines below.
        self.outcome = replace(done) if overflow is None else _outcome_of_skip(overflow.record)
        self._end_step()
        if done is _STEPPED and not is_alone():
            self._steps += 1
        self._overflow = None
        if self.masters.pairs:
            with without_function_modes():
                for pair in self.masters.pairs:
                    pair.master.grad = None
        if overflow is not None and self._announce:
            print(  # noqa: T201  the line that apex prints
                f"Gradient overflow.  Skipping step, loss scaler {overflow.record.loss_id} "
                f"reducing loss scale to {overflow.current_scale()}"
            )

    def _end_step(self) -> None:
        """Finish a step, at its end or, if it raised or was interrupted, at the next opportunity."""
        if self._step is not None:
            resume_casts(self._step.frame)
            put_back(self._step.parked)
            self._step = None
        if self.masters.pairs:
            with without_function_modes():
                self.masters.end_step()

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure`` wrapped so that a backward in it is known to run inside a step."""
        if self._overflow is not None or self.masters.pairs:
            raise RuntimeError(
                "Currently, Amp does not support closure use with optimizers. Call step() without a closure, after "
                "scale_loss; optimizers that need a closure work without masters (O0, O1, O3), with a static "
                "loss_scale."
            )

        def run() -> Any:
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return run

    def _refuse_scaled_grads(self, optimizer: Optimizer) -> None:
        if self._scaled_by is not None and self._overflow is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() with gradients still scaled by {self._scaled_by}: the last "
                "backward before a step must run in scale_loss without delay_unscale=True, and neither under no_sync() "
                "nor set_requires_gradient_sync(False)."
            )
        pairs = self.masters.pairs
        if all(pair.master.grad is None for pair in pairs) and any(pair.model.grad is not None for pair in pairs):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() found gradients on half parameters that never reached their "
                "masters: run the backward in `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`."
            )


def await_shards(hooked: Sequence[HookedOptimizer]) -> bool:
    """Return whether a backward left all gradients of shards with ``fully_shard``, for a later one to communicate.

    It does under ``set_requires_gradient_sync(False)``. Sync: none.
    """
    sharded = [each for each in hooked if each.has_shards]
    return bool(sharded) and not any(each.has_gradients_of_shards for each in sharded)


def _outcome_of_skip(record: ScaleRecord) -> StepOutcome:
    where = f", first in the gradient of {record.first_nonfinite}" if record.first_nonfinite else ""
    reason = f"gradient overflow at loss scale {record.loss_scale} of loss scaler {record.loss_id}{where}"
    return StepOutcome(False, reason, record.first_nonfinite, record)
