"""What the trainer says: frozen records, published at step boundaries and never changed afterwards.

`StepRecord` is one training step, `StateChanged` and `ConfigChanged` say what the run became, `TraceReady`,
`GradientsReady` and `SkipExplained` answer requests, `Failed` carries a traceback or a sentence. The column store of
many steps is in `history.py`, the file on disk in `run_log.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amplab.diagnose import FirstNonfinite
    from amplab.formats import ExponentHistogram
    from amplab.lab.config import ExperimentConfig
    from amplab.trace import Trace

__all__ = [
    "STATES",
    "ConfigChanged",
    "Event",
    "Failed",
    "GradientRecord",
    "GradientSample",
    "GradientsReady",
    "MixedScales",
    "SkipExplained",
    "StateChanged",
    "StepRecord",
    "StepRow",
    "TraceReady",
]

STATES = ("ready", "running", "paused", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as it happened.

    Attributes:
        step: Number of the step, from 0.
        loss: Training loss before scaling and before any injected shrinking; NaN and inf are kept. NaN, too, where a
            watch was not told it; `History.untold_losses` knows which.
        loss_scale: Scale that multiplied the loss of this step.
        next_loss_scale: Scale that the next step will use.
        skipped: Whether the optimizer left the weights alone because a gradient was not finite.
        first_nonfinite: Name of the first parameter with a non-finite gradient, None when all were finite.
        opt_level: "O0" to "O3".
        accuracy: Share of held-out images classified correctly, in [0, 1]; None where it was not measured.
        seconds: Wall clock since the first step of the run began.
        injected: "overflow", "underflow", "nan", two of them joined by "+", or None.
        grad_exponent: floor(log2) of the largest unscaled gradient; -inf where all are zero, inf where one was not
            finite, None where it was not measured.
    """

    step: int
    loss: float
    loss_scale: float
    next_loss_scale: float
    skipped: bool
    first_nonfinite: str | None
    opt_level: str
    accuracy: float | None
    seconds: float
    injected: str | None
    grad_exponent: float | None = None


StepRow = tuple[int, float | None, float, float, bool, str | None, str, float | None, float, str | None, float | None]
"""The values of a `StepRecord` in its order, the loss None where nobody told it.

This is what is made between two steps, where every microsecond counts.
"""


@dataclass(frozen=True)
class GradientSample:
    """Exponents of all unscaled gradients together, as they were at one step."""

    step: int
    loss_scale: float
    histogram: ExponentHistogram


@dataclass(frozen=True)
class MixedScales:
    """The scale of each backward that one step accumulated, in order, where they were not all the same."""

    step: int
    scales: tuple[float, ...]


@dataclass(frozen=True)
class GradientRecord:
    """Exponents of the gradients that the next step will see, computed in float32 and not scaled.

    The scaled gradients are ``histogram.shifted(log2(loss_scale))``; what of them leaves float16's range is then a
    prediction from exact exponents, with the zeros of the model (dead units, blank pixels) told apart from underflow.

    Attributes:
        step: Step whose batch was used.
        loss_scale: Scale in effect.
        layers: (parameter name, histogram of its unscaled gradient) in the model's order.
    """

    step: int
    loss_scale: float
    layers: tuple[tuple[str, ExponentHistogram], ...]

    @property
    def sample(self) -> GradientSample:
        """All layers together."""
        first, *rest = (histogram for _, histogram in self.layers)
        return GradientSample(self.step, self.loss_scale, sum(rest, start=first))


@dataclass(frozen=True)
class StateChanged:
    """The trainer is now ``state`` (one of `STATES`); ``note`` says why where that is not obvious."""

    state: str
    step: int
    note: str = ""


@dataclass(frozen=True)
class ConfigChanged:
    """``config`` holds from ``step`` on; ``reset`` says that the run began anew, with an empty history."""

    config: ExperimentConfig
    previous: ExperimentConfig
    step: int
    reset: bool = False


@dataclass(frozen=True)
class TraceReady:
    """One forward and backward of the current model, recorded op by op; the run was not touched."""

    trace: Trace
    step: int
    opt_level: str


@dataclass(frozen=True)
class GradientsReady:
    """The gradient exponents that were asked for."""

    record: GradientRecord


@dataclass(frozen=True)
class SkipExplained:
    """The last skipped step was run again; ``found`` is None where it does not overflow at the present weights."""

    step: int
    found: FirstNonfinite | None


@dataclass(frozen=True)
class Failed:
    """Something went wrong: ``text`` is a sentence, followed by the traceback where there is one.

    ``fatal`` is True when training cannot go on without a reset, False when the run goes on (a callback that raised, a
    log that cannot be written). ``damaged`` is True when it goes on with NaN or inf in the model.
    """

    text: str
    fatal: bool = False
    damaged: bool = False

    @property
    def of_run(self) -> bool:
        """Whether a reset mends it."""
        return self.fatal or self.damaged


Event = StepRecord | StateChanged | ConfigChanged | TraceReady | GradientsReady | SkipExplained | Failed
