"""LossScaler: the scale of one loss on the host, the rule that moves it, and its saved form.

    scaler.update(found_inf)     the scale backs off after an overflow and grows after a window of clean backwards

The rules are in `amplab.scalers.rules`. The scales of `amplab.GradScaler` are on the device: ``pytorch/loss_scale.py``.
"""

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from amplab.amp.arguments import scale_value
from amplab.scalers import DynamicScale, ScaleRule, ScaleState, StaticScale

__all__ = ["SMALLEST_SCALE", "LossScaler", "checked_entry", "load_scalers", "save_scalers", "scale_rule"]

# The floor of a dynamic scale if none is given: 1 / scale is still finite in float32.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_SMALLEST_SUBNORMAL = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps

_ARGUMENTS = {  # of DynamicScale, and their names in initialize
    "init_scale": "dynamic_init_scale",
    "growth_factor": "scale_growth_factor",
    "backoff_factor": "scale_backoff_factor",
    "growth_interval": "scale_window",
    "floor": "min_loss_scale",
    "ceiling": "max_loss_scale",
    "DynamicScale": 'loss_scale="dynamic"',
    "StaticScale": "a number as loss_scale",
}


class LossScaler:
    """The scale of one loss, under the names of ``apex.amp.scaler.LossScaler``. It does not unscale gradients.

    Args:
        loss_scale: "dynamic", or a number for a static scale.
        init_scale: start of a dynamic scale, not above ``max_loss_scale``.
        scale_factor: the scale is multiplied by it to grow and divided by it to back off; > 1. (apex always uses 2.)
        scale_window: clean calls of `update_scale` after which the scale grows.
        min_loss_scale: floor of a dynamic scale; float32's smallest normal number if None or 0.
        max_loss_scale: ceiling; None for no ceiling.

    Attributes:
        rule: moves the scale.
        state: the scale, and the number of clean backwards since it last moved.
        unchecked: found_inf of a backward with ``delay_overflow_check``, which no one has read yet.

    Raises:
        ValueError, TypeError: as `scale_rule`.

    >>> scaler = LossScaler("dynamic")
    >>> scaler._overflow_buf.fill_(1)
    tensor([1], dtype=torch.int32)
    >>> scaler.update_scale(), scaler.loss_scale()
    (True, 32768.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        self._follow(
            scale_rule(
                loss_scale if dynamic else scale_value("loss_scale", loss_scale),
                init_scale=init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_value("scale_factor", scale_factor),
                growth_interval=scale_window,
                floor=min_loss_scale,
                ceiling=max_loss_scale,
            )
        )

    @classmethod
    def under(cls, rule: ScaleRule) -> Self:
        """Make a scaler whose scale is moved by ``rule``."""
        scaler = cls.__new__(cls)
        scaler._follow(rule)
        return scaler

    def _follow(self, rule: ScaleRule) -> None:
        self.rule, self.state = rule, rule.start()
        self.unchecked: Tensor | None = None
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    @property
    def scale(self) -> float:
        """The factor of the next loss."""
        return self.state.scale

    @property
    def dynamic(self) -> bool:
        """Whether an overflow skips the step and moves the scale."""
        return self.rule.skips_on_overflow

    def update(self, found_inf: bool) -> None:
        """Move the scale after one backward. apex counts backwards, not steps."""
        self.state = self.rule.next(self.state, found_inf)

    def take_unchecked(self) -> Tensor | None:
        """Return `unchecked` and clear it."""
        found_inf, self.unchecked = self.unchecked, None
        return found_inf

    def state_dict(self) -> dict[str, float | int]:
        """Return apex's entry: the scale, and the number of clean backwards since it last moved."""
        return {"loss_scale": self.state.scale, "unskipped": self.state.clean_steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a saved scale, raised to the floor if it is lower. A static scaler keeps its own scale.

        Raises:
            ValueError: not an entry of apex; the scale is negative or does not fit float32, or the count is not an
                integer >= 0.
        """
        scale, clean_steps = checked_entry(saved)
        if isinstance(self.rule, DynamicScale):
            # A count from a longer window lets the scale grow at the next clean backward.
            clean_steps = min(clean_steps, self.rule.growth_interval - 1)
            self.state = ScaleState(max(scale, self.rule.floor or SMALLEST_SCALE), clean_steps)

    # -- the names of apex -------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """Return the factor of the next loss."""
        return self.state.scale

    @property
    def _loss_scale(self) -> float:
        return self.state.scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.state = dataclasses.replace(self.state, scale=scale_value("_loss_scale", value))

    @property
    def _unskipped(self) -> int:
        return self.state.clean_steps

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.state = dataclasses.replace(self.state, clean_steps=int(value))

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    def clear_overflow_state(self) -> None:
        """Set ``_overflow_buf`` to 0. Sync: none."""
        self._overflow_buf = torch.zeros_like(self._overflow_buf)

    def update_scale(self) -> bool:
        """Move the scale by ``_overflow_buf``, and by found_inf of a backward with ``delay_overflow_check``.

        Returns:
            Whether the step should be skipped. The caller has to skip it.

        Sync: one.
        """
        unchecked = self.take_unchecked()
        found_inf = self._has_overflow or (unchecked is not None and bool(unchecked.any()))
        self.clear_overflow_state()
        self.update(found_inf and self.dynamic)
        return found_inf and self.dynamic

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.loss_scalers[…].{name}: amplab has no such thing; a scaler has loss_scale(), _loss_scale, "
            "_unskipped, dynamic, _overflow_buf, update_scale() and clear_overflow_state(). Gradients are unscaled by "
            "amp.scale_loss."
        )


def scale_rule(loss_scale: float | str, **arguments: float | None) -> ScaleRule:
    """Make the rule of a call of `initialize`. Error messages use the argument names of that call.

    Args:
        loss_scale: "dynamic", or the number of a static scale, for which ``arguments`` are not used.
        arguments: those of `DynamicScale`; a ``floor`` of None or 0 becomes `SMALLEST_SCALE`.

    Raises:
        ValueError: an argument out of its range.
        TypeError: an argument that is not a number.
    """
    if not isinstance(loss_scale, str):
        return StaticScale(_float32_scale("loss_scale", loss_scale))
    for name, value in arguments.items():
        left_out = value is None and name in ("floor", "ceiling")
        if not left_out and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{_ARGUMENTS[name]}={value!r}: expected a number; leave it out for the default of apex.")
    chosen: dict[str, Any] = {**arguments, "floor": arguments["floor"] or SMALLEST_SCALE}
    try:
        return DynamicScale(**chosen)
    except ValueError as error:
        words = "|".join(_ARGUMENTS)
        raise ValueError(re.sub(rf"\b({words})\b", lambda word: _ARGUMENTS[word.group()], str(error))) from None


def save_scalers(scalers: Sequence[LossScaler], destination: Any = None) -> Any:
    """Return ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}, …}``, in ``destination`` if one is given."""
    saved = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(scalers):
        saved[f"loss_scaler{index}"] = scaler.state_dict()
    return saved


def load_scalers(scalers: Sequence[LossScaler], saved: Mapping[str, Any]) -> None:
    """Load what `save_scalers` returned, by the number in each key. Entries without a scaler print a line.

    Raises:
        TypeError: ``saved`` is not a mapping.
        RuntimeError: unknown keys; the other entries are loaded first.
        ValueError: as `LossScaler.load_state_dict`.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"amp.load_state_dict got an object of type {type(saved).__name__}: expected the mapping that "
            'amp.state_dict() returned; with a checkpoint pass checkpoint["amp"].'
        )
    if len(saved) != len(scalers):
        _say(f"Warning: state_dict contains {len(saved)} entries, while {len(scalers)} loss_scalers are used")
    unexpected = []
    for key, entry in saved.items():
        number = re.fullmatch(r"loss_scaler(\d+)", key)
        if number is None:
            unexpected.append(f'"{key}"')
        elif int(number[1]) < len(scalers):
            _load(key, scalers[int(number[1])], entry)
        else:
            _say(f"Skipping loss_scaler[{number[1]}], since num_losses was set to {len(scalers)}")
    if unexpected:
        names = ", ".join(unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}. ")


