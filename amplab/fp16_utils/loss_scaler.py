"""The loss scalers of ``apex.fp16_utils``: rules of `amplab.scalers` with apex's old methods.

DynamicLossScaler   on inf:    scale = max(1, scale / scale_factor)
                    on clean:  scale = scale * scale_factor, after scale_window clean steps

The scaler of ``amp.initialize`` is another class of the same name, in `amplab.amp`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amplab.formats.kept_property import kept_property
from amplab.scalers import Recurrence, RecurrentRule, ScaleRule, StaticScale

__all__ = ["DynamicLossScaler", "LossScaler"]


@dataclass(frozen=True)
class _Fp16UtilsScale(RecurrentRule):
    init_scale: float
    scale_factor: float
    scale_window: int

    @kept_property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            self.init_scale, self.scale_factor, self.scale_factor, self.scale_window, divides=True, floor=1.0,
            single=False, keeps_finite=True,
        )  # fmt: skip


class LossScaler:
    """A constant loss scale.

    Args:
        scale: > 0.

    >>> LossScaler(128.0).loss_scale
    128.0
    """

    def __init__(self, scale: float = 1) -> None:
        self._begin(StaticScale(float(scale)))

    def _begin(self, rule: ScaleRule) -> None:
        self._rule, self._state = rule, rule.start()

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self._state.scale

    cur_scale = loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether an overflow changes the scale and skips the step."""
        return self._rule.skips_on_overflow

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of ``params`` is inf or NaN; always False for a static scale. Sync: one each."""
        return self.dynamic and any(not param.grad.isfinite().all() for param in params if param.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step. Sync: none."""
        self._state = self._rule.next(self._state, bool(overflow))

    def scale_gradient(self, _module: Any, grad_in: Iterable[Tensor], _grad_out: Any) -> tuple[Tensor, ...]:
        """Multiply gradients by the scale; for use as a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward from ``loss`` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the clean steps since it moved."""
        return {"loss_scale": self._state.scale, "unskipped": self._state.clean_steps}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Load the result of `state_dict`."""
        self._state = type(self._state)(float(state_dict["loss_scale"]), int(state_dict["unskipped"]))


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off at overflows, but not below 1, and grows after clean steps.

    Args:
        init_scale: the first scale.
        scale_factor: > 1, for growth and backoff.
        scale_window: clean steps before the scale grows.

    >>> scaler = DynamicLossScaler(scale_window=1)
    >>> scaler.update_scale(True)
    >>> scaler.loss_scale == 2**31
    True
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self._begin(_Fp16UtilsScale(float(init_scale), float(scale_factor), int(scale_window)))
