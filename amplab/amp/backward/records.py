"""The records of a session, all frozen.

`ScaledLoss` before a backward, `ScaleRecord` at the exit of `scale_loss`, `StepOutcome` after `optimizer.step()`,
`MemoryUse` on request.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from amplab.amp.backward.gradients import SetAside

__all__ = ["MemoryUse", "ScaleRecord", "ScaledLoss", "StepOutcome"]


class ScaledLoss(NamedTuple):
    """A loss and what it is scaled to, before the backward.

    Attributes:
        loss: with its graph.
        scaled: the loss times its scale, from which the backward starts.
        aside: the gradients that `scale_loss` has set aside until its block ends; None if ``scale`` scales the loss.
    """

    loss: Tensor
    scaled: Tensor
    aside: tuple[SetAside, ...] | None = None


@dataclass(frozen=True)
class ScaleRecord:
    """One exit of `scale_loss` that unscaled gradients.

    Attributes:
        loss_id: number of the loss scaler.
        loss_scale: the scale of this loss.
        next_loss_scale: the scale of the next loss.
        found_inf: whether a gradient of these optimizers is inf or NaN.
        skipped: whether the next step of these optimizers is skipped; always False at a static scale.
        first_nonfinite: with ``found_inf``, the name of the parameter whose non-finite gradient the backward reached
            first, nearest to the loss.
        loss: the loss before scaling; None if it was not a single tensor. For a `GradScaler`, after an optimizer's
            ``step``: the sum of the losses since the step before. Reading it synchronizes with the device.
        backward_scales: for a `GradScaler`, after an optimizer's ``step``: the scales of the last calls of ``scale``
            since the previous update, at most 256. There are several if gradients are accumulated.
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
        reason: why they were updated or not.
        first_nonfinite: the name of the parameter that caused a skipped step. None for a `GradScaler` if the gradients
            are finite again when ``step`` is called: ``torch.nn.utils.clip_grad_value_`` replaces inf by a number.
        overflow: of a session, the record of the backward for which the step was skipped, the first that overflowed;
            None if there was none, and of a `GradScaler`.
    """

    stepped: bool
    reason: str
    first_nonfinite: str | None = None
    overflow: ScaleRecord | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the models and optimizers of a session; a tensor with several owners counts once.

    Attributes:
        parameters: the models' parameters, in their current dtypes.
        gradients: the gradients of those parameters and of the masters.
        masters: float32 master weights.
        optimizer_state: every tensor in ``optimizer.state``: momenta, moments, step counts.
        gradient_buffers: the flat buffers of ``combine_grad`` without the gradients in them: padding, and space for
            gradients that are None.
    """

    parameters: int
    gradients: int
    masters: int
    optimizer_state: int
    gradient_buffers: int = 0

    @property
    def total(self) -> int:
        """The sum of all, in bytes."""
        return self.parameters + self.gradients + self.masters + self.optimizer_state + self.gradient_buffers
