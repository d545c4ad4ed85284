"""A rule on the device: scale and counts are tensors there, and a step from state to state reads none of them.

    scale = device_scale(rule, "cuda")
    (loss * scale.scale).backward()
    scale.update_(found_inf)               # Sync: none; found_inf stays where the kernel wrote it

Every `RecurrentRule` has this form, with the bits of the pure rule. Any other rule (DeepSpeed's, a user's own) is
asked on the host and its scale written to the device: ``Sync: one``, or none when the verdict is there as a bool.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from amplab.scalers.recurrence import Recurrence, RecurrentRule, patience_of
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
    """The shared recurrence on tensors. Sync: none.

    The arithmetic is the pure rule's: products in float64, rounded to float32 where the source keeps a float32.
    Where that is torch's own rule between bounds, torch's one kernel does it.
    """

    syncs = 0

    def __init__(self, rule: RecurrentRule, device: torch.device, *, state: ScaleState | None = None) -> None:
        self._recurrence = rule.recurrence
        self._exact = torch.empty((), dtype=torch.float64, device=device)  # Python floats need all of it
        self._hysteresis = torch.empty((), dtype=torch.int32, device=device)
        super().__init__(rule, device, state=state)

    @torch.no_grad()
    def update_(self, found_inf: Tensor | bool) -> None:
        """Move on after a step, on the device. Sync: none."""
        if self._torch_kernel and isinstance(found_inf, Tensor):
            self._update_by_torch_(found_inf.detach().to(self.scale.device, non_blocking=True))
            return
        bad = self._verdict(found_inf)
        if self._recurrence.growth_interval is None:
            self.clean_steps.add_(1).masked_fill_(bad, 0)
            return
        clean_steps = self.clean_steps + 1
        grows = (clean_steps >= self._recurrence.growth_interval).logical_and_(bad.logical_not())
        backs_off = self._count_hysteresis_(bad, grows)
        scale = torch.where(grows, _grown(self._recurrence, self._exact), self._exact)
        self._exact.copy_(torch.where(backs_off, _backed_off(self._recurrence, self._exact), scale))
        self.scale.copy_(self._exact)
        self.clean_steps.copy_(clean_steps.masked_fill_(bad.logical_or(grows), 0))

    def _update_by_torch_(self, found_inf: Tensor) -> None:
        rule = self._recurrence
        factors = (rule.growth_factor, rule.backoff_factor)
        torch._amp_update_scale_(self.scale, self.clean_steps, found_inf, *factors, rule.growth_interval)
        if rule.floor > 0.0 or rule.ceiling < math.inf:
            self.scale.clamp_(rule.round(rule.floor), rule.round(rule.ceiling))
        self._exact.copy_(self.scale)

    def _verdict(self, found_inf: Tensor | bool) -> Tensor:
        if isinstance(found_inf, Tensor):
            return found_inf.detach().to(self.scale.device, non_blocking=True).reshape(()) != 0
        return torch.full((), found_inf, dtype=torch.bool, device=self.scale.device)

    def _count_hysteresis_(self, bad: Tensor, grows: Tensor) -> Tensor:
        """Use up or refill the patience; return whether the scale backs off now."""
        patience = self._recurrence.hysteresis
        if patience is None:
            return bad
        self._hysteresis.sub_(bad.int()).masked_fill_(grows, patience)
        return bad.logical_and(self._hysteresis <= 0)

    def state(self) -> ScaleState:
        """Where the rule stands. Sync: one."""
        counts = (self._exact, self.clean_steps.double(), self._hysteresis.double())
        scale, clean_steps, hysteresis = torch.stack(counts).tolist()
        if self._recurrence.hysteresis is None:
            return ScaleState(scale, int(clean_steps))
        return HysteresisState(scale, int(clean_steps), int(hysteresis))

    @torch.no_grad()
    def load_(self, state: ScaleState) -> None:
        """Take up a state; one without a count of patience gets all of it. Sync: none."""
        self._exact.fill_(self._recurrence.round(state.scale))
        self.scale.copy_(self._exact)
        self.clean_steps.fill_(state.clean_steps)
        self._hysteresis.fill_(patience_of(state, self._recurrence.hysteresis or 1))
        self._torch_kernel = _is_torchs(self._recurrence) and _is_within(state, self._recurrence)

    @torch.no_grad()
    def set_scale_(self, scale: float | Tensor) -> None:
        """Go on from another scale, which may lie outside the rule's bounds. Sync: none."""
        self._torch_kernel = False  # its clamp would bring such a scale back at once; the rule does so when it moves
        scale = scale.detach().reshape(()) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
        exact = scale.to(self._exact.device, torch.float64, non_blocking=True)
        self._exact.copy_(_rounded(exact, self._recurrence))
        self.scale.copy_(self._exact)

    def follow(self, rule: ScaleRule) -> None:
        """Go on from here under other constants. Sync: none."""
        if not isinstance(rule, RecurrentRule):
            raise TypeError(
                f"{rule!r}: expected a rule that is the shared recurrence; make a new device_scale for any other."
            )
        if self._recurrence.hysteresis is None and rule.recurrence.hysteresis is not None:
            self._hysteresis.fill_(rule.recurrence.hysteresis)
        known = self._torch_kernel and _is_wider(rule.recurrence, self._recurrence)
        self._torch_kernel = known and _is_torchs(rule.recurrence)
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


def _is_torchs(rule: Recurrence) -> bool:
    """Whether torch's kernel and a clamp are this rule: a ceiling must cut growth off before it overflows."""
    alike = rule.single and rule.keeps_finite and not rule.divides and rule.hysteresis is None
    cut_off = rule.ceiling == math.inf or rule.round(rule.ceiling * rule.growth_factor) < math.inf
    return alike and cut_off and rule.growth_interval is not None and rule.growth_interval < 2**31


def _is_within(state: ScaleState, rule: Recurrence) -> bool:
    """Whether a state is one that the rule itself reaches: a clamp leaves it, and its count is below the interval."""
    inside = rule.round(rule.floor) <= rule.round(state.scale) <= rule.round(rule.ceiling)
    return inside and (rule.growth_interval is None or state.clean_steps < rule.growth_interval)


def _is_wider(rule: Recurrence, than: Recurrence) -> bool:
    """Whether every state within one rule is within the other; nothing is read from the device to know it."""
    if rule.growth_interval is None or than.growth_interval is None:
        return False
    bounds = rule.floor <= than.floor and rule.ceiling >= than.ceiling
    return bounds and rule.growth_interval >= than.growth_interval


def _rounded(scale: Tensor, recurrence: Recurrence) -> Tensor:
    """``()`` float64, through float32 where the source keeps one."""
    return scale.float().double() if recurrence.single else scale


def _backed_off(recurrence: Recurrence, scale: Tensor) -> Tensor:
    factor = recurrence.backoff_factor
    backed_off = _rounded(scale / factor if recurrence.divides else scale * factor, recurrence)
    return backed_off.clamp_min_(recurrence.round(recurrence.floor))


def _grown(recurrence: Recurrence, scale: Tensor) -> Tensor:
    grown = _rounded(scale * recurrence.growth_factor, recurrence).clamp_max_(recurrence.round(recurrence.ceiling))
    return torch.where(grown.isfinite(), grown, scale) if recurrence.keeps_finite else grown
