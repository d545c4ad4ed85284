"""A rule on a device: scale and counts are tensors there, and a transition reads none of them back.

    scale = device_scale(rule, "cuda")
    (loss * scale.scale).backward()
    scale.update_(found_inf)               # Sync: none; found_inf stays on the device

Every `RecurrentRule` runs in this form, with bitwise the scales of the rule on the host (`RecurrentScale`). Any other
rule (DeepSpeed's, or your own) runs on the host, which then writes the scale to the device (`HostScale`):
``Sync: one``, or none if found_inf is a bool.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from amplab.kernels import update_scale_
from amplab.scalers.rules import HysteresisState, RecurrentRule, ScaleRule, ScaleState, float32, hysteresis_of
from amplab.scalers.to_device import to_device

__all__ = ["DeviceScale", "HostScale", "RecurrentScale", "device_scale"]


def device_scale(
    rule: ScaleRule, device: torch.device | str = "cpu", *, state: ScaleState | None = None
) -> "DeviceScale":
    """Put the state of a rule on a device.

    Args:
        rule: any rule.
        device: the device of the scale.
        state: the current state; None for the rule's start.

    Returns:
        A `RecurrentScale` (``syncs == 0``) if the rule is a `RecurrentRule`, else a `HostScale` (``syncs == 1``).

    Sync: none.

    >>> from amplab.scalers import DynamicScale
    >>> scale = device_scale(DynamicScale())
    >>> scale.update_(torch.ones(1))
    >>> scale.scale, scale.state()
    (tensor(32768.), ScaleState(scale=32768.0, clean_steps=0))
    """
    if isinstance(rule, RecurrentRule):
        return RecurrentScale(rule, torch.device(device), state=state)
    return HostScale(rule, torch.device(device), state=state)


class DeviceScale(ABC):
    """A loss scale on a device and the rule that moves it.

    Attributes:
        scale: ``()`` float32, the factor of the loss; updated in place, so a reference to it stays valid.
        clean_steps: ``()`` int32, updated in place.
        syncs: how often `update_` waits for the device if found_inf is a tensor: 0 or 1.
    """

    syncs: int

    def __init__(self, rule: ScaleRule, device: torch.device, *, state: ScaleState | None = None) -> None:
        self._rule = rule
        self.scale = torch.empty((), dtype=torch.float32, device=device)
        self.clean_steps = torch.empty((), dtype=torch.int32, device=device)
        self.load_(rule.start() if state is None else state)

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the scale; `follow` changes it."""
        return self._rule

    @abstractmethod
    def update_(self, found_inf: Tensor | bool) -> None:
        """Make the transition after a step.

        Args:
            found_inf: one element, float32, 0.0 for finite gradients, else > 0; or a bool.

        Sync: `syncs` for a tensor, none for a bool.
        """

    @abstractmethod
    def state(self) -> ScaleState:
        """Return the current state. Sync: one."""

    @abstractmethod
    def load_(self, state: ScaleState) -> None:
        """Set the current state, in the same tensors. Sync: none."""

    @abstractmethod
    def set_scale_(self, scale: float | Tensor) -> None:
        """Set the scale and keep the counts.

        Args:
            scale: a number, or a tensor of one element on any device.

        Sync: none; one for a tensor if the rule runs on the host (`syncs` is 1).
        """

    @abstractmethod
    def follow(self, rule: ScaleRule) -> None:
        """Continue from the current state under another rule of the same form.

        Raises:
            TypeError: the rule needs the other form; make a new object with `device_scale`.

        Sync: none.
        """


