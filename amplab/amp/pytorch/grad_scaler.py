"""GradScaler: torch's loss scaler with the same interface and behavior, a floor for the scale, and several losses.

    scaler = amplab.GradScaler("cuda")
    scaler.scale(loss).backward()          # loss * scale
    scaler.unscale_(optimizer)             # grad <- grad / scale; only needed to inspect or clip gradients
    scaler.step(optimizer)                 # optimizer.step(), skipped if a gradient is inf or NaN
    scaler.update()                        # the scale backs off or grows

Each optimizer goes READY -> UNSCALED -> STEPPED; `update` begins the next iteration.

    scale_loss(loss, optimizer, loss_id)   the block around a backward of one loss among several
    loss_scale                             the scale of one loss: where it is halved
    loss_gradients                         the gradients that this backward reaches, unscaled
    found_inf                              found_inf of the optimizers and of the losses
    optimizer_gradients                    the parameters of an optimizer; unscales their gradients, computes found_inf
    unscaled_gradients                     which gradients are unscaled, and which arrive later or are mixed
    unfinished_iteration                   whether an interrupt has ended an iteration before its update
    step_report                            the result of a step, and its subscribers
"""

import contextlib
import sys
import warnings
from collections import abc, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from amplab.amp.arguments import SMALLEST_SCALE, checked_flag, checked_num_losses
from amplab.amp.backward.clipping import clip_by_norm_, clip_shards_by_norm_
from amplab.amp.backward.gradients import ScaledBackward
from amplab.amp.backward.records import ScaledLoss, ScaleRecord, StepOutcome
from amplab.amp.pytorch.found_inf import FoundByLoss, Row, found_inf_of, larger, verdict_of
from amplab.amp.pytorch.fused_step import (
    leaves_gradients_unscaled,
    lend_scale,
    makes_momentum,
    take_back_scale,
    wants_scaler,
)
from amplab.amp.pytorch.loss_gradients import LossGradients, checked_optimizers, loss_gradients, unscale_new
from amplab.amp.pytorch.loss_scale import LossScale, ScaleCollapse, check_numbers, checked_scale, checked_states
from amplab.amp.pytorch.optimizer_gradients import (
    KnownOptimizers,
    OptimizerGradients,
    unscale_gradients_,
)
from amplab.amp.pytorch.step_report import NO_STEP_YET, STEPPED, ScaleSubscribers, StepReport
from amplab.amp.pytorch.unfinished_iteration import UnfinishedIteration
from amplab.amp.pytorch.unscaled_gradients import UnscaledGradients
from amplab.kernels.builder import checked_mode
from amplab.optimizers import FusedOptimizer
from amplab.policies.casting.function_modes import without_function_modes
from amplab.scalers import ScaleRule

__all__ = ["GradScaler"]

_NUMBERS = (2.0**16, 2.0, 0.5, 2000)
_NOT_SAVED = frozenset(
    (
        "_known",
        "_done",
        "_unfinished",
        "_by_loss",
        "_before_interrupt",
        "_updated",
        "_last",
        "_collapse",
        "_subscribers",
    )
)


