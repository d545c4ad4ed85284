"""What scripts import from ``apex.amp.scaler``: a loss scale under apex's names, of which gradients know nothing.

    scaler = LossScaler("dynamic");  scaler.loss_scale();  scaler.update_scale()

Those of `initialize` are in ``amp._amp_state.loss_scalers``, and instances of it. Amplab's own is in `loss_scaler`.
"""

import dataclasses
from typing import NoReturn

import torch

from amplab.amp.apex.opt_levels import scale_value
from amplab.amp.backward import loss_scaler

__all__ = ["LossScaler"]


class LossScaler:
    """A scale, what moves it, and a buffer for the verdict.

    Args:
        loss_scale: "dynamic", or the one scale used throughout.
        init_scale: where a dynamic scale starts, not above ``max_loss_scale``.
        scale_factor: what it is multiplied by, and divided by at an overflow; > 1. (apex takes 2 whatever is given.)
        scale_window: clean calls of `update_scale` until it grows.
        min_loss_scale: floor of a dynamic scale; float32's smallest normal number where None or 0.
        max_loss_scale: ceiling; None for none.

    Attributes:
        dynamic: whether overflows skip the step and move the scale.

    Raises:
        ValueError, TypeError: as `Session.initialize`.

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
        rule = loss_scaler.scale_rule(
            loss_scale if dynamic else scale_value("loss_scale", loss_scale),
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1.0 / scale_value("scale_factor", scale_factor),
            growth_interval=scale_window,
            floor=min_loss_scale,
            ceiling=max_loss_scale,
        )
        self._stand_for(loss_scaler.LossScaler(rule))

    def _stand_for(self, scaler: loss_scaler.LossScaler) -> None:
        self._scaler, self.dynamic = scaler, scaler.dynamic
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        """Return the scale that the next loss is multiplied by."""
        return self._scaler.scale

    @property
    def _loss_scale(self) -> float:
        return self._scaler.scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        scale = scale_value("_loss_scale", value)
        self._scaler.state = dataclasses.replace(self._scaler.state, scale=scale)

    @property
    def _unskipped(self) -> int:
        return self._scaler.state.clean_steps

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.state = dataclasses.replace(self._scaler.state, clean_steps=int(value))

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.any())

    def clear_overflow_state(self) -> None:
        """Forget what ``_overflow_buf`` says. Sync: none."""
        self._overflow_buf = torch.zeros_like(self._overflow_buf)

    def update_scale(self) -> bool:
        """Move the scale by the verdict in ``_overflow_buf``.

        Returns:
            Whether the step should be skipped, which is then left to the caller.

        Sync: one.
        """
        return self._move(self._has_overflow)

    def _move(self, found_inf: bool) -> bool:
        self.clear_overflow_state()
        self._scaler.update(found_inf and self.dynamic)
        return found_inf and self.dynamic

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"amp._amp_state.loss_scalers[…].{name}: amplab has no such thing; a scaler has loss_scale(), _loss_scale, "
            "_unskipped, dynamic, _overflow_buf, update_scale() and clear_overflow_state(). Gradients are unscaled by "
            "amp.scale_loss."
        )
