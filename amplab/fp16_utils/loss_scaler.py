"""The loss scalers of the years before ``amp.initialize``: a rule of `amplab.scalers` behind apex's old methods.

DynamicLossScaler   on inf:    scale = max(1, scale / scale_factor)
                    on clean:  scale = scale * scale_factor, after scale_window clean steps
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from amplab.scalers import Recurrence, RecurrentRule, ScaleRule, StaticScale

__all__ = ["DynamicLossScaler", "LossScaler"]


@dataclass(frozen=True)
class _Fp16UtilsScale(RecurrentRule):
    init_scale: float
    scale_factor: float
    scale_window: int

    @cached_property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            self.init_scale, self.scale_factor, self.scale_factor, self.scale_window, divides=True, floor=1.0,
            single=False, keeps_finite=True,
        )  # fmt: skip


class LossScaler:
    """A loss scale that stays.

    Args:
        scale: > 0.

    >>> LossScaler(128.0).loss_scale
    128.0
    """

    def __init__(self, scale: float = 1) -> None:
        self._take_up(StaticScale(float(scale)))

    def _take_up(self, rule: ScaleRule) -> None:
        self._rule, self._state = rule, rule.start()

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self._state.scale

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether an overflow moves it, and skips a step."""
        return self._rule.skips_on_overflow

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Say whether a gradient of ``params`` is inf or NaN; a static scaler does not look. Sync: one each."""
        return self.dynamic and any(not param.grad.isfinite().all() for param in params if param.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Go on after a step that overflowed, or did not. Sync: none."""
        self._state = self._rule.next(self._state, bool(overflow))

    def scale_gradient(self, _module: Any, grad_in: Iterable[Tensor], _grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply gradients by the scale: a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward from ``loss`` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the clean steps since it moved."""
        return {"loss_scale": self._state.scale, "unskipped": self._state.clean_steps}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Load what `state_dict` returned."""
        self._state = type(self._state)(float(state_dict["loss_scale"]), int(state_dict["unskipped"]))


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off at overflows, to 1 at the least, and grows after clean steps.

    Args:
        init_scale: where it starts.
        scale_factor: > 1, both ways.
        scale_window: clean steps until it grows.

    >>> scaler = DynamicLossScaler(scale_window=1)
    >>> scaler.update_scale(True)
    >>> scaler.loss_scale == 2**31
    True
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self._take_up(_Fp16UtilsScale(float(init_scale), float(scale_factor), int(scale_window)))
