"""The records that a session returns: frozen values, one per event or query.

`ScaleRecord` at the exit of `scale_loss`, `StepOutcome` after `optimizer.step()`, `MemoryUse` on request.
"""

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["MemoryUse", "ScaleRecord", "StepOutcome"]


@dataclass(frozen=True)
class ScaleRecord:
    """One exit of `scale_loss` that unscaled gradients.

    Attributes:
        loss_id: which loss scaler.
        loss_scale: the scale that this loss was multiplied by.
        next_loss_scale: the scale that the next loss will be multiplied by.
        found_inf: a gradient of the optimizers passed in is inf or NaN.
        skipped: the next step of these optimizers will be skipped (never at a static scale).
        first_nonfinite: with ``found_inf``, the non-finite gradient that backward reached first, by its
            parameter's name; the one nearest the loss.
        loss: the loss before scaling; None if it was not a single tensor. Reading it waits for the device.
        backward_scales: of a `GradScaler`, after an optimizer's ``step``: the scale of each call of ``scale`` since the
            update that ended the step before, the last 256 at most; several where gradients are accumulated.
    """

    loss_id: int
    loss_scale: float
    next_loss_scale: float
    found_inf: bool
    skipped: bool
    first_nonfinite: str | None = None
    loss: Tensor | None = field(default=None, compare=False, repr=False)
    backward_scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepOutcome:
    """What the last ``optimizer.step()`` did.

    Attributes:
        stepped: whether the parameters were updated.
        reason: why, or why not.
        first_nonfinite: the parameter that caused a skipped step.
    """

    stepped: bool
    reason: str
    first_nonfinite: str | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the models and optimizers of a session; a tensor shared by several owners counts once.

    Attributes:
        parameters: the models' parameters, in the dtype they have now.
        gradients: the gradients of those parameters and of the masters.
        masters: float32 master weights.
        optimizer_state: momenta, moments, step counts: every tensor in ``optimizer.state``.
        gradient_buffers: the bytes in the flat buffers of ``combine_grad`` that hold no gradient: padding, and
            the places of gradients that are None.
    """

    parameters: int
    gradients: int
    masters: int
    optimizer_state: int
    gradient_buffers: int = 0

    @property
    def total(self) -> int:
        """All of them together, in bytes."""
        return self.parameters + self.gradients + self.masters + self.optimizer_state + self.gradient_buffers
