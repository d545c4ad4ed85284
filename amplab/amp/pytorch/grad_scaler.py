"""GradScaler: torch's loss scaler, its whole contract kept, its known defects not.

    scaler = amplab.GradScaler("cuda")
    scaler.scale(loss).backward()          # loss * scale
    scaler.unscale_(optimizer)             # grad <- grad / scale; only needed to look at gradients or to clip them
    scaler.step(optimizer)                 # optimizer.step(), unless a gradient is inf or NaN
    scaler.update()                        # the rule moves the scale

Each optimizer goes READY -> UNSCALED -> STEPPED; `update` begins the next iteration. Settings, the scale itself and
checkpoints are in ``grad_scaler_settings.py``, the scales of several losses in ``loss_scales.py``, what is kept of
each optimizer in ``optimizer_gradients.py``.
"""

from collections import abc, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from amplab.amp.arguments import checked_flag
from amplab.amp.backward.clipping import clip_by_norm_
from amplab.amp.backward.loss_scaler import SMALLEST_SCALE
from amplab.amp.backward.records import ScaleRecord, StepOutcome
from amplab.amp.pytorch.fused_step import leaves_gradients_unscaled, lend_scale, makes_momentum, wants_scaler
from amplab.amp.pytorch.loss_scales import LossScales
from amplab.amp.pytorch.optimizer_gradients import unscale_gradients_
from amplab.amp.pytorch.scale_subscribers import ScaleSubscribers
from amplab.amp.pytorch.step_report import NO_STEP_YET, STEPPED, StepReport
from amplab.optimizers import FusedOptimizer
from amplab.scalers import ScaleRule

__all__ = ["GradScaler"]

_LOOK_EVERY = 8  # skipped steps in a row after which the host looks at the scale


