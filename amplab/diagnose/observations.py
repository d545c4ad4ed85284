"""What a run looked like from outside: one `StepObservation` for each step, and `Observation`, the run so far.

This is what the rules about runs read (`rules.run`) and what anything that follows a training loop writes: the lab's
trainer, a watch around somebody's own loop, a log read back. Every field but the first three may be unknown, and a rule
that needs one which is unknown finds nothing.
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
        loss: before it was scaled; NaN and inf are kept; None where nobody told it.
        loss_scale: the scale of this step's (last) backward; 1.0 without scaling.
        skipped: the optimizer left the parameters alone because a gradient was not finite.
        next_loss_scale: the scale that the next step will use; None where unknown.
        first_nonfinite: name of the parameter whose non-finite gradient backward reached first; None where none was.
        gradient_norm: L2 norm of all gradients, unscaled and not clipped; None where it was not measured.
        underflow: share, in [0, 1], of the non-zero gradient elements that half turns into zero at `loss_scale`; None
            where it was not measured.
        learning_rate: of the first parameter group in this step; None where unknown.
        backward_scales: the scale of each backward that this step accumulates, in order, as its gradients still have it
            when they are added up; empty where unknown, and may be where all are the same. The apex face takes each
            scale out before it adds, so it has none to tell; torch's GradScaler tells nobody.
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
        """Whether nothing is known against it: a loss that was told was a number."""
        return self.loss is None or math.isfinite(self.loss)


@dataclass(frozen=True)
class Observation(Sequence[StepObservation]):
    """Steps of one run in order, with what was set.

    Args:
        steps: the steps that were seen; they need not begin at 0.
        growth_interval: clean steps until a dynamic scale grows; None where unknown or static.
        dynamic: whether the scale moves.
        scaling: who scales the loss, see `api_styles`: "apex", "amplab", "torch" or "none"; empty where unknown.
        level: the opt_level of apex's face, else empty.

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
        """How many steps were skipped."""
        return sum(step.skipped for step in self.steps)

    @property
    def skips_at_the_end(self) -> int:
        """How many of the last steps were skipped, without a clean one between."""
        count = 0
        for step in reversed(self.steps):
            if not step.skipped:
                break
            count += 1
        return count

    @property
    def skips_at_the_start(self) -> int:
        """How many steps were skipped before the first clean one."""
        return next((place for place, step in enumerate(self.steps) if not step.skipped), len(self.steps))

    @property
    def losses(self) -> tuple[float, ...]:
        """The finite losses in order, those of skipped steps too."""
        return tuple(step.loss for step in self.steps if step.loss is not None and step.loss_is_finite)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> StepObservation:  # type: ignore[override]
        return self.steps[place]

    def __iter__(self) -> Iterator[StepObservation]:
        return iter(self.steps)
