"""One scale for each loss of a GradScaler, and the block around a backward that takes its scale out again.

    enter scale_loss    the gradients that are there are set aside      yields loss * scale[loss_id]
    leave scale_loss    grad <- grad set aside + new grad / scale[loss_id];  found_inf[optimizer][loss_id]
    update              scale[loss_id] <- rule(scale[loss_id], largest found_inf[...][loss_id])

Loss 0 has the scale of the scaler itself. The losses of apex's face are in ``loss_scaling.py``.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amplab.amp.arguments import as_list, checked_num_losses
from amplab.amp.backward.gradients import SetAside, add_unscaled, bookkeeping, put_back, set_aside
from amplab.amp.pytorch.grad_scaler_settings import GradScalerSettings
from amplab.amp.pytorch.grad_scaler_state import checked_state
from amplab.amp.pytorch.optimizer_gradients import KnownOptimizers, UnscaledGradients
from amplab.scalers import ScaleRule

__all__ = ["LossScale", "LossScales"]


class LossScale(GradScalerSettings):
    """The scale of one loss, what its rule has counted, and its product with a loss."""

    def _scaled(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        if output.dtype is torch.float16 and output.numel() == 1:
            output = output.float()
        return output * self._scale.to(output.device, non_blocking=True)


class LossScales(LossScale):
    """The half of `amplab.amp.GradScaler` that tells several losses apart; with one loss it is that loss's scale."""

    _combine_grad = False  # of scalers that were pickled before there was a choice

    def _have_losses(self, num_losses: int, numbers: tuple[Any, ...], rule: ScaleRule | None) -> None:
        """Make the scales of all losses but the first: ``numbers`` and ``rule`` are those of the scaler."""
        count = checked_num_losses(num_losses) - 1
        options = {"rule": rule, "floor": self._floor}
        self._further = [LossScale(self._device, *numbers, self._enabled, **options) for _ in range(count)]

    def _begin(self) -> None:
        self._known = KnownOptimizers(combine=self._combine_grad)
        self._done = UnscaledGradients()
        self._by_loss: dict[int, dict[int, Tensor]] = {}  # found_inf of each loss, for each optimizer by its id

    def _loss(self, loss_id: int) -> LossScale:
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(f"loss_id={loss_id!r}: expected a whole number; losses are numbered from 0.")
        count = 1 + len(self._further)
        if not 0 <= loss_id < count:
            raise IndexError(
                f"loss_id={loss_id}: expected one below num_losses={count}; losses are numbered from 0, and "
                "GradScaler(num_losses=...) says how many have a scale."
            )
        return self if loss_id == 0 else self._further[loss_id - 1]

    # -- around a backward -------------------------------------------------------------------------

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizers: Optimizer | list[Optimizer], loss_id: int = 0) -> Iterator[Tensor]:
        """Run a backward under the scale of one loss, which is taken out of its gradients at the end of the block.

        ::

            with scaler.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
                scaled_loss.backward()

        In the place of ``scale`` and ``unscale_``: let every backward of an iteration that reaches an optimizer run in
        such blocks, clip after the last one, then call ``step`` and ``update``. A step is skipped where any loss
        overflowed; ``update`` moves the scale of every loss that had a block, by its own found_inf.

        Args:
            loss: what the block calls ``backward`` on, times the scale.
            optimizers: the one, or all, whose parameters the backward reaches; their gradients are unscaled. Where two
                share a parameter, an overflow of the one counts for the other, too.
            loss_id: whose scale; below ``num_losses``.

        Returns:
            A context manager. When the block raises, the gradients are those from before it.

        Raises:
            TypeError: a loss that is no tensor; something that is no optimizer; a ``loss_id`` that is no whole number.
            IndexError: no such loss.
            RuntimeError: after `unscale_` or `step` of one of the optimizers, since the last `update`.
            ValueError: float16 parameters.

        Sync: none.

        Reference: ``apex.amp.scale_loss``.
        """
        own = self._loss(loss_id)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}: expected a Tensor; give every loss a block of its own.")
        reached = self._reached(optimizers)
        if not self._enabled:
            yield loss
            return
        for each in (self, *self._further):
            if each._scale is None:
                each._lazy_init_scale_growth_tracker(loss.device)
        with bookkeeping():
            aside = {optimizer: set_aside(params) for optimizer, params in reached.items()}
        with _put_back_on_failure(reached, aside):
            yield own._scaled(loss)
            with bookkeeping(), torch.no_grad():
                found = self._unscale_new(reached, aside, own._scale)
        for optimizer, found_inf in found.items():
            self._note(optimizer, loss_id, found_inf)

    def _reached(self, optimizers: Any) -> dict[Optimizer, list[Tensor]]:
        """The parameters of each optimizer, without those that an optimizer before it has."""
        chosen: dict[Optimizer, list[Tensor]] = {}
        seen: set[int] = set()
        for optimizer in as_list(optimizers) or [None]:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"optimizers: got a {type(optimizer).__name__}; expected the optimizer, or a list of the "
                    "optimizers, whose parameters this backward reaches."
                )
            if self._enabled and optimizer not in chosen:
                self._refuse_late(optimizer)
                params = self._known.of(optimizer).params
                _refuse_half(params)
                chosen[optimizer] = [param for param in params if id(param) not in seen]
                seen.update(map(id, params))
        return chosen

    def _refuse_late(self, optimizer: Optimizer) -> None:
        row = self._per_optimizer_states.get(id(optimizer))
        late = row is not None and row["stage"] is not OptState.READY and id(optimizer) not in self._by_loss
        if late or (row is not None and row["stage"] is OptState.STEPPED):
            raise RuntimeError(
                f"scale_loss() with {type(optimizer).__name__} after its unscale_() or step(): call update() first, or "
                "run every backward that reaches it before these."
            )

    def _unscale_new(
        self, reached: dict[Optimizer, list[Tensor]], aside: dict[Optimizer, list[SetAside]], scale: Tensor
    ) -> dict[Optimizer, Tensor]:
        """Take the scale out of what the backward has written; return found_inf of the optimizers that it reached."""
        found: dict[Optimizer, Tensor] = {}
        for optimizer, params in reached.items():
            known = self._known.kept(optimizer)
            shares = len(params) < len(known.params) and bool(found)
            if not shares and all(param.grad is None for param in params):
                put_back(aside[optimizer])
                continue
            start = torch.stack(list(found.values())).amax(0) if shares else torch.zeros(1, device=scale.device)
            found[optimizer] = add_unscaled(params, aside[optimizer], scale, known.unscaler, start)
        return found

    def _note(self, optimizer: Optimizer, loss_id: int, found_inf: Tensor) -> None:
        found_inf = found_inf.reshape(())
        row = self._per_optimizer_states[id(optimizer)]
        losses = self._by_loss.setdefault(id(optimizer), {})
        losses[loss_id] = _larger(losses.get(loss_id), found_inf)
        verdicts = row["found_inf_per_device"]
        verdicts[found_inf.device] = _larger(verdicts.get(found_inf.device), found_inf)
        row["stage"] = OptState.UNSCALED
        self._done.add(self._known.kept(optimizer).may_be_shared)

    # -- what it comes to --------------------------------------------------------------------------

    def _scale_at_fault(self, optimizer: Optimizer) -> Tensor:
        """``()`` float32: the scale of the first loss that overflowed under ``optimizer``. Sync: none."""
        scale = self._scale
        for loss_id, found_inf in sorted(self._by_loss.get(id(optimizer), {}).items(), reverse=True):
            scale = torch.where(found_inf.to(scale.device, non_blocking=True) > 0, self._loss(loss_id)._scale, scale)
        return scale

    def _found_of_losses(self, found_inf: Tensor) -> dict[int, Tensor]:
        """The verdict on each loss of this iteration; ``found_inf``, that on all of them, where `scale` was used."""
        if not self._by_loss:
            return {0: found_inf}
        found: dict[int, Tensor] = {}
        rows = self._per_optimizer_states.items()
        plain = [each for key, row in rows if key not in self._by_loss for each in row["found_inf_per_device"].values()]
        for loss_id, each in [*((0, each) for each in plain), *_pairs(self._by_loss.values())]:
            here = each.to(self._scale.device, non_blocking=True).reshape(())
            found[loss_id] = _larger(found.get(loss_id), here)
        return found

    def _move_scales_(self, found: dict[int, Tensor], verdict: bool | None) -> None:
        """Let the rule move the scale of each loss that had gradients; ``verdict`` is that on all of them."""
        if self._by_loss and verdict:
            verdict = None  # which of them overflowed is on the device
        for loss_id, found_inf in found.items():
            self._loss(loss_id)._move_scale_(found_inf, verdict)

    def _set_scales_(self, new_scale: float | Tensor) -> None:
        """Fill in a scale of the caller's, for every loss."""
        self._set_scale_(new_scale)
        for each in self._further:
            if each._scale is None:
                each._lazy_init_scale_growth_tracker(self._scale.device)
            each._set_scale_(new_scale)

    def get_scale(self, loss_id: int = 0) -> float:
        """Return the scale of a loss, or 1.0 where scaling is disabled. Sync: one, once it was used.

        Raises: IndexError, TypeError: no such loss.
        """
        own = self._loss(loss_id)
        return super().get_scale() if own is self else own.get_scale()

    # -- settings and checkpoints of all losses ----------------------------------------------------

    def follow(self, rule: ScaleRule) -> None:
        """Go on under another rule, every loss from the scale that it has; see `GradScalerSettings.follow`."""
        super().follow(rule)
        for each in self._further:
            each.follow(rule)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what a scale is multiplied by when it grows; not checked. Raises: RuntimeError, under a rule."""
        super().set_growth_factor(new_factor)
        for each in self._further:
            each.set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what a scale is multiplied by at an overflow; not checked. Raises: RuntimeError, under a rule."""
        super().set_backoff_factor(new_factor)
        for each in self._further:
            each.set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many clean steps let a scale grow; not checked. Raises: RuntimeError, under a rule."""
        super().set_growth_interval(new_interval)
        for each in self._further:
            each.set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: the entries of one loss, and those of the others under ``losses``.

        With ``num_losses=1`` torch's five entries, ``rule_state`` under a rule; {} if disabled. torch's own class
        loads it, too. Take it after `update`. Sync: two for each loss, once it was used.
        """
        state = super().state_dict()
        if state and self._further:
            state["losses"] = [each.state_dict() for each in self._further]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a `state_dict` of this class or of torch's; nothing happens where scaling is disabled.

        Under a rule the scale and what it has counted are taken up; its constants stay. Every loss goes on from the
        one scale of a state without ``losses``.

        Raises:
            RuntimeError: an empty dict, as a disabled scaler saves it.
            TypeError: no dict. KeyError: one of torch's five entries is missing.
            ValueError: the state of another number of losses; an entry whose value no scaler can have.

        Warns where another rule has counted the state.

        Sync: none.
        """
        if not self._enabled:
            return
        one = {name: value for name, value in checked_state(state_dict, self._floor).items() if name != "losses"}
        saved = state_dict.get("losses", [one] * len(self._further))
        if not isinstance(saved, list):
            raise ValueError(
                f"state_dict['losses'] = {saved!r}: expected a list of states; load what state_dict() gave."
            )
        if len(saved) != len(self._further):
            raise ValueError(
                f"The state is of {len(saved) + 1} losses, and this scaler has num_losses={len(self._further) + 1}: "
                "make the scaler as it was when it was saved."
            )
        saved = [checked_state(state, self._floor) for state in saved]
        super().load_state_dict(one)
        for each, state in zip(self._further, saved, strict=True):
            each.load_state_dict(state)


@contextlib.contextmanager
def _put_back_on_failure(
    reached: dict[Optimizer, list[Tensor]], aside: dict[Optimizer, list[SetAside]]
) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for optimizer, params in reached.items():
            for param in params:
                param.grad = None
            put_back(aside[optimizer])
        raise


def _refuse_half(params: list[Tensor]) -> None:
    if torch.float16 in {param.dtype for param in params if param.requires_grad}:
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and run the forward pass under "
            "autocast."
        )


def _larger(known: Tensor | None, found_inf: Tensor) -> Tensor:
    return found_inf if known is None else torch.maximum(known, found_inf.to(known.device, non_blocking=True))


def _pairs(verdicts: Iterable[dict[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    for losses in verdicts:
        yield from losses.items()