class GradScaler(LossScales):
    """Scale losses, unscale gradients, skip the steps that overflow, and move the scale.

    A drop-in for `torch.amp.GradScaler`, and an instance of it. Where it differs: the scale stops at a floor before
    it is 0, and a warning says once that it has collapsed; a fused SGD whose first step is skipped keeps no
    uninitialised momentum; a disabled scaler answers every getter; `scale` takes namedtuples, and a loss of one half
    element overflows no more; `update` takes integers and tensors of shape ``(1,)``; an overflow that the unscaling
    itself makes is found; a parameter that two optimizers share is unscaled once; a closure is refused however it is
    passed.

    Args:
        device: type of the device that the losses are on, such as "cuda" or "cpu".
        init_scale: where the scale starts.
        growth_factor: what it is multiplied by after ``growth_interval`` clean steps in a row; > 1.
        backoff_factor: what it is multiplied by at an overflow; < 1.
        growth_interval: see ``growth_factor``.
        enabled: False: `scale` returns what it gets, `step` steps, all else does nothing.
        rule: a rule of `amplab.scalers` in the place of torch's and of the four numbers.
        floor: the scale never backs off below it; None for none, as torch has it.
        num_losses: how many losses have a scale of their own, each under `scale_loss`.
        combine_grad: keep the gradients of each optimizer in flat buffers; the same results to the bit.

    Raises:
        AssertionError: ``growth_factor`` <= 1 or ``backoff_factor`` >= 1, where scaling is enabled.
        ValueError: a rule and numbers; a floor that is not a finite number > 0, or above the rule's ceiling;
            ``num_losses`` < 1.

    Sync: `step` waits for the device once, or not at all with an optimizer made with ``fused=True``; `update` does so
    only under a rule that the host is asked (`amplab.scalers.HostScale`) or with subscribers.

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
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        super().__init__(device, *numbers, enabled, rule=rule, floor=floor)
        self._have_losses(num_losses, numbers, rule)
        self._combine_grad = checked_flag("combine_grad", combine_grad)
        self._begin()

    def _begin(self) -> None:
        """Make what no copy and no checkpoint keeps."""
        super()._begin()
        self._last: StepReport | StepOutcome = NO_STEP_YET
        self._skipped_in_a_row = 0
        self._told = ScaleSubscribers()

    # -- the four calls of an iteration ------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale.

        Args:
            outputs: a tensor, or an iterable of tensors, to any depth. The first tensor of all decides where the
                scale lives.

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
            scaled = self._scaled(outputs)
            if self._told:
                self._told.note(outputs, self._scale)
            return scaled
        if not isinstance(outputs, abc.Iterable):
            raise ValueError(
                f"outputs must be a Tensor or an iterable of Tensors, and this is a {type(outputs).__name__}: pass the "
                "loss itself."
            )
        scaled = map(self.scale, outputs)  # not map_tensors: torch's contract takes any iterable, lazily
        if isinstance(outputs, tuple) and hasattr(type(outputs), "_make"):  # namedtuple, by its public protocol
            return type(outputs)._make(scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale in place, and check them.

        Only needed before something looks at gradients or changes them; `step` does it otherwise. Once for each
        optimizer, when all backwards of the iteration are done.

        Raises:
            AssertionError: `scale` was never called; something among the parameters is no tensor.
            RuntimeError: called twice, or after `step`, since the last `update`.
            ValueError: float16 gradients.

        Sync: none (sparse gradients that are not coalesced wait for the device).
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        row = self._per_optimizer_states[id(optimizer)]
        if row["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(), or scale_loss() has "
                "unscaled its gradients. Call update() at the end of every iteration."
            )
        if row["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(). Call it between the last backward and step(), or not at all."
            )
        self._unscale(optimizer, row, allow_half=False)

    def _unscale(self, optimizer: Optimizer, row: dict[str, Any], *, allow_half: bool) -> None:
        scale = self._scale
        # FP32 division can be off by one bit, so the reciprocal is taken in float64 where the device has it.
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        row["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found_inf, allow_half)
        row["stage"] = OptState.UNSCALED
        self._done.add(self._known.kept(optimizer).may_be_shared)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        known = self._known.of(optimizer)
        return unscale_gradients_(known, inv_scale, found_inf, allow_half=allow_fp16, done=self._done)

    def unscale_and_clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Call `unscale_`, then scale the gradients down to a norm of at most ``max_norm``.

        ``scaler.unscale_(optimizer)`` and ``torch.nn.utils.clip_grad_norm_(parameters, max_norm)`` in a few calls,
        however many parameters there are. A disabled scaler only clips.

        Returns:
            ``()``, the norm of the unscaled gradients before they were clipped.

        Raises:
            As `unscale_`.

        Sync: none.
        """
        self.unscale_(optimizer)
        known = self._known.of(optimizer)
        if known.combined is None:
            norm = torch.zeros((), device=known.parameter_list.device)
            if norm_type == 2.0 and known.parameter_list.clip_grads_(norm, max_norm) is not None:
                return norm
        grads = known.unscaler.flat_grads(known.params)
        return clip_by_norm_(grads.tensors, max_norm, norm_type, parts=grads.parts)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` unless a gradient is inf or NaN; unscale first where that is left.

        An optimizer that takes ``grad_scale`` and ``found_inf`` (``fused=True``) is always called, and skips by itself.

        Returns:
            What ``optimizer.step`` returns; None after a skipped step. `last_step` says which it was.

        Raises:
            RuntimeError: a closure; a second step since the last `update`.
            AssertionError: `scale` was never called; no parameter has a gradient.
            ValueError: float16 gradients, and an optimizer that does not take the scale.

        Sync: one; none with an optimizer that takes the scale, but for the step in which a fused SGD makes its
        momentum. One more at every eighth skipped step in a row.
        """
        if not self._enabled:
            self._last = STEPPED
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled. Call backward() before step(), which "
                "cannot be skipped once the closure runs; optimizers that need one work with enabled=False."
            )
        self._check_scale_growth_tracker("step")
        row = self._per_optimizer_states[id(optimizer)]
        if row["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update(). Call update() after it.")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            returned = self._step_with_scale(optimizer, row, *args, **kwargs)
        else:
            if row["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not row["found_inf_per_device"]:
                raise AssertionError(
                    "No inf checks were recorded for this optimizer. None of its parameters has a gradient: run "
                    "backward() first, and give the optimizer the parameters that the loss depends on."
                )
            returned = self._maybe_opt_step(optimizer, row, *args, **kwargs)
        row["stage"] = OptState.STEPPED
        return returned

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._skips:
            optimizer_state["verdict"] = bool(self._found_inf([optimizer_state]).item() > 0)
            if optimizer_state["verdict"]:
                self._skip(optimizer)
                return None
        self._skipped_in_a_row, self._last = 0, STEPPED
        return optimizer.step(*args, **kwargs)

    def _skip(self, optimizer: Optimizer) -> None:
        scale = self._scale_at_fault(optimizer)
        self._last = StepReport(optimizer.param_groups, self._known.of(optimizer).params, None, scale)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row % _LOOK_EVERY == 0:
            self._warn_of_collapse(scale.item())

    def _found_inf(self, rows: Iterable[dict[str, Any]]) -> Tensor:
        """``()`` float32 on the scale's device: > 0 where one of the verdicts is; 0 for none."""
        device = self._scale.device
        verdicts = [each for row in rows for each in row["found_inf_per_device"].values()]
        verdicts = [each.to(device, non_blocking=True).reshape(()) for each in verdicts]
        if len(verdicts) == 1:
            return verdicts[0]
        return torch.stack(verdicts).sum() if verdicts else torch.zeros((), device=device)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the rule move the scale, and begin the next iteration.

        Args:
            new_scale: a scale for all losses to go on with, in the place of what the rule says: a number, or a tensor
                of one element on a device of this scaler's type.

        Raises:
            AssertionError: `scale` was never called; no gradients were checked since the last `update`; a tensor that
                is no scale. TypeError: neither a number nor a tensor.

        Sync: none, but see the class.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        rows = list(self._per_optimizer_states.values())
        if new_scale is None and not any(row["found_inf_per_device"] for row in rows):
            raise AssertionError("No inf checks were recorded prior to update. Call step() or unscale_() before it.")
        before = self._told.scales_before(self._scale, [each._scale for each in self._further]) if self._told else None
        found = self._found_of_losses(self._found_inf(rows))
        if new_scale is None:
            self._move_scales_(found, _verdict_of_all(rows))
        else:
            self._set_scales_(new_scale)
        self._by_loss = {}
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._done.clear()
        self._known.find_shared()
        if before is not None:
            stepped = any(row["stage"] is OptState.STEPPED for row in rows)
            scales = [value for each in found for value in (before[each], self._loss(each)._scale, found[each])]
            self._told.tell(list(found), scales, self.last_step, stepped=stepped)

    # -- optimizers that take the scale themselves -------------------------------------------------

    def _step_with_scale(self, optimizer: Optimizer, row: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        is_ours = isinstance(optimizer, FusedOptimizer)
        if not is_ours and wants_scaler(optimizer):
            self._last = STEPPED
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        known = self._known.of(optimizer)
        if row["stage"] is OptState.READY and self._done.holds_any(known.params):
            self._unscale(optimizer, row, allow_half=True)  # shared with an optimizer that has unscaled
        if row["stage"] is OptState.READY and is_ours:
            row["found_inf_per_device"] = optimizer.check_gradients()
        elif row["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        found_inf = self._found_inf([row]) if self._skips else torch.zeros((), device=self._scale.device)
        if makes_momentum(optimizer, known) and found_inf.item() > 0:
            self._skip(optimizer)
            return None
        self._last = StepReport(optimizer.param_groups, known.params, found_inf, self._scale_at_fault(optimizer))
        ready = row["stage"] is OptState.READY
        with lend_scale(optimizer, self._scale if ready else None, found_inf):
            returned = optimizer.step(*args, **kwargs)
        if ready and leaves_gradients_unscaled(optimizer):
            self._done.add(known.may_be_shared, unless=found_inf)
        return returned

    # -- what has happened -------------------------------------------------------------------------

    @property
    def last_step(self) -> StepOutcome:
        """What the last `step` did: whether parameters were updated, why not, and the first non-finite gradient.

        "First" is the one that backward reached first: the last in the order of the optimizer's groups. After a fused
        step it is known only while the gradients are still there.

        Sync: none after a step that ran, at most three reads else.
        """
        return self._last if isinstance(self._last, StepOutcome) else self._last.outcome()

    def subscribe(self, callback: Callable[[ScaleRecord], object]) -> Callable[[], None]:
        """Call ``callback`` with a `ScaleRecord` at the end of every `update`, which then waits for the device.

        Once for each loss that had a `scale_loss`; ``skipped`` and ``first_nonfinite`` are those of the last `step`.
        ``backward_scales`` are those of every `scale` since the update that followed the step before: gradients that a
        step adds up under several scales count for more or less than they should.

        Returns:
            A function that ends the subscription.
        """
        return self._told.add(callback)

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Give what a pickle keeps: settings, scale, what the rule has counted; not the device, nor subscribers.

        Raises:
            AssertionError: within an iteration, between the first `unscale_` or `step` and `update`.

        Sync: two.
        """
        state = super().__getstate__()
        for name in ("_known", "_done", "_last", "_skipped_in_a_row", "_told"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what `__getstate__` gave."""
        super().__setstate__(state)
        self._begin()


def _verdict_of_all(rows: Iterable[dict[str, Any]]) -> bool | None:
    """Whether any optimizer overflowed, where every step has read its verdict; else None."""
    verdicts = [row.get("verdict") for row in rows if row["found_inf_per_device"]]
    return None if None in verdicts else any(verdicts)