def _load(key: str, scaler: LossScaler, entry: Mapping[str, Any]) -> None:
    scaler.load_state_dict(entry)
    if entry["loss_scale"] != scaler.scale:
        kept = "its floor" if scaler.dynamic else "static"
        _say(f"Warning: {key} was saved at {entry['loss_scale']}; its loss scale stays {scaler.scale} ({kept})")


def _say(line: str) -> None:
    print(line)  # noqa: T201  apex prints these at every verbosity


def checked_entry(saved: Any) -> tuple[float, int]:
    """Return the scale and the count of one saved entry. Raises: ValueError, as `LossScaler.load_state_dict`."""
    try:
        scale, clean_steps = float(saved["loss_scale"]), int(saved["unskipped"])
        count = float(saved["unskipped"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{saved!r}: expected {{'loss_scale': float, 'unskipped': int}}, as amp.state_dict() returns."
        ) from None
    if clean_steps < 0 or count != clean_steps:
        raise ValueError(
            f"unskipped={saved['unskipped']!r}: expected a whole number >= 0, the backwards since the scale last "
            "moved; use 0 to start counting again."
        )
    # apex checkpoints of a collapsed run hold 0.0; training continues from the floor.
    return scale if scale == 0.0 else _float32_scale("loss_scale", scale), clean_steps


def _float32_scale(name: str, value: float) -> float:
    scale = scale_value(name, value)
    if not _SMALLEST_SUBNORMAL <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{name}={scale}: expected a number in the range of float32, from 2^-149 to 2^128, since losses are "
            "multiplied by it in float32; a dynamic scale starts at 65536.0."
        )
    return scale