class _OfFirstLoss:
    """A private attribute of torch's class, stored in the `LossScale` of loss 0. Other libraries read some of these."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, scaler: "GradScaler", _owner: type | None = None) -> Any:
        return getattr(scaler._scales[0], self._name)

    def __set__(self, scaler: "GradScaler", value: Any) -> None:
        setattr(scaler._scales[0], self._name, value)


class GradScaler(torch.amp.GradScaler):
    """Scale losses, unscale gradients, skip the steps that overflow, and move the scale.

    A drop-in replacement for `torch.amp.GradScaler`, and an instance of it. Differences:

    * The scale has a floor > 0, and a collapse of the scale causes one warning.
    * `scale` accepts namedtuples, and a float16 loss of one element does not overflow. `update` accepts integers and
      tensors of shape ``(1,)``. All getters work on a disabled scaler.
    * An overflow caused by unscaling is detected. A parameter that two optimizers share is unscaled once, and so is a
      gradient that arrives after `unscale_`. A scaled gradient that is added to an unscaled one is an error in `step`.
    * After an interrupt in `unscale_`, `step` or `update`, or between these calls if it ended the function that made
      them, the next call of `scale` begins an iteration.
    * Sparse gradients that share their values, as those of two embeddings that are added, are each unscaled once; torch
      2.13 divides the values by the scale twice.
    * A fused SGD whose first step is skipped keeps no uninitialized momentum.
    * A closure is refused as a positional argument, too.
    * The ranks that hold shards of the parameters (FSDP2) agree on found_inf; on the CPU `unscale_` waits for them.

    Args:
        device: device type of the losses, such as "cuda" or "cpu".
        init_scale: the first scale, finite and > 0.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps in a row; finite and > 1.
        backoff_factor: multiplies the scale after an overflow; between 0 and 1.
        growth_interval: see ``growth_factor``; 0 for a scale that never grows.
        enabled: False: `scale` returns its argument, `step` calls ``optimizer.step``, all other methods do nothing.
        rule: a rule of `amplab.scalers` instead of torch's rule and the four numbers.
        floor: lower bound of the scale; None for no bound, as in torch.
        num_losses: number of losses with a scale of their own, used with `scale_loss`.
        combine_grad: keep the gradients of each optimizer in flat buffers, with bitwise the same results.

    Raises:
        TypeError: one of the four numbers is not a number, or ``growth_interval`` not a whole one.
        ValueError: one of them is not allowed, where scaling is enabled; both a rule and numbers; a floor that is not
            a finite number > 0, or above the rule's ceiling; ``num_losses`` < 1.

    Sync: one in `step`, none with an optimizer made with ``fused=True``; none in `update`, except under a rule that
    runs on the host (`amplab.scalers.HostScale`) or with subscribers.

    Reference: ``torch.amp.GradScaler``.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=2.0**16)
    >>> scaler.scale((parameter * float("inf")).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.get_scale(), scaler.last_step.stepped, parameter.item()
    (32768.0, False, 1.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        rule: ScaleRule | None = None,
        floor: float | None = SMALLEST_SCALE,
        num_losses: int = 1,
        combine_grad: bool = False,
    ) -> None:
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2)
            enabled = False
        if enabled:
            checked_mode()
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        check_numbers(*numbers, only_types=not enabled)
        if rule is not None and numbers != _NUMBERS:
            raise ValueError(
                f"got both rule={rule!r} and numbers of torch's rule, {numbers}: expected one of the two; pass the "
                "numbers to the rule."
            )
        count = checked_num_losses(num_losses)
        self._combine_grad = checked_flag("combine_grad", combine_grad)
        self._scales = [LossScale(*numbers, rule=rule, floor=floor)]
        super().__init__(device, *numbers, enabled=enabled)  # writes the numbers through `_OfFirstLoss`
        self._scales = [LossScale(*numbers, rule=rule, floor=floor) for _ in range(count)]
        self._begin()

    def _begin(self) -> None:
        """Create the state that copies and checkpoints do not contain."""
        self._known = KnownOptimizers(combine=self._combine_grad)
        self._done = UnscaledGradients()
        self._unfinished = UnfinishedIteration()
        self._by_loss = FoundByLoss()
        self._before_interrupt: list[Row] = []  # of iterations that had no update
        self._updated: dict[int, Row] = {}  # of the iteration that the last update has ended
        self._last: StepReport | StepOutcome = NO_STEP_YET
        self._collapse = ScaleCollapse()
        self._subscribers = ScaleSubscribers()

    _scale = _OfFirstLoss("scale")
    _growth_tracker = _OfFirstLoss("growth_tracker")
    _init_scale = _OfFirstLoss("init_scale")
    _init_growth_tracker = _OfFirstLoss("init_growth_tracker")
    _growth_factor = _OfFirstLoss("growth_factor")
    _backoff_factor = _OfFirstLoss("backoff_factor")
    _growth_interval = _OfFirstLoss("growth_interval")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scales[0].put_on(dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        own = self._scales[0]
        if own.scale is None or own.growth_tracker is None:
            return super()._check_scale_growth_tracker(funcname)  # raises
        return own.scale, own.growth_tracker

    def _device_of_scale(self, call: str) -> torch.device:
        """Return the device of the scale. Raises: AssertionError, `scale` was never called."""
        scale, _ = self._check_scale_growth_tracker(call)
        return scale.device

    # -- the four calls of an iteration ------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale.

        Args:
            outputs: a tensor, or a nested iterable of tensors. The device of the first tensor is that of the scale.

        Returns:
            A tensor; a list, tuple or namedtuple of the same type; a lazy ``map`` for any other iterable. In the dtype
            that ``outputs * scale`` has; float32 for one float16 element, whose product would overflow.

        Raises:
            ValueError: neither a tensor nor an iterable.

        Sync: none.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._begin_if_interrupted()
            own = self._scales[0]
            scaled = own.times(outputs)
            self._done.note_loss(scaled)
            if self._subscribers and own.scale is not None:
                self._subscribers.note(outputs, scaled, own.scale)
            return scaled
        if not isinstance(outputs, abc.Iterable):
            raise ValueError(
                f"outputs must be a Tensor or an iterable of Tensors, but it is a {type(outputs).__name__}: pass the "
                "loss itself."
            )
        products = map(self.scale, outputs)  # not map_tensors: torch's contract takes any iterable, lazily
        if isinstance(outputs, tuple) and hasattr(type(outputs), "_make"):  # namedtuple, by its public protocol
            return type(outputs)._make(products)  # type: ignore[attr-defined]  # a namedtuple has it
        return type(outputs)(products) if isinstance(outputs, (list, tuple)) else products

    def _begin_if_interrupted(self) -> None:
        if self._was_interrupted():
            self._begin_after_interrupt()

    def _was_interrupted(self) -> bool:
        """Whether an interrupt has ended this iteration before its update."""
        return self._unfinished.in_call() or (bool(self._per_optimizer_states) and self._unfinished.between_calls())

    def _begin_after_interrupt(self) -> None:
        """Begin the next iteration, without an update, which the next one makes up for.

        Gradients that are not zeroed count as unscaled.
        """
        rows = self._per_optimizer_states.items()
        self._before_interrupt += [row for number, row in rows if not self._by_loss.has(number)]
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for optimizer in self._done.continue_after_interrupt():
            take_back_scale(optimizer)
        self._subscribers.begin_after_interrupt()
        self._unfinished = UnfinishedIteration()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale in place, and check them.

        Only needed before gradients are inspected or changed; otherwise `step` does it. Call it once for each
        optimizer, after all backwards of the iteration.

        Raises:
            AssertionError: `scale` was never called; a parameter is not a tensor.
            RuntimeError: called twice with the same gradients, or after `step`, since the last `update`; a scaled
                gradient was added to an unscaled one; the call before was interrupted.
            ValueError: float16 gradients.

        Sync: none; one for sparse float16 gradients that are not coalesced.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        row = self._per_optimizer_states[id(optimizer)]
        if row.pop("steps", False):  # called by `step`
            self._unscale(optimizer, row, scale, allow_half=False, is_last=self._known.is_only(optimizer))
            return
        self._unfinished.refuse_call()
        if row["stage"] is OptState.UNSCALED and not self._all_late(optimizer):
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(), or scale_loss() has "
                "unscaled its gradients. Call update() at the end of every iteration."
            )
        if row["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step() and before update(). Call it between the last backward and "
                "step(), or not at all, and update() at the end of every iteration."
            )
        self._unfinished.called_by(sys._getframe(1))
        with self._unfinished:
            self._unscale(optimizer, row, scale, allow_half=False)

    def _unscale(
        self, optimizer: Optimizer, row: dict[str, Any], scale: Tensor, *, allow_half: bool, is_last: bool = False
    ) -> None:
        # FP32 division can be off by one bit, so the reciprocal is taken in float64 where the device has it.
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        self._done.begin(optimizer, row, is_last=is_last)
        row["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found_inf, allow_half)
        row["stage"] = OptState.UNSCALED
        self._note_unscaled(self._known.kept(optimizer))

    def _known_with_shared(self, optimizer: Optimizer) -> OptimizerGradients:
        """Return the record of an optimizer; if it is new, gradients that it shares may be unscaled already."""
        known = self._known.of(optimizer)
        if known.shared is None:
            self._done.add_begun()
        return known

    def _note_unscaled(self, known: OptimizerGradients, *, unless: Tensor | None = None) -> None:
        params = known.params if self._done.has_changed else known.may_be_shared
        if params:
            self._done.add(params, unless=unless)

    def _all_late(self, optimizer: Optimizer) -> bool:
        """Whether a backward has made every gradient of an unscaled optimizer anew."""
        known = self._known.of(optimizer)
        params = known.params
        self._done.refuse_mixed(params, known.name)
        return 0 < len(self._done.late(params)) == len([param for param in params if param.grad is not None])

    def _unscale_late(self, optimizer: Optimizer, row: dict[str, Any], scale: Tensor, *, allow_half: bool) -> None:
        """Unscale the gradients that have arrived since `unscale_`; an overflow before stays one."""
        before = row["found_inf_per_device"]
        self._unscale(optimizer, row, scale, allow_half=allow_half)
        after = row["found_inf_per_device"]
        row["found_inf_per_device"] = {**before, **{at: larger(before.get(at), after[at]) for at in after}}

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        known = self._known_with_shared(optimizer)
        if self._done.has_changed:
            self._done.refuse_mixed(known.params, known.name)
        found = unscale_gradients_(known, inv_scale, found_inf, allow_half=allow_fp16, done=self._done)
        return known.agreed(found, found_inf)

    def unscale_and_clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Call `unscale_`, then clip the gradients to a norm of at most ``max_norm``.

        The same as ``scaler.unscale_(optimizer)`` and ``torch.nn.utils.clip_grad_norm_(parameters, max_norm)``, in a
        few kernel calls for any number of parameters. A disabled scaler only clips.

        Returns:
            ``()``, the norm of the unscaled gradients before they were clipped.

        Raises:
            As `unscale_`. ValueError: a ``norm_type`` that is not > 0, for sharded gradients.

        Sync: none; one for sparse gradients that are not coalesced, of which the norm is that of the sums.
        """
        self.unscale_(optimizer)
        known = self._known.of(optimizer)
        if norm_type == 2.0:
            norm = torch.zeros((), dtype=torch.float32, device=known.parameter_list.device)
            if known.combined is not None and max_norm > 0 and known.combined.clip_(norm, max_norm):
                return norm
            if known.parameter_list.clip_grads_(norm, max_norm) is not None:
                return norm
        if known.rank_groups:
            return clip_shards_by_norm_(known.params, max_norm, norm_type)
        grads = known.unscaler.flat_grads(known.params)
        return clip_by_norm_(grads.tensors, max_norm, norm_type, parts=grads.parts, summed=grads.summed)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` unless a gradient is inf or NaN. Unscale first if not done yet.

        An optimizer that takes ``grad_scale`` and ``found_inf`` (``fused=True``) is always called, and skips the update
        itself.

        Returns:
            The result of ``optimizer.step``; None after a skipped step. If the optimizer itself returns None,
            `last_step` tells whether the step was skipped.

        Raises:
            RuntimeError: a closure; a second step since the last `update`; a scaled gradient was added to an unscaled
                one; the call before was interrupted.
            AssertionError: `scale` was never called; no parameter has a gradient.
            ValueError: float16 gradients, and an optimizer that does not take the scale.

        Sync: one; none with an optimizer that takes the scale, except for the step in which a fused SGD creates its
        momentum. After every eighth consecutive skipped step, one additional sync.
        """
        if not self._enabled:
            self._last = STEPPED
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a step cannot be skipped once its "
                "closure runs. Call backward() before step(); optimizers that need a closure work with enabled=False."
            )
        self._unfinished.refuse_call()
        scale, _ = self._check_scale_growth_tracker("step")
        row = self._per_optimizer_states[id(optimizer)]
        if row["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update(). Call update() after it.")
        self._unfinished.called_by(sys._getframe(1))
        with self._unfinished:
            return self._unscale_and_step(optimizer, row, scale, *args, **kwargs)

    def _unscale_and_step(
        self, optimizer: Optimizer, row: dict[str, Any], scale: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._done.has_changed:
            known = self._known.of(optimizer)
            self._done.refuse_mixed(known.params, known.name)
            if row["stage"] is OptState.UNSCALED and self._done.late(known.params):
                self._unscale_late(optimizer, row, scale, allow_half=takes_scale)
        if takes_scale:
            returned = self._step_with_scale(optimizer, row, scale, *args, **kwargs)
        else:
            if row["stage"] is OptState.READY:
                row["steps"] = True
                self.unscale_(optimizer)
            if not row["found_inf_per_device"]:
                raise AssertionError(
                    "No inf checks were recorded for this optimizer. None of its parameters has a gradient: run "
                    "backward() first, and give the optimizer the parameters that the loss depends on. "
                    "If fully_shard was called after the optimizer was made, the optimizer has the parameters that "
                    "fully_shard replaced: make it after fully_shard."
                )
            returned = self._maybe_opt_step(optimizer, row, *args, **kwargs)
        if self._subscribers:
            self._subscribers.note_step()
        row["stage"] = OptState.STEPPED
        return returned

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Decide: read found_inf, then skip the step or take it. Sync: one."""
        if self._scales[0].skips:
            found_inf = found_inf_of([optimizer_state], self._device_of_scale("step"))
            optimizer_state["verdict"] = bool(found_inf.item() > 0)
            if optimizer_state["verdict"]:
                self._skip(optimizer)
                return None
        self._collapse.note_step()
        self._last = STEPPED
        return self._take_step(optimizer, optimizer_state, *args, **kwargs)

    def _take_step(self, optimizer: Optimizer, row: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step``. It counts as called before it is, so that an interrupted step is not taken twice."""
        stage, row["stage"] = row["stage"], OptState.STEPPED
        try:
            return optimizer.step(*args, **kwargs)
        except Exception:
            row["stage"] = stage
            raise

    def _skip(self, optimizer: Optimizer) -> None:
        """Report a skipped step; after some in a row, check whether the scale has collapsed."""
        scale = self._scale_at_fault(optimizer)
        self._last = StepReport(optimizer.param_groups, self._known.of(optimizer).params, None, scale)
        if self._collapse.note_skip():
            self._collapse.warn_once(scale.item(), self._scales[0].init_scale)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by its rule, and begin the next iteration.

        Args:
            new_scale: replaces the scale of every loss; a finite number > 0, or a tensor of one element on a device of
                this scaler's type. None lets the rule move the scales. A tensor is not read: if it is not finite and
                > 0, the scale stays.

        Raises:
            AssertionError: `scale` was never called; no gradients were checked since the last `update`; a tensor that
                is not a scale. TypeError: neither a number nor a tensor. ValueError: a number that is no scale.

        Sync: see the class.
        """
        if not self._enabled:
            return
        with self._unfinished:
            self._update(new_scale)

    def _update(self, new_scale: float | Tensor | None) -> None:
        device = self._device_of_scale("update")
        rows = list(self._per_optimizer_states.values())
        if new_scale is None and not any(row["found_inf_per_device"] for row in rows):
            if self._unfinished.in_call():
                self._begin_after_interrupt()
                return
            raise AssertionError("No inf checks were recorded prior to update. Call step() or unscale_() before it.")
        if new_scale is not None:
            new_scale = checked_scale(new_scale, self._device)
        before = self._subscribers.scales_before([each.scale for each in self._scales]) if self._subscribers else None
        checked = {**self._per_optimizer_states, **dict(enumerate(self._before_interrupt))}
        found = self._by_loss.of_losses(found_inf_of(checked.values(), device), checked)
        verdict = verdict_of(checked.values())
        if self._by_loss and verdict:
            verdict = None  # which loss overflowed is known on the device only
        self._updated = self._per_optimizer_states
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)  # so that no scale moves twice
        self._by_loss, self._before_interrupt = FoundByLoss(), []
        self._unfinished.called_by(None)
        self._done.clear()
        self._known.find_shared()
        if new_scale is None:
            for loss_id, found_inf in found.items():
                self._scales[loss_id].update_(found_inf, verdict)
        else:
            for each in self._scales:
                each.set_(new_scale, device)
        if before is not None:
            stepped = any(row["stage"] is OptState.STEPPED for row in rows)
            scales = [value for each in found for value in (before[each], self._scales[each].scale, found[each])]
            self._subscribers.tell(list(found), scales, self.last_step, stepped=stepped)

    # -- optimizers that take the scale themselves -------------------------------------------------

    def _step_with_scale(
        self, optimizer: Optimizer, row: dict[str, Any], scale: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(optimizer, FusedOptimizer) and wants_scaler(optimizer):
            self._last = STEPPED
            return optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]  # its own keyword
        known = self._known_with_shared(optimizer)
        if row["stage"] is OptState.READY and self._done.holds_any(known.params):
            self._unscale(optimizer, row, scale, allow_half=True)  # shared with an optimizer that has unscaled
        ready = row["stage"] is OptState.READY
        if ready:
            self._done.begin(optimizer, row, is_last=self._known.is_only(optimizer))
        if ready and isinstance(optimizer, FusedOptimizer):
            found = optimizer.unscale_gradients_(scale)
            if found is not None:
                row["stage"], ready = OptState.UNSCALED, False
                self._note_unscaled(known)
            found = optimizer.check_gradients() if found is None else found
            row["found_inf_per_device"] = known.agreed(found, torch.zeros((), dtype=torch.float32, device=scale.device))
        elif ready:
            self._check_inf_per_device(optimizer)
        skips = self._scales[0].skips
        found_inf = (
            found_inf_of([row], scale.device) if skips else torch.zeros((), dtype=torch.float32, device=scale.device)
        )
        if makes_momentum(optimizer, known) and found_inf.item() > 0:
            row["verdict"] = True
            self._skip(optimizer)
            return None
        self._last = StepReport(optimizer.param_groups, known.params, found_inf, self._scale_at_fault(optimizer))
        with lend_scale(optimizer, scale if ready else None, found_inf):
            returned = self._take_step(optimizer, row, *args, **kwargs)
        if ready and leaves_gradients_unscaled(optimizer):
            row["unless"] = found_inf
            self._note_unscaled(known, unless=found_inf)
        return returned

    # -- around a backward -------------------------------------------------------------------------

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizers: Optimizer | list[Optimizer], loss_id: int = 0) -> Iterator[Tensor]:
        """Scale one loss for the backward in the block, and unscale its gradients at the end of the block.

        ::

            with scaler.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
                scaled_loss.backward()

        Use it instead of ``scale`` and ``unscale_``: run every backward of an iteration that reaches an optimizer in
        such a block, clip after the last one, then call ``step`` and ``update``. A step is skipped if any loss
        overflowed. ``update`` moves the scale of each loss that had a block, by its own found_inf.

        Args:
            loss: the block gets this loss times the scale, and calls ``backward`` on it.
            optimizers: the optimizer, or all optimizers, whose parameters the backward reaches; their gradients are
                unscaled. If two share a parameter, an overflow of one counts for the other, too.
            loss_id: the number of the loss; below ``num_losses``.

        Returns:
            A context manager. If the block raises, the gradients are restored.

        Raises:
            TypeError: the loss is not a tensor, ``optimizer`` not an optimizer, or ``loss_id`` not a whole number.
            IndexError: no such loss.
            RuntimeError: after `unscale_` or `step` of one of the optimizers, since the last `update`.
            ValueError: float16 parameters.

        Sync: none.

        Reference: ``apex.amp.scale_loss``.
        """
        own = self._loss(loss_id)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}: expected a Tensor; use one block for each loss.")
        if self._enabled:
            self._begin_if_interrupted()
        reached = self._reached(optimizers)
        if not self._enabled:
            yield loss
            return
        for each in self._scales:
            if each.scale is None:
                each.put_on(loss.device)
        scale = own.put_on(loss.device) if own.scale is None else own.scale
        with ScaledBackward(reached, scale) as backward:
            scaled = own.times(loss)
            self._subscribers.tell_of_loss(ScaledLoss(loss, scaled, backward.all_aside))
            yield scaled
            with without_function_modes(), torch.no_grad():
                found = unscale_new(backward.aside, scale)
        self._unfinished.called_by(sys._getframe(1))
        for optimizer, found_inf in found.items():
            self._note(optimizer, loss_id, found_inf)

    def _loss(self, loss_id: int) -> LossScale:
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(f"loss_id={loss_id!r}: expected a whole number; losses are numbered from 0.")
        if not 0 <= loss_id < len(self._scales):
            raise IndexError(
                f"loss_id={loss_id}: expected a number below num_losses={len(self._scales)}; losses are numbered from "
                "0, and GradScaler(num_losses=...) sets how many there are."
            )
        return self._scales[loss_id]

    def _reached(self, optimizers: Any) -> list[LossGradients]:
        chosen = checked_optimizers(optimizers)
        if not self._enabled:
            return []
        for optimizer in chosen:
            self._refuse_late(optimizer)
        return loss_gradients({optimizer: self._known.of(optimizer) for optimizer in chosen})

    def _refuse_late(self, optimizer: Optimizer) -> None:
        row = self._per_optimizer_states.get(id(optimizer))
        late = row is not None and row["stage"] is not OptState.READY and not self._by_loss.has(id(optimizer))
        if late or (row is not None and row["stage"] is OptState.STEPPED):
            raise RuntimeError(
                f"scale_loss() with {type(optimizer).__name__} after its unscale_() or step(): call update() first, or "
                "run every backward that reaches it before these."
            )

    def _note(self, optimizer: Optimizer, loss_id: int, found_inf: Tensor) -> None:
        found_inf = found_inf.reshape(())
        row = self._per_optimizer_states[id(optimizer)]
        self._by_loss.note(optimizer, loss_id, found_inf)
        verdicts = row["found_inf_per_device"]
        verdicts[found_inf.device] = larger(verdicts.get(found_inf.device), found_inf)
        row["stage"] = OptState.UNSCALED
        self._done.begin(optimizer, row, is_last=False)
        self._note_unscaled(self._known.kept(optimizer))

    def _scale_at_fault(self, optimizer: Optimizer) -> Tensor:
        """``()`` float32: the scale of the first loss that overflowed under ``optimizer``. Sync: none."""
        scale, _ = self._check_scale_growth_tracker("step")
        return self._by_loss.scale_at_fault(optimizer, [each.scale for each in self._scales], scale)

    # -- settings and checkpoints ------------------------------------------------------------------

    @property
    def rule(self) -> ScaleRule | None:
        """The rule that moves the scale, with its floor; None for torch's rule, whose numbers have getters."""
        return self._scales[0].rule

    def follow(self, rule: ScaleRule) -> None:
        """Continue under another rule; every loss keeps its scale.

        Args:
            rule: any rule; the floor of this scaler stays.

        Raises:
            ValueError: the floor is above the rule's ceiling.

        Sync: one for each loss.
        """
        for each in self._scales:
            each.follow(rule)

    def get_scale(self, loss_id: int = 0) -> float:
        """Return the scale of a loss, or 1.0 if scaling is disabled. Sync: one, after the first `scale`.

        Raises: IndexError, TypeError: no such loss.
        """
        own = self._loss(loss_id)
        if not self._enabled:
            return 1.0
        scale = own.value()
        self._collapse.warn_once(scale, own.init_scale)
        return scale

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which a scale grows, >= 1. Raises: RuntimeError, under a rule; ValueError."""
        for each in self._scales:
            each.set_number("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor applied to a scale after an overflow, <= 1. Raises: RuntimeError, under a rule; ValueError."""
        for each in self._scales:
            each.set_number("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before a scale grows; 0: never. Raises: RuntimeError, a rule; ValueError."""
        for each in self._scales:
            each.set_number("growth_interval", new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`: the entries of loss 0, and those of the others under ``losses``.

        The entries of one loss are torch's five, and ``rule_state`` under a rule; {} if disabled. torch's class can
        load the state, too. Call it after `update`. Sync: two for each loss, after the first `scale`.
        """
        if not self._enabled:
            return {}
        first, *others = [each.state_dict() for each in self._scales]
        return {**first, "losses": others} if others else first

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch's; does nothing if scaling is disabled.

        Under a rule the scale and the counts are loaded; the rule keeps its constants. If the state has no ``losses``,
        every loss gets its one scale.

        Raises:
            RuntimeError: an empty dict, as a disabled scaler saves it.
            TypeError: not a mapping. KeyError: one of torch's five entries is missing.
            ValueError: the state of another number of losses; an entry with an invalid value.

        Warns if the state was saved under another rule.

        Sync: none.
        """
        if not self._enabled:
            return
        states = checked_states(state_dict, len(self._scales), self._scales[0].floor)
        self._begin_if_interrupted()
        self._before_interrupt = []  # an overflow before belongs to the scale that is replaced
        if not self._per_optimizer_states:
            self._by_loss = FoundByLoss()
        for each, state in zip(self._scales, states, strict=True):
            each.load_state_dict(state)

    # -- what has happened -------------------------------------------------------------------------

    @property
    def last_step(self) -> StepOutcome:
        """What the last `step` did: whether parameters were updated, why not, and the first non-finite gradient.

        "First" means first in the backward: the last in the order of the optimizer's groups. After a fused step it is
        known only as long as the gradients exist.

        Sync: none after a step that was not skipped, else at most three.
        """
        return self._last if isinstance(self._last, StepOutcome) else self._last.outcome()

    def subscribe(
        self,
        callback: Callable[[ScaleRecord], object],
        *,
        at_loss: Callable[[ScaledLoss], object] | None = None,
    ) -> Callable[[], None]:
        """Call ``callback`` with a `ScaleRecord` at the end of every `update`, which then waits for the device.

        There is one call for each loss that had a `scale_loss`. ``skipped`` and ``first_nonfinite`` are those of the
        last `step`. ``backward_scales`` are the scales of all calls of `scale` since the update after the previous
        step; if they differ, the gradients that the step adds up have the wrong weights.

        Args:
            callback: a function of one record.
            at_loss: a function that is called with a `ScaledLoss` in every call of `scale` and `scale_loss`, before the
                backward.

        Returns:
            A function that ends the subscription.
        """
        return self._subscribers.add(callback, at_loss)

    # -- copies ------------------------------------------------------------------------------------

    def _outside_of_iteration(self) -> dict[str, Any]:
        """Return the attributes of a scaler with the same scales, outside of an iteration. Sync: two for each loss."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._scales = [each.copied() for each in self._scales]
        other._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        other._begin()
        return vars(other)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle contains: settings, scale and the rule's counts, but neither device nor subscribers.

        Raises:
            AssertionError: within an iteration, between the first `unscale_` or `step` and `update`.

        Sync: two.
        """
        if self._enabled and self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
                "scaler.update()."
            )
        return {name: value for name, value in vars(self).items() if name not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        vars(self).update(state)
        self._begin()
