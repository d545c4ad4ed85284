"""The events of the trainer: frozen records, which are sent to every callback at a step boundary.

`StepRecord` is one training step, and `SkipExplained` says why one was skipped. `StateChanged` and `ConfigChanged` say
what changed. `TraceReady` and `GradientsReady` answer requests. `Failed` carries an error message, with its traceback
if there is one. `Publisher` calls the subscribers. All steps of a run are in `history.py`, the file on disk is in
`run_log`.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amplab.formats import FLOAT16

if TYPE_CHECKING:
    from amplab.diagnose import TwinReport
    from amplab.formats import ExponentHistogram
    from amplab.lab.config import ExperimentConfig
    from amplab.lab.memory_fit import LevelMemory
    from amplab.lab.skip_explanation import SkipExplanation
    from amplab.lab.step_stages import StepStages
    from amplab.trace import Trace
    from amplab.trace.input_statistics import MeasuredInput

__all__ = [
    "STATES",
    "ActivationsReady",
    "Callback",
    "ConfigChanged",
    "Event",
    "Failed",
    "FaultSwitched",
    "GradientRecord",
    "GradientSample",
    "GradientsReady",
    "InputsReady",
    "LayerShares",
    "LevelTraced",
    "MemoryCounted",
    "MixedScales",
    "Publisher",
    "RunsChanged",
    "SkipExplained",
    "StagesReady",
    "Reading",
    "StateChanged",
    "StepRecord",
    "StepRow",
    "TraceReady",
    "TwinReady",
    "Undone",
]

STATES = ("ready", "running", "paused", "stopped", "failed")

_FAILURES_KEPT = 20


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step.

    Attributes:
        step: Number of the step, from 0.
        loss: Training loss before scaling and before any injected shrinking, the sum if there are several; NaN and inf
            are kept. Also NaN if a watch did not get the loss; `History.missing_losses` says where.
        loss_scale: Scale that multiplied the loss of this step. If losses have scales of their own: that of the first
            loss that overflowed, else the lowest; `History.mixed_scales` has all.
        next_loss_scale: Scale that the next step will use.
        skipped: Whether the optimizer left the weights unchanged because a gradient was not finite.
        first_nonfinite: Name of the first parameter with a non-finite gradient; None if all were finite, and if
            torch's GradScaler has skipped the step and the gradients were cleared before a watch saw that. Also None
            with a GradScaler if the gradients are finite again after its ``unscale_``: its ``found_inf`` is of all of
            them, and ``torch.nn.utils.clip_grad_value_`` replaces inf by a number.
        opt_level: As in the config, such as "O1".
        score: The task's score on held-out data, such as the accuracy in [0, 1]; None if not measured.
        seconds: Wall-clock time since the first step of the run began.
        injected: "overflow", "underflow", "nan", two of them joined by "+", or None.
        grad_exponent: floor(log2) of the largest unscaled gradient; -inf if all are zero, inf if one was not finite,
            None if not measured.
    """

    step: int
    loss: float
    loss_scale: float
    next_loss_scale: float
    skipped: bool
    first_nonfinite: str | None
    opt_level: str
    score: float | None
    seconds: float
    injected: str | None
    grad_exponent: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether NaN or an overflow was injected into it; an injected underflow skips no step."""
        return self.injected is not None and self.injected != "underflow"


StepRow = tuple[int, float | None, float, float, bool, str | None, str, float | None, float, str | None, float | None]
"""The values of a `StepRecord` in its order; the loss is None if it is missing.

A row is made between two steps, where every microsecond counts.
"""


@dataclass(frozen=True, slots=True)
class LayerShares:
    """What float16 loses of the scaled gradient of one parameter: shares of its finite non-zero elements, in [0, 1].

    Attributes:
        name: of the parameter.
        underflow: share that becomes zero at the loss scale of the step.
        overflow: share that becomes infinite at this scale.
        nonfinite: share of all elements that is NaN or inf at any scale.
    """

    name: str
    underflow: float
    overflow: float
    nonfinite: float


@dataclass(frozen=True)
class GradientSample:
    """Exponents of all unscaled gradients together at one step, and what is lost of each parameter's, if known."""

    step: int
    loss_scale: float
    histogram: ExponentHistogram
    layers: tuple[LayerShares, ...] = ()


