"""`ladder`: train briefly in each precision, from the fastest to the safest; find the first that trains successfully.

    O2 dynamic → O2 static 128 → O1 dynamic → O1 static 128 → bf16 → fp32

Every rung starts from the same weights and gets the same batches. A rung holds (trains successfully) if its weights
and losses stay finite, few steps are skipped, its loss is as low as float32's within the tolerance, and its float16
values are not about to exceed 65504. If they overflowed in a step, or rise steadily and are within a factor of 2 of
65504, it holds with a reservation. At each level the dynamic scale comes first: it goes on where a static one ends in
NaN.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from amplab.amp.run_state.rng_state import capture_rng, restore_rng
from amplab.diagnose.half_peaks import HalfPeaks, PeakTrend
from amplab.diagnose.trial import (
    MakeOptimizer,
    Precision,
    Trial,
    TrialStep,
    check_called_with,
    check_optimizer,
    check_seed,
    check_step_of_copies,
    check_steps,
    check_tolerance,
    check_trained,
    no_casts_of_the_caller,
    precision_named,
)
from amplab.display.drawings import loss_drawing
from amplab.display.html import Markup, markup
from amplab.display.numbers import count, power, size
from amplab.display.table import Card, Cell, Column, Table
from amplab.policies.signals import is_interrupt
from amplab.trace.argument_checks import check_gradients_on, copy_of
from amplab.trace.as_found import Undo, leaves_as_found
from amplab.trace.forwarded_modules import buffers_kept
from amplab.trace.handed_step import Loss, shows_calls
from amplab.trace.named_state import named_state_kept
from amplab.trace.random_states import generators_of, restorers, seed_all
from amplab.trace.untouched import computed_anew

__all__ = ["RUNGS", "LadderReport", "LadderRung", "ladder"]

RUNGS: dict[str, Precision] = {
    "O2 dynamic": {"opt_level": "O2"},
    "O2 static 128": {"opt_level": "O2", "loss_scale": 128.0},
    "O1 dynamic": {"opt_level": "O1"},
    "O1 static 128": {"opt_level": "O1", "loss_scale": 128.0},
    "bf16": "bf16",
    "fp32": "fp32",
}
"""The rungs; the last one is the reference."""

_MOST_SKIPS = 0.1  # of the steps; with more the learning rate schedule differs
_MEASURED = 24  # steps of a rung whose float16 values are measured
_AHEAD = 3  # times the steps seen: an overflow expected later than that is not counted against a rung
_LITTLE = 0.5  # share of 65504 from which on values that rise are a reservation: less than one binade is left
_FEWEST = 5  # a dynamic scale that settles skips a few steps
_COLUMNS = (
    Column("rung"),
    Column("loss, step by step"),
    *(Column(title, right=True) for title in ("loss", "against fp32", "score", "skipped", "loss scale", "steps/s")),
    Column("memory", right=True),
    Column("result"),
)


@dataclass(frozen=True)
class LadderRung:
    """The result of one precision.

    Attributes:
        name: of the rung.
        precision: the arguments for `amp.initialize`, or the name of the precision.
        steps: the steps made.
        loss: the mean of the last quarter of the losses.
        score: the result of `evaluate`, None without it.
        finite: whether the weights are finite at the end.
        steps_per_second: over all steps except the first, on this machine.
        state_bytes: of weights, gradients, masters and optimizer state.
        peaks: the largest float16 values by step; None if the rung did not run.
        failure: why the rung does not hold; None if it holds.
    """

    name: str
    precision: Precision
    steps: tuple[TrialStep, ...]
    loss: float
    score: float | None
    finite: bool
    steps_per_second: float
    state_bytes: int
    peaks: HalfPeaks | None = None
    failure: str | None = None

    @property
    def is_static(self) -> bool:
        """Whether the loss scale is a fixed number."""
        return isinstance(self.precision, Mapping) and self.precision.get("loss_scale", "dynamic") != "dynamic"

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return sum(step.skipped for step in self.steps)

    @property
    def reservation(self) -> str | None:
        """What speaks against a rung that holds: its float16 values are near 65504 and rise, or have exceeded it."""
        for name, trend in self._trends():
            if trend.overflowed is not None:
                return f"its {name} overflow in step {trend.overflowed:,}, although the loss stays finite"
            if trend.rises and trend.share > _LITTLE:
                return (
                    f"its largest {name} rise steadily, from {trend.samples[0][1]:.3g} to {trend.largest:.3g}, "
                    f"{_percent(trend.share)} of 65504, which they exceed at about step {trend.heads_for:,}"
                )
        return None

    def _trends(self) -> Iterator[tuple[str, PeakTrend]]:
        """Yield the values that may exceed 65504; a dynamic scale keeps gradients below."""
        if self.peaks is not None:
            yield "activations", self.peaks.activation
            if self.is_static:
                yield "gradients", self.peaks.gradient


@dataclass(frozen=True, repr=False)
class LadderReport:
    """The rungs, the recommended one, and why.

    Attributes:
        rungs: in the order of the ladder.
        tolerance: relative, for the loss (and the score).
        device: the device type that they ran on.
    """

    rungs: tuple[LadderRung, ...]
    tolerance: float
    device: str

    @property
    def recommended(self) -> LadderRung:
        """The first rung that holds; the last one if none does."""
        return next((rung for rung in self.rungs if rung.failure is None), self.rungs[-1])

    def text(self) -> str:
        """Return the recommendation, and a line per rung."""
        return str(self._card())

    def __str__(self) -> str:
        """The text."""
        return self.text()

    def __repr__(self) -> str:
        return f"<LadderReport: {next(self._sentences())}>"

    def _repr_html_(self) -> str:
        return self._card().html()

    def _card(self) -> Card:
        first, *rest = self._sentences()
        losses = [[step.loss for step in rung.steps] for rung in self.rungs]
        lines = [self._cells(rung, loss_drawing(curve, losses)) for rung, curve in zip(self.rungs, losses, strict=True)]
        chosen = {self.rungs.index(self.recommended)} if self.recommended.failure is None else set()
        return Card(first, (Table(_COLUMNS, lines, "The rungs of the ladder", chosen=chosen), *rest))

    def _sentences(self) -> Iterator[str]:
        chosen = self.recommended
        if chosen.failure is not None:
            yield f"No rung holds, not even {chosen.name} ({chosen.failure}): check data and learning rate first."
        else:
            before = [rung.name for rung in self.rungs[: self.rungs.index(chosen)]]
            but = f"; before it {', '.join(before)} did not" if before else ", the first of the ladder"
            seen = f"It holds in the {count(len(chosen.steps), 'step')} seen{but}"
            if chosen.reservation is None:
                yield f"Recommended: {chosen.name}. {seen}."
            else:
                yield f"Recommended with a reservation: {chosen.name}. {seen}, but {chosen.reservation}."
                yield self._instead()
            if chosen.reservation is None and chosen.peaks is not None and chosen.peaks.activation.largest:
                yield _headroom(chosen)
        if self._without_score():
            without = ", ".join(self._without_score())
            yield f"evaluate returned NaN for {without}, so these do not hold: check evaluate first."
        if self.device == "cpu":
            yield "Speeds are those of this CPU, which computes half through float32. They say nothing about a GPU."

    def _instead(self) -> str:
        """The first rung that holds without a reservation."""
        safe = next((each.name for each in self.rungs if each.failure is None and each.reservation is None), None)
        return "No rung holds without a reservation." if safe is None else f"The first without a reservation: {safe}."

    def _without_score(self) -> list[str]:
        """Return the names of the rungs whose score is NaN."""
        return [rung.name for rung in self.rungs if rung.score is not None and math.isnan(rung.score)]

    def _cells(self, rung: LadderRung, drawing: Markup) -> tuple[str, ...]:
        reference = self.rungs[-1].loss
        return (
            rung.name,
            Cell("", drawing),
            f"{rung.loss:.5g}" if math.isfinite(rung.loss) else "not finite",
            "–" if rung is self.rungs[-1] else _against(rung.loss, reference),
            "–" if rung.score is None else f"{rung.score:.4g}",
            f"{rung.skipped} of {len(rung.steps)}" if rung.steps else "–",
            power(rung.steps[-1].loss_scale) if rung.steps else "–",
            f"{rung.steps_per_second:,.{0 if rung.steps_per_second >= 10 else 1}f}" if rung.steps else "–",
            size(rung.state_bytes) if rung.steps else "–",
            _result(rung),
        )


def _headroom(rung: LadderRung) -> str:
    """How far the largest float16 values are from 65504, and whether they rise."""
    trends = list(rung._trends())
    peaks = cast(HalfPeaks, rung.peaks)
    largest = ", largest ".join(
        f"{name} {trend.largest:.3g} ({_percent(trend.share)} of 65504)"
        for name, trend in (("float16 activation", peaks.activation), ("scaled gradient", peaks.gradient))
    )
    return f"Largest {largest}; {' and '.join(_course(name, trend) for name, trend in trends)}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.01 else f"{100 * share:.2g} %"


def _course(name: str, trend: PeakTrend) -> str:
    """Say in words whether values rise."""
    if trend.rises:
        return f"the {name} rise and exceed it at about step {trend.heads_for:,} if they keep growing at this rate"
    return f"the {name} did not rise steadily"


def _against(loss: float, reference: float) -> str:
    """Return by how much a loss is above the reference's, in percent."""
    if not reference or not math.isfinite(loss):
        return "–"
    share = 100 * (loss / reference - 1)
    return "0.0 %" if abs(share) < 0.05 else f"{share:+.1f} %"


