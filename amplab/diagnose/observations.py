"""`StepObservation`, the record of one training step, and `Observation`, the steps of a run so far.

`rules.run` reads them. The lab's trainer, a watch of a user's loop and a run log create them. Every field except the
first three may be unknown; a rule that needs an unknown field finds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from amplab.diagnose.remedies.api_styles import Api, ApiStyle

__all__ = ["Observation", "StepObservation"]


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One iteration of a training loop, up to and including the optimizer's step.

    Args:
        step: its number, from 0.
        loss: before scaling, may be NaN or inf; None if unknown.
        loss_scale: the scale of this step's (last) backward; 1.0 without scaling.
        skipped: the parameters were not updated because a gradient was not finite.
        next_loss_scale: the scale that the next step will use; None if unknown.
        first_nonfinite: name of the parameter whose non-finite gradient backward reached first; else None.
        gradient_norm: L2 norm of all gradients, unscaled and not clipped; None if not measured.
        underflow: share, in [0, 1], of the non-zero gradient elements that are 0 in float16 at `loss_scale`; None if
            not measured.
        learning_rate: of the first parameter group in this step; None if unknown.
        backward_scales: the loss scale of each backward that this step accumulates, in order, if the gradients are
            added while they are scaled; may be empty if unknown or if all are equal. amp.scale_loss unscales before it
            adds, and torch.amp.GradScaler does not report its scales, so both leave it empty.
    """

    step: int
    loss: float | None
    loss_scale: float
    skipped: bool = False
    next_loss_scale: float | None = None
    first_nonfinite: str | None = None
    gradient_norm: float | None = None
    underflow: float | None = None
    learning_rate: float | None = None
    backward_scales: tuple[float, ...] = ()

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is finite or unknown."""
        return self.loss is None or math.isfinite(self.loss)


@dataclass(frozen=True)
class Observation(Sequence[StepObservation]):
    """Steps of one run in order, with its settings.

    Args:
        steps: the steps observed; the first need not be step 0.
        growth_interval: clean steps until a dynamic loss scale grows; None if unknown or static.
        dynamic: whether the loss scale changes.
        scaling: who scales the loss, see `api_styles`: "apex", "amplab", "torch" or "none"; empty if unknown.
        level: the opt_level, if amp.initialize is used; else empty.

    >>> run = Observation().then(StepObservation(0, 2.3, 65536.0, skipped=True, next_loss_scale=32768.0))
    >>> len(run), run.skips, run.skips_at_the_end
    (1, 1, 1)
    """

    steps: tuple[StepObservation, ...] = ()
    growth_interval: int | None = None
    dynamic: bool = True
    scaling: ApiStyle | str = ApiStyle.UNKNOWN
    level: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "scaling", ApiStyle(self.scaling))
        except ValueError:
            raise ValueError(
                f"scaling={self.scaling!r}: expected 'apex', 'amplab', 'torch', 'none', or '' if it is not known."
            ) from None

    @property
    def api(self) -> Api:
        """What the training loop uses, for the remedies."""
        scaling = ApiStyle(self.scaling)
        if scaling in (ApiStyle.APEX, ApiStyle.UNKNOWN):
            return Api.of_opt_level(self.level, scaling)
        return Api(scaling, ApiStyle.AMPLAB if scaling is ApiStyle.AMPLAB else ApiStyle.TORCH)

    def then(self, step: StepObservation) -> Observation:
        """Return the run with one more step."""
        return replace(self, steps=(*self.steps, step))

    @property
    def skips(self) -> int:
        """The number of skipped steps."""
        return sum(step.skipped for step in self.steps)

    @property
    def skips_at_the_end(self) -> int:
        """The number of skipped steps after the last clean one."""
        count = 0
        for step in reversed(self.steps):
            if not step.skipped:
                break
            count += 1
        return count

    @property
    def skips_at_the_start(self) -> int:
        """The number of skipped steps before the first clean one."""
        return next((place for place, step in enumerate(self.steps) if not step.skipped), len(self.steps))

    @property
    def losses(self) -> tuple[float, ...]:
        """The finite losses in order, including those of skipped steps."""
        return tuple(step.loss for step in self.steps if step.loss is not None and step.loss_is_finite)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> StepObservation:  # type: ignore[override]  # no slices
        return self.steps[place]

    def __iter__(self) -> Iterator[StepObservation]:
        return iter(self.steps)
