"""A rule on the device: scale and counts are tensors there, and a step from state to state reads none of them.

    scale = device_scale(rule, "cuda")
    (loss * scale.scale).backward()
    scale.update_(found_inf)               # Sync: none; found_inf stays where the kernel wrote it

Every `RecurrentRule` has this form, with the bits of the pure rule. Any other rule (DeepSpeed's, a user's own) is
asked on the host and its scale written to the device: ``Sync: one``, or none when the verdict is there as a bool.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from amplab.kernels import update_scale_
from amplab.scalers.recurrence import RecurrentRule, patience_of
from amplab.scalers.rules import ScaleRule
from amplab.scalers.scale_state import HysteresisState, ScaleState, float32

__all__ = ["AskedScale", "DeviceScale", "RecurrentScale", "device_scale"]


def device_scale(
    rule: ScaleRule, device: torch.device | str = "cpu", *, state: ScaleState | None = None
) -> "DeviceScale":
    """Put a rule's state on a device.

    Args:
        rule: any rule.
        device: where the scale lives.
        state: where the rule stands; None for its start.

    Returns:
        A `RecurrentScale` (``syncs == 0``) for a rule that is the shared recurrence, else an `AskedScale`
        (``syncs == 1``).

    Sync: none.

    >>> from amplab.scalers import DynamicScale
    >>> scale = device_scale(DynamicScale())
    >>> scale.update_(torch.ones(1))
    >>> scale.scale, scale.state()
    (tensor(32768.), ScaleState(scale=32768.0, clean_steps=0))
    """
    form = RecurrentScale if isinstance(rule, RecurrentRule) else AskedScale
    return form(rule, torch.device(device), state=state)


class DeviceScale(ABC):
    """A loss scale on a device and the rule that moves it.

    Attributes:
        scale: ``()`` float32, what the loss is multiplied by; updated in place, so it may be kept.
        clean_steps: ``()`` int32, updated in place.
        syncs: how often `update_` waits for the device when the verdict is a tensor: 0 or 1.
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
        """Move on after a step.

        Args:
            found_inf: one element, float32, 0.0 for finite gradients, else > 0; or the verdict itself, as a bool.

        Sync: as `syncs` says for a tensor, none for a bool.
        """

    @abstractmethod
    def state(self) -> ScaleState:
        """Where the rule stands. Sync: one."""

    @abstractmethod
    def load_(self, state: ScaleState) -> None:
        """Take up a state, in the tensors that are there. Sync: none."""

    @abstractmethod
    def set_scale_(self, scale: float | Tensor) -> None:
        """Go on from another scale; what the rule has counted stays.

        Args:
            scale: a number, or a tensor of one element on any device.

        Sync: none; one for a tensor where the host is asked (`syncs` is 1).
        """

    @abstractmethod
    def follow(self, rule: ScaleRule) -> None:
        """Go on from here under another rule of the same form.

        Raises:
            TypeError: the rule needs another form; make a new one with `device_scale`.

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
        """The scale in the precision that the rule keeps."""
        return self.scale if self._recurrence.single else self._double

    @torch.no_grad()
    def update_(self, found_inf: Tensor | bool) -> None:
        """Move on after a step, on the device. Sync: none."""
        rule, verdict = self._recurrence, self._verdict(found_inf)
        if rule.growth_interval is None:
            self.clean_steps.add_(1).masked_fill_(verdict.reshape(()) != 0, 0)
            return
        update_scale_(
            self._exact,
            self.clean_steps,
            None if rule.hysteresis is None else self._hysteresis,
            verdict,
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

    def _verdict(self, found_inf: Tensor | bool) -> Tensor:
        if isinstance(found_inf, Tensor):
            return found_inf.detach().to(self.scale.device, torch.float32, non_blocking=True)
        return torch.full((), float(found_inf), device=self.scale.device)

    def state(self) -> ScaleState:
        """Where the rule stands. Sync: one."""
        counts = (self._exact.double(), self.clean_steps.double(), self._hysteresis.double())
        scale, clean_steps, hysteresis = torch.stack(counts).tolist()
        if self._recurrence.hysteresis is None:
            return ScaleState(scale, int(clean_steps))
        return HysteresisState(scale, int(clean_steps), int(hysteresis))

    @torch.no_grad()
    def load_(self, state: ScaleState) -> None:
        """Take up a state; one without a count of patience gets all of it. Sync: none."""
        self._double.fill_(self._recurrence.round(state.scale))
        self.scale.copy_(self._double)
        self.clean_steps.fill_(state.clean_steps)
        self._hysteresis.fill_(patience_of(state, self._recurrence.hysteresis or 1))

    @torch.no_grad()
    def set_scale_(self, scale: float | Tensor) -> None:
        """Go on from another scale, which may lie outside the rule's bounds. Sync: none."""
        scale = scale.detach().reshape(()) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
        self._double.copy_(scale.to(self._double.device, torch.float64, non_blocking=True))
        self.scale.copy_(self._double)

    @torch.no_grad()
    def follow(self, rule: ScaleRule) -> None:
        """Go on from here under other constants. Sync: none."""
        if not isinstance(rule, RecurrentRule):
            raise TypeError(
                f"{rule!r}: expected a rule that is the shared recurrence; make a new device_scale for any other."
            )
        if self._recurrence.hysteresis is None and rule.recurrence.hysteresis is not None:
            self._hysteresis.fill_(rule.recurrence.hysteresis)
        self._double.copy_(self._exact)
        self._rule, self._recurrence = rule, rule.recurrence


class AskedScale(DeviceScale):
    """A rule that only the host can ask: DeepSpeed's, a user's own. Sync: one."""

    syncs = 1

    def update_(self, found_inf: Tensor | bool) -> None:
        """Read the verdict, ask the rule, write its scale to the device. Sync: one for a tensor, none for a bool."""
        self.load_(self._rule.next(self._state, bool(found_inf)))

    def state(self) -> ScaleState:
        """Where the rule stands. Sync: none, it is here."""
        return self._state

    @torch.no_grad()
    def load_(self, state: ScaleState) -> None:
        """Take up a state. Sync: none."""
        self._state = state
        self.scale.fill_(float32(state.scale))
        self.clean_steps.fill_(state.clean_steps)

    def set_scale_(self, scale: float | Tensor) -> None:
        """Go on from another scale. Sync: one for a tensor, none for a number."""
        self.load_(replace(self._state, scale=float(scale)))

    def follow(self, rule: ScaleRule) -> None:
        """Go on from here under another rule that understands the present state. Sync: none."""
        if isinstance(rule, RecurrentRule):
            raise TypeError(f"{rule!r}: expected a rule that the host is asked; make a new device_scale for this one.")
        self._rule = rule