def _result(rung: LadderRung) -> Cell:
    if rung.failure is not None:
        return Cell(rung.failure, Markup(f'<span class="bad">✗</span> {markup(rung.failure)}'))
    said = "holds" if rung.reservation is None else "holds, with a reservation"
    return Cell(said, Markup(f'<span class="good">✓ {said}</span>'))


def _tell(line: str) -> None:
    """Write progress to standard error; in a notebook to standard output, where it does not look like a failure."""
    stream = sys.stdout if type(sys.stdout).__module__.startswith("ipykernel.") else sys.stderr
    stream.write(f"{line}\n")


@shows_calls(
    "amplab.ladder(make_model, data, loss=criterion)",
    "amplab.ladder(make_model, data, step=lambda model, batch: criterion(model(batch)))",
)
@leaves_as_found
def ladder(
    make_model: Callable[[], nn.Module] | nn.Module,
    data: Any,
    *,
    loss: Loss | None = None,
    step: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    steps: int = 100,
    tolerance: float = 0.05,
    seed: int = 0,
    rungs: Mapping[str, Precision] = RUNGS,
    tell: Callable[[str], object] | None = None,
) -> LadderReport:
    """Train for a few steps in every precision and recommend the first that holds.

    A session of `amp` and autocast regions around the call do not cast here.

    Args:
        make_model: a function that returns a new float32 model, called with the same seed for each rung; or a float32
            model, of which each rung trains a deep copy. A state that forward keeps in a plain attribute belongs to
            the rung; a state in a global or a closure is shared by all rungs.
        data: one batch (a tensor, a tuple or a mapping), a function of the step's number that returns one, or an
            iterable of batches such as a list or a DataLoader, which starts again when it ends. See `amplab.xray` for
            how the model is called with a batch.
        loss: a function of the output (and the batch); None for the output's own.
        step: instead of `loss`, a function that is called as `step(model, batch)` with the model of the rung, runs its
            forward and returns the loss.
        optimizer: a function that makes an optimizer of the parameters it gets; by default ``AdamW(lr=1e-3)``.
        evaluate: a function that returns a score of the trained model, the larger the better. The score then counts as
            well as the loss; a rung whose score is NaN or infinite does not hold.
        steps: for each rung, at least 8.
        tolerance: how far above float32's loss a loss may be, relatively.
        seed: of the weights, of dropout, and of a DataLoader's order.
        rungs: name -> precision, see `amplab.diagnose.trial`; the last one is the reference.
        tell: called with a line of progress per rung; by default it goes to standard error, in a notebook to the
            cell's output.

    Raises:
        TypeError, ValueError: too few steps, no rung, no data, the same model twice, gradients that are disabled around
            the call, or another wrong argument. What the model, the loss or the optimizer raise in the reference
            passes through; in another rung it is the rung's failure.

    Sync: one per step.
    """
    check_steps(steps, least=8)
    check_seed(seed)
    check_tolerance(tolerance)
    _check_rungs(rungs)
    _check_functions(make_model, evaluate, tell)
    check_optimizer(optimizer)
    check_step_of_copies("ladder", step, "make_model, data")
    check_gradients_on()
    _check_data(data)
    make_model = _factory(make_model)
    if isinstance(data, Iterator):
        data = list(islice(data, steps))  # every rung reads it, and an iterator can be read only once
    make = optimizer or (lambda weights: torch.optim.AdamW(weights, lr=1e-3))
    tell = tell or _tell
    climbed: list[LadderRung] = []
    every = max(2, steps // _MEASURED)
    model: nn.Module | None = None
    device = "cpu"
    for number, (name, precision) in enumerate(rungs.items(), 1):
        tell(f"rung {number} of {len(rungs)}: {name}, {steps} steps")
        with _seeded(seed, data), named_state_kept(loss, step, evaluate), buffers_kept():
            model = _fresh(make_model(), model)
            device = next(weight.device.type for weight in model.parameters())
            try:
                trial = Trial(model, make, precision, loss=loss, step=step, tool="ladder", on_collapse="raise")
                climbed.append(_climb(name, precision, trial, islice(_batches(data), steps), evaluate, every))
            except Exception as error:
                if number == len(rungs) or is_interrupt(error):  # the precision is not the reason
                    raise
                climbed.append(_fallen(name, precision, error))
    judged = tuple(_judged(rung, climbed[-1], steps, tolerance) for rung in climbed)
    return LadderReport(judged, tolerance, device)


def _climb(
    name: str,
    precision: Precision,
    trial: Trial,
    batches: Iterable[Any],
    evaluate: Callable[[nn.Module], float] | None,
    measured_every: int,
) -> LadderRung:
    try:
        steps, peaks, seconds, timed = list[TrialStep](), HalfPeaks(), 0.0, 0
        for number, batch in enumerate(batches):
            if number % measured_every == 0:  # among them the first, which allocates state
                with peaks.at(number):
                    steps.append(trial.train(batch))
                continue
            began = time.perf_counter()
            steps.append(trial.train(batch))
            seconds, timed = seconds + time.perf_counter() - began, timed + 1
        if not steps:
            raise ValueError("data: 0 batches; expected at least one.")
        size, finite = trial.state_bytes(), trial.is_finite()
    finally:
        trial.close()
    last = [step.loss for step in steps[-max(2, len(steps) // 4) :]]
    with no_casts_of_the_caller(trial.model):
        score = None if evaluate is None else _score(evaluate(trial.model))
    rate = timed / seconds if timed else float("nan")
    return LadderRung(name, precision, tuple(steps), statistics.fmean(last), score, finite, rate, size, peaks)


def _factory(make_model: Callable[[], nn.Module] | nn.Module) -> Callable[[], nn.Module]:
    if isinstance(make_model, nn.Module):
        model = check_trained(make_model)
        instead = "pass a function that makes the model, make_model=lambda: Net()"
        return lambda: copy_of(model, "make_model", "each rung trains a copy", instead=instead)
    return make_model


def _score(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"evaluate returned {type(value).__name__}: expected one number, which float() takes."
        ) from None


def _fresh(model: Any, previous: nn.Module | None) -> nn.Module:
    if model is not None and model is previous:
        raise ValueError(
            "make_model returned the same model twice: expected a new one for every rung, such as lambda: Net(); to "
            "start from trained weights, pass the model itself, amplab.ladder(model, data)."
        )
    return check_trained(model)


def _check_rungs(rungs: Any) -> None:
    if not isinstance(rungs, Mapping):
        raise TypeError(f"rungs={type(rungs).__name__}: expected a dict of name -> precision, such as {{'O1': 'O1'}}.")
    if not rungs:
        raise ValueError("rungs: 0 rungs; expected at least one; the last one is the reference.")
    for name, precision in rungs.items():
        if not isinstance(name, str):
            raise TypeError(f"rungs: the name {name!r} is {type(name).__name__}; expected strings as names.")
        precision_named(precision, f"rungs[{name!r}]")


def _check_functions(make_model: Any, evaluate: Any, tell: Any) -> None:
    if not isinstance(make_model, nn.Module):
        if not callable(make_model):
            raise TypeError(
                f"make_model={type(make_model).__name__}: expected one torch.nn.Module, or a function that returns a "
                "new one, such as lambda: Net(); put several models into one module and pass step=."
            )
        check_called_with("make_model", make_model, 0, "lambda: Net()")
    if evaluate is not None:
        check_called_with("evaluate", evaluate, 1, "lambda model: accuracy(model, images, labels)")
    if tell is not None:
        check_called_with("tell", tell, 1, "print; None for standard error")


def _check_data(data: Any) -> None:
    if callable(data):
        check_called_with("data", data, 1, "lambda step: batches[step % len(batches)]")
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(
            f"data={type(data).__name__}: expected one batch (a tensor, a tuple or a dict), a list of batches or a "
            "DataLoader, or a function of the step's number that returns one."
        )


def _fallen(name: str, precision: Precision, error: Exception) -> LadderRung:
    why = " ".join(str(error).split("\n")[0].split(". ")[:1])
    return LadderRung(name, precision, (), math.nan, None, False, math.nan, 0, None, f"{type(error).__name__}: {why}")


def _judged(rung: LadderRung, reference: LadderRung, steps: int, tolerance: float) -> LadderRung:
    return replace(rung, failure=rung.failure or _failure(rung, reference, steps, tolerance))


def _failure(rung: LadderRung, reference: LadderRung, steps: int, tolerance: float) -> str | None:
    """Return why a rung does not hold, None if it holds."""
    lost = next((place for place, step in enumerate(rung.steps) if not math.isfinite(step.loss)), None)
    if not rung.finite:
        return "weights are inf or NaN" + (f", the loss from step {lost} on" if lost is not None else "")
    if rung.skipped > max(_FEWEST, _MOST_SKIPS * steps):
        return f"{rung.skipped} of {steps} steps skipped"
    if (reason := _expected_overflow(rung, steps)) is not None:
        return reason
    if lost is not None:
        return f"the loss of step {lost} is {rung.steps[lost].loss:.4g}"
    allowed = reference.loss + tolerance * abs(reference.loss)
    if not rung.loss <= allowed:
        return f"loss {rung.loss:.4g}, float32 {reference.loss:.4g}"
    if rung.score is not None and not math.isfinite(rung.score):
        return f"score {rung.score:.4g} is not finite"
    if reference.score is None or not math.isfinite(reference.score):
        return None
    if rung.score is not None and rung.score < reference.score - tolerance * abs(reference.score):
        return f"score {rung.score:.4g}, float32 {reference.score:.4g}"
    return None


def _expected_overflow(rung: LadderRung, steps: int) -> str | None:
    """Return which float16 values are about to overflow."""
    for name, trend in rung._trends():
        if trend.reaches is not None and trend.reaches < _AHEAD * steps:
            return f"{name} reach 65504 at about step {trend.reaches:,}"
    return None


def _batches(data: Any) -> Iterator[Any]:
    if callable(data):
        step = 0
        while True:
            yield data(step)
            step += 1
    if isinstance(data, Tensor | tuple | Mapping):
        while True:
            yield data
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            return


@contextmanager
def _seeded(seed: int, data: Any) -> Iterator[None]:
    """Draw from `seed`; after the block all generators are as before, also those that give the order of the batches."""
    kept = capture_rng()
    with Undo() as undo:
        undo.add(partial(restore_rng, kept))
        for restore in restorers(generators_of(data)):
            undo.add(restore)
        computed_anew(undo, caches=False)
        seed_all(seed)
        yield