class RecurrentScale(DeviceScale):
    """The shared recurrence on tensors: `amplab.kernels.update_scale_` with the rule's constants. Sync: none."""

    syncs = 0

    def __init__(self, rule: RecurrentRule, device: torch.device, *, state: ScaleState | None = None) -> None:
        self._recurrence = rule.recurrence
        self._double = torch.empty((), dtype=torch.float64, device=device)  # Python floats need all of it
        self._hysteresis = torch.empty((), dtype=torch.int32, device=device)
        super().__init__(rule, device, state=state)

    @property
    def _exact(self) -> Tensor:
        """The scale in the precision of the rule."""
        return self.scale if self._recurrence.single else self._double

    @torch.no_grad()
    def update_(self, found_inf: Tensor | bool) -> None:
        """Make the transition after a step, on the device. Sync: none."""
        rule, found_inf = self._recurrence, self._on_device(found_inf)
        if rule.growth_interval is None:
            self.clean_steps.add_(1).masked_fill_(found_inf.reshape(()) != 0, 0)
            return
        update_scale_(
            self._exact,
            self.clean_steps,
            None if rule.hysteresis is None else self._hysteresis,
            found_inf,
            rule.growth_factor,
            rule.backoff_factor,
            int(rule.growth_interval),
            rule.hysteresis or 1,
            rule.floor,
            rule.ceiling,
            divides=rule.divides,
            keeps_finite=rule.keeps_finite,
            refills_at_growth=True,
        )
        if not rule.single:
            self.scale.copy_(self._double)

    def _on_device(self, found_inf: Tensor | bool) -> Tensor:
        if isinstance(found_inf, Tensor):
            return to_device(found_inf.detach(), self.scale.device, torch.float32)
        return torch.full((), float(found_inf), dtype=torch.float32, device=self.scale.device)

    def state(self) -> ScaleState:
        """Return the current state. Sync: one."""
        counts = (self._exact.double(), self.clean_steps.double(), self._hysteresis.double())
        scale, clean_steps, hysteresis = torch.stack(counts).tolist()
        if self._recurrence.hysteresis is None:
            return ScaleState(scale, int(clean_steps))
        return HysteresisState(scale, int(clean_steps), int(hysteresis))

    @torch.no_grad()
    def load_(self, state: ScaleState) -> None:
        """Set the current state; one that does not count hysteresis has all of it. Sync: none."""
        self._double.fill_(self._recurrence.round(state.scale))
        self.scale.copy_(self._double)
        self.clean_steps.fill_(state.clean_steps)
        self._hysteresis.fill_(hysteresis_of(state, self._recurrence.hysteresis or 1))

    @torch.no_grad()
    def set_scale_(self, scale: float | Tensor) -> None:
        """Set the scale, which may be outside the rule's bounds, and keep the counts. Sync: none."""
        scale = scale.detach().reshape(()) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
        self._double.copy_(to_device(scale, self._double.device, torch.float64))
        self.scale.copy_(self._double)

    @torch.no_grad()
    def follow(self, rule: ScaleRule) -> None:
        """Continue from the current state under other constants. Sync: none."""
        if not isinstance(rule, RecurrentRule):
            raise TypeError(
                f"{rule!r}: expected a RecurrentRule, as this scale runs on the device; make a new device_scale."
            )
        if self._recurrence.hysteresis is None and rule.recurrence.hysteresis is not None:
            self._hysteresis.fill_(rule.recurrence.hysteresis)
        self._double.copy_(self._exact)
        self._rule, self._recurrence = rule, rule.recurrence


class HostScale(DeviceScale):
    """A rule that runs on the host: DeepSpeed's, or your own. Sync: one."""

    syncs = 1

    def update_(self, found_inf: Tensor | bool) -> None:
        """Read found_inf, run the rule, write its scale to the device. Sync: one for a tensor, none for a bool."""
        self.load_(self._rule.next(self._state, bool(found_inf)))

    def state(self) -> ScaleState:
        """Return the current state. Sync: none."""
        return self._state

    @torch.no_grad()
    def load_(self, state: ScaleState) -> None:
        """Set the current state. Sync: none."""
        self._state = state
        self.scale.fill_(float32(state.scale))
        self.clean_steps.fill_(state.clean_steps)

    def set_scale_(self, scale: float | Tensor) -> None:
        """Set the scale and keep the counts. Sync: one for a tensor, none for a number."""
        self.load_(replace(self._state, scale=float(scale)))

    def follow(self, rule: ScaleRule) -> None:
        """Continue from the current state under another rule that accepts it. Sync: none."""
        if isinstance(rule, RecurrentRule):
            raise TypeError(f"{rule!r}: expected a rule that runs on the host; make a new device_scale.")
        self._rule = rule