@dataclass(frozen=True)
class MixedScales:
    """The scale of each backward of one step, in order, if the step accumulated backwards at different scales."""

    step: int
    scales: tuple[float, ...]


@dataclass(frozen=True)
class GradientRecord:
    """Exponents of the gradients of the next step, computed in float32 and not scaled.

    The scaled gradients are ``histogram.shifted(log2(loss_scale))``. The share of them outside float16's range is
    therefore a prediction from exact exponents, and zeros of the model itself (dead units, blank pixels) are not
    counted as underflow.

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
        """All layers together, and what float16 loses of each."""
        first, *rest = (histogram for _, histogram in self.layers)
        return GradientSample(self.step, self.loss_scale, sum(rest, start=first), self.shares)

    @property
    def shares(self) -> tuple[LayerShares, ...]:
        """What float16 loses of each layer."""
        return tuple(_shares(name, histogram, self.loss_scale) for name, histogram in self.layers)


def _shares(name: str, histogram: ExponentHistogram, loss_scale: float) -> LayerShares:
    scaled = histogram.shifted(math.log2(loss_scale)) if 0.0 < loss_scale < math.inf else histogram
    nonfinite = (histogram.infs + histogram.nans) / max(histogram.total, 1)
    return LayerShares(name, scaled.underflow_fraction(FLOAT16), scaled.overflow_fraction(FLOAT16), nonfinite)


@dataclass(frozen=True)
class StateChanged:
    """The trainer is now ``state`` (one of `STATES`); ``note`` says why if that is not obvious."""

    state: str
    step: int
    note: str = ""


@dataclass(frozen=True)
class Reading:
    """Before that of ``step``, ``left`` batches are still to be read; told once a second."""

    step: int
    left: int


@dataclass(frozen=True)
class ConfigChanged:
    """``config`` is in effect from ``step`` on; ``reset`` means that another run is in place of the former one.

    It has an empty history, or is a kept run that continues at ``step``.
    """

    config: ExperimentConfig
    previous: ExperimentConfig
    step: int
    reset: bool = False


@dataclass(frozen=True)
class Undone:
    """A change was taken back; ``text`` says which, as the controls show it."""

    text: str


@dataclass(frozen=True)
class FaultSwitched:
    """``fault`` (one of `FAULTS`) was armed for the next step, or switched on or off; `Trainer.armed` has all."""

    fault: str


@dataclass(frozen=True)
class ActivationsReady:
    """The bytes that one forward of the present run keeps for its backward; None where they cannot be counted."""

    nbytes: int | None


@dataclass(frozen=True)
class RunsChanged:
    """A run of `Trainer.kept` has changed: a comparison made progress, or something was measured."""


@dataclass(frozen=True)
class TwinReady:
    """The twin of the experiment against float32, from the weights before ``step``; the run was not changed."""

    report: TwinReport
    step: int


@dataclass(frozen=True)
class TraceReady:
    """One forward and backward of the current model, recorded op by op; the run was not changed."""

    trace: Trace
    step: int
    opt_level: str


@dataclass(frozen=True)
class LevelTraced:
    """The same step of a fresh model at another opt_level, which shows what a change would do; nothing was changed."""

    trace: Trace
    opt_level: str


@dataclass(frozen=True)
class InputsReady:
    """What one op of the step ``step`` reads, measured in another trace; ``index`` is that of its record."""

    index: int
    inputs: tuple[MeasuredInput, ...]
    step: int


@dataclass(frozen=True)
class MemoryCounted:
    """The bytes of one step of the experiment at one opt_level, counted on a fresh model."""

    memory: LevelMemory


@dataclass(frozen=True)
class GradientsReady:
    """The requested exponents of the gradients."""

    record: GradientRecord


@dataclass(frozen=True)
class SkipExplained:
    """A skipped step was run again. ``explanation`` is None if it cannot run again: the weights have changed since."""

    step: int
    explanation: SkipExplanation | None


@dataclass(frozen=True)
class StagesReady:
    """A step was recorded in its stages; its `StepRecord` was published before.

    ``stages`` is None if a skipped step cannot run again: it is not kept any more.
    """

    stages: StepStages | None
    step: int


@dataclass(frozen=True)
class Failed:
    """Something went wrong: ``text`` is a sentence, followed by the traceback if there is one.

    ``fatal`` is True if training cannot continue without a reset, False if the run continues (a callback that raised, a
    log that cannot be written). ``damaged`` is True if it continues with NaN or inf in the model, ``attempted`` if
    something that does not change the run failed, such as a trace. ``mended`` is True if something that had failed
    works again, such as writing checkpoints.
    """

    text: str
    fatal: bool = False
    damaged: bool = False
    attempted: bool = False
    mended: bool = False

    @property
    def error(self) -> str:
        """The error of its traceback, which may have several lines, as one line; its text if it has none."""
        lines = self.text.strip().splitlines()
        starts = [number for number, line in enumerate(lines) if line[:1].strip() and not line.startswith("Traceback")]
        return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :])

    @property
    def of_run(self) -> bool:
        """Whether a reset removes the cause."""
        return self.fatal or self.damaged or self.attempted


Event = (
    StepRecord
    | StateChanged
    | Reading
    | ConfigChanged
    | TraceReady
    | LevelTraced
    | InputsReady
    | MemoryCounted
    | GradientsReady
    | SkipExplained
    | StagesReady
    | Failed
    | Undone
    | FaultSwitched
    | RunsChanged
    | ActivationsReady
    | TwinReady
)

Callback = Callable[[Event], object]


class Publisher:
    """Calls subscribers with events; they can be added and removed at any time from any thread.

    Callbacks run in the thread that publishes, between two steps: they should store the event and return.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Callback] = {}  # without a lock, on which a signal's handler could wait for itself
        self._tokens = itertools.count()
        self._reported: dict[int, set[str]] = {}  # the exceptions of each callback
        self._failures: deque[Failed] = deque(maxlen=_FAILURES_KEPT)

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The last published failures, for later subscribers."""
        return tuple(self._failures)

    def forget_run(self) -> None:
        """Forget the failures whose cause a reset removes."""
        self._failures = deque((past for past in self._failures if not past.of_run), maxlen=_FAILURES_KEPT)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event from now on; return a function that ends this and may be called twice."""
        token = next(self._tokens)
        self._callbacks[token] = callback
        return lambda: self._unsubscribe(token)

    def publish(self, event: Event) -> None:
        """Call every callback with an event; report a callback that raises to all of them.

        Each different exception of a callback is reported once, at most 20 in all. So a callback that raises whenever
        it gets such a report does not loop forever.
        """
        if isinstance(event, Failed):
            self._failures.append(event)
        for token, callback in list(self._callbacks.items()):
            try:
                callback(event)
            except BaseException as error:  # noqa: BLE001 - whatever a subscriber raises, the run goes on
                self._report(token, callback, event, error)

    def _unsubscribe(self, token: int) -> None:
        self._callbacks.pop(token, None)

    def _report(self, token: int, callback: Callback, event: Event, error: BaseException) -> None:
        reported = self._reported.setdefault(token, set())
        said = "".join(traceback.format_exception_only(error))  # as repr, but of every exception
        if said in reported or len(reported) == _FAILURES_KEPT:
            return
        reported.add(said)
        text = (
            f"callback {_shown(callback)} raised {type(error).__name__} on {type(event).__name__}. The run continues; "
            f"the same exception of this callback is not reported again.\n{''.join(traceback.format_exception(error))}"
        )
        self.publish(Failed(text))


def _shown(callback: Callback) -> str:
    """Return the repr of a callback, which may be an object of the user's whose repr raises."""
    try:
        return repr(callback)
    except Exception:  # noqa: BLE001 - the callback is reported, not its repr
        return f"of type {type(callback).__name__}"
