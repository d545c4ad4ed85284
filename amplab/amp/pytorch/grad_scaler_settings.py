"""What a GradScaler is set to, where its scale stands, and how both are kept: the half of it that meets no gradient.

    rule=None    scale, tracker <- torch._amp_update_scale_(...);  scale <- max(floor, scale)
    rule=...     the device form of a rule of `amplab.scalers`, a floor under it

The other half is in ``grad_scaler.py``.
"""

import warnings
from dataclasses import asdict, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amplab.amp.backward.loss_scaler import SMALLEST_SCALE
from amplab.amp.pytorch.grad_scaler_state import checked_state, warn_of_another_rule
from amplab.scalers import DeviceScale, RecurrentRule, ScaleRule, ScaleState, device_scale, floored
from amplab.scalers.floored_rule import name_of_rule
from amplab.scalers.rules import require_scale

__all__ = ["GradScalerSettings"]

_NUMBERS = (2.0**16, 2.0, 0.5, 2000)
_COLLAPSED = 2.0**-24  # the smallest float16: no gradient that float16 can hold needs a scale below it


class GradScalerSettings(torch.amp.GradScaler):
    """Settings, scale and checkpoints of `amplab.amp.GradScaler`, which says what its arguments are."""

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        *,
        rule: ScaleRule | None,
        floor: float | None,
    ) -> None:
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=3)
            enabled = False
        require_scale("floor", floor, optional=True)
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        if rule is not None and numbers != _NUMBERS:
            raise ValueError(
                f"rule={rule!r} and numbers of torch's rule, {numbers}: expected one of the two; put the numbers into "
                "the rule."
            )
        super().__init__(device, *numbers, enabled=enabled)
        if not enabled:  # torch leaves these out, and its getters raise
            self._set_numbers(*numbers)
            self._init_growth_tracker, self._scale, self._growth_tracker = 0, None, None
        self._floor = floor
        self._form: DeviceScale | None = None
        self._rule: ScaleRule | None = None
        self._rule_name: str | None = None
        self._init_state: ScaleState | None = None
        self._warned_of_collapse = False
        if rule is not None:
            self._take_rule(rule, None)
        first = init_scale if rule is None else rule.start().scale
        if floor is not None and floor > max(first, SMALLEST_SCALE):
            raise ValueError(
                f"floor={floor}: the scale begins at {first}, below it; lower the floor or begin higher (init_scale)."
            )

    # -- the rule ----------------------------------------------------------------------------------

    @property
    def rule(self) -> ScaleRule | None:
        """The rule that moves the scale, over its floor; None for torch's own, whose numbers have getters."""
        return self._rule

    def follow(self, rule: ScaleRule) -> None:
        """Go on under another rule, from the scale that is in force.

        Args:
            rule: any rule; the floor of this scaler holds under it, too.

        Raises:
            ValueError: the floor is above the rule's ceiling.

        Sync: one.
        """
        self._take_rule(rule, self._state())
        if self._scale is not None:
            self._put_on(self._scale.device)

    def _take_rule(self, rule: ScaleRule, state: ScaleState | None) -> None:
        self._rule, self._rule_name = floored(rule, self._floor), name_of_rule(rule)
        self._take_state(self._rule.start() if state is None else state)
        if isinstance(rule, RecurrentRule):
            numbers = rule.recurrence
            shrinks = 1.0 / numbers.backoff_factor if numbers.divides else numbers.backoff_factor
            self._set_numbers(self._init_scale, numbers.growth_factor, shrinks, numbers.growth_interval or 0)

    def _take_state(self, state: ScaleState) -> None:
        self._init_state = state
        self._init_scale, self._init_growth_tracker = state.scale, state.clean_steps

    def _put_on(self, device: torch.device) -> None:
        self._form = device_scale(self._rule, device, state=self._init_state)
        self._scale, self._growth_tracker = self._form.scale, self._form.clean_steps

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._rule is None:
            super()._lazy_init_scale_growth_tracker(dev)
        else:
            self._put_on(dev)

    def _state(self) -> ScaleState:
        """Where the rule stands. Sync: one."""
        if self._form is not None:
            return self._form.state()
        return self._init_state or ScaleState(self.get_scale(), self._get_growth_tracker())

    @property
    def _skips(self) -> bool:
        return self._rule is None or self._rule.skips_on_overflow

    # -- the scale ---------------------------------------------------------------------------------

    def _move_scale_(self, found_inf: Tensor, verdict: bool | None) -> None:
        """Let the rule move the scale; a rule that the host is asked takes the verdict where it is known."""
        if self._form is not None:
            self._form.update_(found_inf if verdict is None or not self._form.syncs else verdict)
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        numbers = (self._growth_factor, self._backoff_factor, self._growth_interval)
        torch._amp_update_scale_(scale, tracker, found_inf, *numbers)
        if self._floor is not None:
            scale.clamp_(min=self._floor)

    def _set_scale_(self, new_scale: float | Tensor) -> None:
        """Fill in a scale of the caller's; the tracker goes on."""
        new_scale = self._checked(new_scale)
        if self._form is not None:
            self._form.set_scale_(new_scale)
        elif isinstance(new_scale, Tensor):
            self._scale.copy_(new_scale)
        else:
            self._scale.fill_(new_scale)

    def _checked(self, new_scale: float | Tensor) -> float | Tensor:
        if isinstance(new_scale, Real):
            return float(new_scale)
        if not isinstance(new_scale, Tensor):
            raise TypeError(f"new_scale={new_scale!r}: expected a number, or a tensor of one element on the device.")
        if (
            new_scale.device.type != torch.device(self._device).type
            or new_scale.numel() != 1
            or new_scale.requires_grad
        ):
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
                f"requires_grad=False. It is of shape {tuple(new_scale.shape)}, on {new_scale.device}, with "
                f"requires_grad={new_scale.requires_grad}; this scaler is for {self._device}."
            )
        return new_scale.reshape(())

    def get_scale(self) -> float:
        """Return the scale, or 1.0 where scaling is disabled. Sync: one, once `scale` was called."""
        scale = super().get_scale()
        self._warn_of_collapse(scale)
        return scale

    def _warn_of_collapse(self, scale: float) -> None:
        """Say once that the scale has fallen so low that lowering it further helps nobody."""
        if self._warned_of_collapse or not 0.0 <= scale < min(_COLLAPSED, self._init_scale):
            return
        self._warned_of_collapse = True
        warnings.warn(
            f"The loss scale has collapsed to {scale}: gradients overflow at every scale, so they are inf or NaN for "
            "another reason. Look at scaler.last_step.first_nonfinite, at the loss itself, and at the learning rate.",
            stacklevel=3,
        )

    # -- the numbers of torch's rule ---------------------------------------------------------------

    def _set_numbers(
        self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
    ) -> None:
        self._init_scale, self._growth_factor = init_scale, growth_factor
        self._backoff_factor, self._growth_interval = backoff_factor, growth_interval

    def _require_torchs_rule(self, name: str) -> None:
        if self._rule is not None:
            raise RuntimeError(
                f"{name} is a number of {self._rule!r}, which is frozen: call scaler.follow(dataclasses.replace(rule, "
                "...)) to change it."
            )

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows; not checked. Raises: RuntimeError, under a rule."""
        self._require_torchs_rule("growth_factor")
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by at an overflow; not checked. Raises: RuntimeError, under a rule."""
        self._require_torchs_rule("backoff_factor")
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many clean steps let the scale grow; not checked. Raises: RuntimeError, under a rule."""
        self._require_torchs_rule("growth_interval")
        super().set_growth_interval(new_interval)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: torch's five entries, and ``rule_state`` under a rule; {} if disabled.

        ``scale`` (float), ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker`` (int).
        torch's own class loads it, too. Take it after `update`. Sync: two, once `scale` was called.
        """
        state = super().state_dict()
        if state and self._rule is not None:
            state["rule_state"] = {**asdict(self._state()), "rule": self._rule_name}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a `state_dict` of this class or of torch's; nothing happens where scaling is disabled.

        Under a rule the scale and what it has counted are taken up; its constants stay.

        Raises:
            RuntimeError, KeyError, TypeError, ValueError: as `checked_state`.

        Sync: none.
        """
        if not self._enabled:
            return
        state_dict = checked_state(state_dict, self._floor)
        warn_of_another_rule(state_dict, self._rule_name)
        if self._rule is None:
            super().load_state_dict(state_dict)
            return
        start = self._rule.start()
        saved = {"scale": float(state_dict["scale"]), "clean_steps": int(state_dict["_growth_tracker"])}
        saved = {**saved, **state_dict.get("rule_state", {})}
        known = {field.name for field in fields(start)}
        self._take_state(replace(start, **{name: value for name, value in saved.items() if name in known}))
        if self._form is not None:
            self._form.load_(self._init_state)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and self._rule is not None:
            state["_init_state"], state["_form"] = self._state(), None
        return state
