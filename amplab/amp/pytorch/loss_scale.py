"""LossScale: the scale of one loss of a `GradScaler`, on the device of the losses, and what moves it.

    rule=None    scale, growth_tracker <- torch._amp_update_scale_(...);  scale <- max(floor, scale)
    rule=...     the device form of a rule of `amplab.scalers`, with a floor

    ScaleCollapse     whether the scale has fallen so low that backoff cannot help
    check…            the numbers of torch's rule, new scales and saved states, as the methods of `GradScaler` get them

The scales of `amplab.amp.initialize` are on the host: ``apex/loss_scaling.py``.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amplab.amp.arguments import SMALLEST_SCALE
from amplab.scalers import DeviceScale, RecurrentRule, ScaleRule, ScaleState, device_scale, floored, to_device
from amplab.scalers.floored_rule import name_of_rule
from amplab.scalers.rules import require_factors, require_number, require_scale

__all__ = [
    "LossScale",
    "ScaleCollapse",
    "check_number",
    "check_numbers",
    "checked_scale",
    "checked_state",
    "checked_states",
]

_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_LARGEST = torch.finfo(torch.float32).max
_LOOK_EVERY = 8  # skipped steps in a row after which the host reads the scale
_COLLAPSED = 2.0**-24  # the smallest float16: no gradient that float16 can hold needs a scale below it
_ALLOWED: dict[str, tuple[float, float, str]] = {
    "scale": (0.0, _LARGEST, "a finite number >= 0, such as 65536.0"),  # torch's scale can fall to 0
    "growth_factor": (1.0, _LARGEST, "a finite number >= 1, such as 2.0; 1.0 keeps the scale from growing"),
    "backoff_factor": (SMALLEST_SCALE, 1.0, "a number > 0 and <= 1, such as 0.5; 1.0 keeps the scale from falling"),
    "growth_interval": (0, 2**63 - 1, "a whole number of steps >= 0, such as 2000; 0 keeps the scale from growing"),
    "_growth_tracker": (0, 2**31 - 1, "a whole number of steps >= 0, below 2^31"),
}
"""The smallest and the largest allowed value of each entry of a state, and both in words."""


class LossScale:
    """The scale of one loss.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` clean steps in a row.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: see ``growth_factor``.
        rule: a rule of `amplab.scalers` instead of torch's rule and its four numbers; None for torch's rule.
        floor: lower bound of the scale; None for no bound.

    Attributes:
        scale: ``()`` float32; None until the first loss, which determines the device.
        growth_tracker: ``()`` int32, the clean steps in a row; None until then.
        init_growth_tracker: its first value.

    Raises:
        ValueError: the floor is above the first scale, or above the rule's ceiling, or not a finite number > 0.
    """

    def __init__(
        self,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        *,
        rule: ScaleRule | None,
        floor: float | None,
    ) -> None:
        require_scale("floor", floor, optional=True)
        self.init_scale, self.init_growth_tracker = init_scale, 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.floor = floor
        self.rule: ScaleRule | None = None
        self._rule_name: str | None = None
        self._form: DeviceScale | None = None
        self._init_state: ScaleState | None = None
        if rule is not None:
            self._take_rule(rule, None)
        if floor is not None and floor > max(self.init_scale, SMALLEST_SCALE):
            raise ValueError(
                f"floor={floor}: expected a value <= the first scale, {self.init_scale}; lower the floor or raise "
                "init_scale."
            )

    # -- its product with a loss, and its moves ------------------------------------------------------

    def put_on(self, device: torch.device) -> Tensor:
        """Make the tensors on ``device``; return `scale`."""
        if self.rule is not None:
            self._form = device_scale(self.rule, device, state=self._init_state)
            self.scale, self.growth_tracker = self._form.scale, self._form.clean_steps
        else:
            scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
            self.growth_tracker = torch.full((), self.init_growth_tracker, dtype=torch.int32, device=device)
            self.scale = scale  # last: it says that both are there
        return self.scale

    def times(self, output: Tensor) -> Tensor:
        """Return ``output * scale``; in float32 for one float16 element, whose product could overflow. Sync: none."""
        scale = self.put_on(output.device) if self.scale is None else self.scale
        if output.dtype is torch.float16 and output.numel() == 1:
            output = output.float()
        return output * to_device(scale, output.device)

    def update_(self, found_inf: Tensor, verdict: bool | None) -> None:
        """Move the scale by the rule: it backs off after an overflow and grows after enough clean steps.

        Args:
            found_inf: ``()`` float32 on the scale's device, > 0 for an overflow.
            verdict: the same, if the host knows it; a rule that runs on the host then needs no sync.
        """
        if self._form is not None:
            self._form.update_(found_inf if verdict is None or not self._form.syncs else verdict)
            return
        if self.scale is None or self.growth_tracker is None:
            raise AssertionError("update() before scale(): there is no scale yet; call scale(loss) first.")
        numbers = (self.growth_factor, self.backoff_factor, self.growth_interval)
        torch._amp_update_scale_(self.scale, self.growth_tracker, found_inf, *numbers)
        if self.floor is not None:
            self.scale.clamp_(min=self.floor)

    def set_(self, new_scale: float | Tensor, device: torch.device) -> None:
        """Replace the scale; the count of clean steps continues.

        Args:
            new_scale: a number, or a tensor of one element; if that is not finite and > 0, the scale stays.
            device: where to make the scale if it does not exist yet.
        """
        scale = self.put_on(device) if self.scale is None else self.scale
        if isinstance(new_scale, Tensor):  # not read, so that nothing waits for it
            new_scale = torch.where((new_scale > 0) & new_scale.isfinite(), new_scale.to(scale), scale)
        if self._form is not None:
            self._form.set_scale_(new_scale)
        elif isinstance(new_scale, Tensor):
            scale.copy_(new_scale)
        else:
            scale.fill_(new_scale)

    def value(self) -> float:
        """Return the scale as a number. Sync: one, after the first loss."""
        return self.init_scale if self.scale is None else self.scale.item()

    # -- the rule ------------------------------------------------------------------------------------

    @property
    def skips(self) -> bool:
        """Whether a step is skipped after an overflow."""
        return self.rule is None or self.rule.skips_on_overflow

    def follow(self, rule: ScaleRule) -> None:
        """Continue under ``rule`` from the current scale. Sync: one."""
        self._take_rule(rule, self._state())
        if self.scale is not None:
            self.put_on(self.scale.device)

    def _take_rule(self, rule: ScaleRule, state: ScaleState | None) -> None:
        self.rule, self._rule_name = floored(rule, self.floor), name_of_rule(rule)
        self._take_state(self.rule.start() if state is None else state)
        if isinstance(rule, RecurrentRule):
            numbers = rule.recurrence
            self.growth_factor, self.growth_interval = numbers.growth_factor, numbers.growth_interval or 0
            self.backoff_factor = 1.0 / numbers.backoff_factor if numbers.divides else numbers.backoff_factor

    def _take_state(self, state: ScaleState) -> None:
        self._init_state = state
        self.init_scale, self.init_growth_tracker = state.scale, state.clean_steps

    def _state(self) -> ScaleState:
        if self._form is not None:
            return self._form.state()
        return self._init_state or ScaleState(self.value(), self._count())

    def _count(self) -> int:
        return self.init_growth_tracker if self.growth_tracker is None else int(self.growth_tracker.item())

    def set_number(self, name: str, value: Any) -> None:
        """Set a number of torch's rule.

        Args:
            name: "growth_factor", "backoff_factor" or "growth_interval".
            value: the new value.

        Raises:
            RuntimeError: the number belongs to a rule of `amplab.scalers`, which is frozen. ValueError: it is not
                allowed.
        """
        if self.rule is not None:
            raise RuntimeError(
                f"{name} belongs to {self.rule!r}, which cannot be changed: call scaler.follow(dataclasses.replace("
                "rule, ...)) instead."
            )
        check_number(name, value, f"{name}=")
        setattr(self, name, value)

    # -- copies and checkpoints ----------------------------------------------------------------------

    def copied(self) -> "LossScale":
        """Return a copy with tensors of its own. Sync: two, after the first loss."""
        other = copy.copy(self)
        if self.scale is not None:
            other.put_on(self.scale.device)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, and ``rule_state`` under a rule. Sync: two, after the first loss."""
        state: dict[str, Any] = {
            "scale": self.value(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._count(),
        }
        if self.rule is not None:
            state["rule_state"] = {**asdict(self._state()), "rule": self._rule_name}
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that `checked_state` returned. A rule keeps its constants. Sync: none."""
        self._warn_of_another_rule(saved)
        if self.rule is not None:
            self._load_rule_state(self.rule.start(), saved)
            return
        self.growth_factor, self.backoff_factor = saved["growth_factor"], saved["backoff_factor"]
        self.growth_interval = saved["growth_interval"]
        self.init_scale, self.init_growth_tracker = saved["scale"], saved["_growth_tracker"]
        if self.scale is not None and self.growth_tracker is not None:
            self.scale.fill_(self.init_scale)
            self.growth_tracker.fill_(self.init_growth_tracker)

    def _load_rule_state(self, start: ScaleState, saved: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {"scale": float(saved["scale"]), "clean_steps": int(saved["_growth_tracker"])}
        values |= saved.get("rule_state", {})
        known = {field.name for field in fields(start)}
        state = replace(start, **{name: value for name, value in values.items() if name in known})
        self._take_state(state)
        if self._form is not None:
            self._form.load_(state)

    def _warn_of_another_rule(self, saved: Mapping[str, Any]) -> None:
        other = saved.get("rule_state", {}).get("rule")
        if other is not None and other != (self._rule_name or "DynamicScale"):  # torch's rule is a DynamicScale
            own = self._rule_name or "torch's own rule"
            warnings.warn(
                f"The state was saved with {other}, and this GradScaler has {own}: the scale continues from "
                f"{saved['scale']} with {own}. Create the scaler with rule={other}(...) to continue as before.",
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle contains: settings and state, not the device. Sync: two, after the first loss."""
        state = vars(self).copy()
        if self.rule is not None:
            state["_init_state"] = self._state()
        state.update(init_scale=self.value(), init_growth_tracker=self._count())
        state.update(scale=None, growth_tracker=None, _form=None)
        return state


class ScaleCollapse:
    """Whether the scale is so low that further backoff cannot help; there is one warning of it.

    The host reads the scale when it is asked for, and after every eighth skipped step in a row.
    """

    def __init__(self) -> None:
        self._skipped_in_a_row = 0
        self._warned = False

    def note_step(self) -> None:
        """Note a step that was not skipped."""
        self._skipped_in_a_row = 0

    def note_skip(self) -> bool:
        """Note a skipped step; return whether to read the scale now, for `warn_once`."""
        self._skipped_in_a_row += 1
        return self._skipped_in_a_row % _LOOK_EVERY == 0

    def warn_once(self, scale: float, init_scale: float) -> None:
        """Warn, the first time that the scale is below the smallest float16 and below the first scale."""
        if self._warned or not 0.0 <= scale < min(_COLLAPSED, init_scale):
            return
        self._warned = True
        warnings.warn(
            f"The loss scale has collapsed to {scale}: gradients overflow at every scale, so they are inf or NaN for "
            "another reason. Look at scaler.last_step.first_nonfinite, at the loss itself, and at the learning rate.",
            stacklevel=3,
        )


def check_numbers(
    init_scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any, *, only_types: bool
) -> None:
    """Check the four numbers of torch's rule; as in torch, a tensor of one element is a number.

    Raises:
        TypeError: for the first that is not a number. ValueError: without ``only_types``, for the first that is not
            allowed.
    """
    given = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
    for (name, value), such in zip(given.items(), ("65536.0", "2.0", "0.5"), strict=True):
        if not (isinstance(value, Tensor) and value.numel() == 1):
            require_number(name, value, such)
    if not isinstance(growth_interval, Real) or growth_interval % 1 != 0:
        raise TypeError(f"growth_interval={growth_interval!r}: expected a whole number of steps, such as 2000.")
    if only_types:
        return
    require_scale("init_scale", float(init_scale))
    require_factors(float(growth_factor), float(backoff_factor))
    check_number("growth_interval", growth_interval, "growth_interval=")


def checked_scale(new_scale: float | Tensor, device: str) -> float | Tensor:
    """Return what `GradScaler.update` takes as the new scale: a number, or a ``()`` tensor. Sync: none.

    Args:
        new_scale: anything.
        device: the device of the scaler, such as "cuda".

    Raises:
        TypeError: neither a number nor a tensor. ValueError: a number that is not a scale. AssertionError: a tensor of
            another device type, with more elements, or with a gradient.
    """
    if isinstance(new_scale, Real):
        require_scale("new_scale", new_scale)
        return float(new_scale)
    if not isinstance(new_scale, Tensor):
        raise TypeError(f"new_scale={new_scale!r}: expected a number, or a tensor of one element on the device.")
    if new_scale.device.type != torch.device(device).type or new_scale.numel() != 1 or new_scale.requires_grad:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
            f"requires_grad=False. It is of shape {tuple(new_scale.shape)}, on {new_scale.device}, with "
            f"requires_grad={new_scale.requires_grad}; this scaler is for {device}."
        )
    return new_scale.reshape(())


def checked_states(saved: Any, num_losses: int, floor: float | None) -> list[dict[str, Any]]:
    """Return the state of each loss, checked; a saved state without ``losses`` counts for every loss.

    Args:
        saved: from `GradScaler.state_dict`, of amplab or of torch.
        num_losses: the number of losses of the scaler that loads it.
        floor: replaces a saved scale of 0; None keeps it.

    Raises:
        As `checked_state`. ValueError: the state of another number of losses.
    """
    others = num_losses - 1
    first = {name: value for name, value in checked_state(saved, floor).items() if name != "losses"}
    of_others = saved.get("losses", [first] * others)
    if not isinstance(of_others, list):
        raise ValueError(
            f"state_dict['losses'] = {of_others!r}: expected a list of states; load what state_dict() returned."
        )
    if len(of_others) != others:
        raise ValueError(
            f"The state has {len(of_others) + 1} losses, and this scaler has num_losses={num_losses}: create the "
            "scaler as it was when it was saved."
        )
    return [first, *(checked_state(state, floor) for state in of_others)]


def checked_state(saved: Any, floor: float | None) -> dict[str, Any]:
    """Return a saved state with its scale as a float.

    Args:
        saved: from `GradScaler.state_dict`, of amplab or of torch.
        floor: replaces a saved scale of 0; None keeps it.

    Raises:
        TypeError: not a mapping. RuntimeError: empty, as a disabled scaler saves it. KeyError: an entry is missing.
        ValueError: an entry with an invalid value.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"load_state_dict got an object of type {type(saved).__name__}: expected the dict that state_dict() "
            'returned; with a checkpoint pass checkpoint["scaler"].'
        )
    if not saved:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler. "
            "Load one that an enabled scaler has saved, or continue without loading."
        )
    missing = [name for name in _ENTRIES if name not in saved]
    if missing:
        raise KeyError(_what_is_missing(missing[0], saved))
    scale = saved["scale"].item() if isinstance(saved["scale"], Tensor) else saved["scale"]
    for name in _ENTRIES:
        check_number(name, scale if name == "scale" else saved[name], f"state_dict[{name!r}] = ")
    _check_rule_state(saved.get("rule_state", {}))
    return {**saved, "scale": float(scale) or floor or 0.0}


def _check_rule_state(saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict['rule_state'] = {saved!r}: expected the dict that state_dict() returned.")
    for name, entry in (("scale", "scale"), ("clean_steps", "_growth_tracker"), ("hysteresis", "_growth_tracker")):
        if name in saved:
            check_number(entry, saved[name], f"state_dict['rule_state'][{name!r}] = ")


def check_number(name: str, value: Any, given: str) -> None:
    """Raise ValueError unless ``value`` is allowed as the entry ``name`` of a state.

    Args:
        name: one of torch's five entries.
        value: anything.
        given: begins the message, such as "growth_factor=".
    """
    smallest, largest, expected = _ALLOWED[name]
    allowed = _is_number(value) and smallest <= value <= largest
    if not allowed or (isinstance(smallest, int) and value % 1 != 0):
        raise ValueError(f"{given}{value!r}: expected {expected}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _what_is_missing(name: str, saved: Mapping[str, Any]) -> str:
    if any(str(key).startswith("loss_scaler") for key in saved):
        return f"{name}: expected the state of a GradScaler, and amp.state_dict() wrote this: use amp.load_state_dict."
    return f"{name}: expected {', '.join(_ENTRIES)}, as state_dict() returns them; got {', '.join(map(str, saved))}."
