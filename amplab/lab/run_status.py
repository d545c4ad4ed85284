"""How a run is, in one sentence: ready, healthy, stuck, searching for a scale, diverged, or damaged.

`verdict` is the one owner of whether a run has learned: the status line and the table of runs both read it. Steps that
a person disturbed, by an injected overflow or NaN, and that were skipped, say nothing about the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from amplab.display.numbers import count, power, short_text
from amplab.lab.changes import RunChange
from amplab.lab.history import History
from amplab.lab.tasks import TaskChoice

__all__ = ["Measured", "RunStatus", "StatusKind", "damage", "is_damaged", "run_status", "verdict"]

StatusKind = Literal[
    "ready",
    "healthy",
    "slow",
    "opposed",
    "unknown",
    "stuck",
    "searching",
    "floor",
    "skipping",
    "diverged",
    "damaged",
    "evaluation",
]

EXPLODED = 100.0
"""A loss this many times the first one means that the run has diverged, as in `rules.run`."""

LEARNED = 0.8
"""A loss below this share of the first ones has fallen."""

STUCK = 100
"""Steps from which a loss that has not fallen is reported."""

GUESSED = 50
"""Steps from which it is reported if the held-out score is no better than chance, too."""

IN_A_ROW = 5
"""Skips in a row from which a scale that settles is no longer the likely reason."""

RECENT = 20
"""Steps whose median is the present loss."""

AFTER = 200
"""Steps within which a change is named as what came before."""

_BLOCK = 4096  # steps that are read together


@dataclass(frozen=True)
class Measured:
    """What is known of a run beside its steps.

    Attributes:
        task: What it trains; None if unknown.
        held_out: Its score at the end; None for the last one in its history.
        nonfinite_buffers: Names of buffers that hold inf or NaN, and did not when it began.
    """

    task: TaskChoice | None = None
    held_out: float | None = None
    nonfinite_buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunStatus:
    """One sentence about a run.

    Attributes:
        kind: What it is about.
        text: The sentence.
        step: Where it began, None if that is no single step.
        change: The change of a person before it, None for none.
        why: What the sentence ends with if the run is bad.
    """

    kind: StatusKind
    text: str
    step: int | None = None
    change: RunChange | None = None
    why: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the run does not learn any more."""
        return self.kind in ("skipping", "diverged", "damaged", "evaluation")

    @property
    def has_learned(self) -> bool | None:
        """Whether the run has learned; None if that cannot be told yet."""
        if self.kind in ("healthy", "slow"):
            return True
        return False if self.is_bad or self.kind == "stuck" else None


def run_status(
    history: History,
    *,
    floor: float | None = None,
    learning_rate: float | None = None,
    measured: Measured | None = None,
) -> RunStatus:
    """Return how a run is.

    Args:
        history: The run.
        floor: The least loss scale that its rule allows, None for none.
        learning_rate: The present one, None if unknown.
        measured: What else is known.
    """
    if history.last is None:
        return RunStatus("ready", "Ready: no step yet.")
    losses = _Losses.of(history)
    return (
        _damaged(history)
        or _diverged(history, losses, learning_rate)
        or _skipping(history, floor)
        or _at_floor(history, floor)
        or _learning(history, losses, measured or Measured())
    )


def verdict(
    history: History,
    *,
    floor: float | None = None,
    learning_rate: float | None = None,
    measured: Measured | None = None,
) -> RunStatus:
    """Return how a run has ended: as `run_status`, but a search for a loss scale does not hide what was learned."""
    status = run_status(history, floor=floor, learning_rate=learning_rate, measured=measured)
    if status.kind in ("searching", "floor"):
        return _learning(history, _Losses.of(history), measured or Measured())
    return status


class _Losses(NamedTuple):
    """The finite losses at both ends of a run: the first `STUCK` and the last `RECENT`, in order."""

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, history: History) -> _Losses:
        return cls(_finite_losses(history, STUCK), _finite_losses(history, RECENT, newest=True))


def _finite_losses(history: History, most: int, *, newest: bool = False) -> np.ndarray:
    """Return the first or the newest finite losses; how long the run is does not matter."""
    found, starts = np.array([]), range(0, len(history), _BLOCK)
    for start in reversed(starts) if newest else starts:
        losses = history.column("loss", slice(start, start + _BLOCK))
        losses = losses[np.isfinite(losses)]
        found = np.concatenate([losses, found] if newest else [found, losses])
        if len(found) >= most:
            break
    return found[-most:] if newest else found[:most]


def is_damaged(history: History) -> bool:
    """Return whether the last step had a loss of NaN or inf and was not skipped; a missing loss is none of these."""
    last, loss = history.last, history.loss(-1)
    return last is not None and not last.skipped and loss is not None and not math.isfinite(loss)


def damage(history: History) -> tuple[int, str] | None:
    """Return since which step every loss is known to be NaN or inf, and which the last one is.

    None unless `is_damaged`.
    """
    if not is_damaged(history):
        return None
    losses, steps = history.column("loss"), history.column("step")
    others = np.flatnonzero(np.isfinite(losses) | np.isin(steps, [*history.missing_losses()]))
    first = int(others[-1]) + 1 if len(others) else 0
    began = int(steps[min(first, len(steps) - 1)])  # the trainer may have added a finite step meanwhile
    return began, "NaN" if np.isnan(losses[-1]) else "inf"


def _damaged(history: History) -> RunStatus | None:
    """A loss that is not finite in a step that was not skipped."""
    found = damage(history)
    if found is None:
        return None
    began, word = found
    return _bad(
        history, "damaged", began, f"Damaged since step {began:,}", f"the loss is {word}, and no step was skipped"
    )


def _diverged(history: History, losses: _Losses, learning_rate: float | None) -> RunStatus | None:
    """Every step is skipped because update steps were too large, or the loss has grown a hundredfold."""
    began = _skips_at_the_end(history)
    rate = "" if learning_rate is None else f" at learning rate {short_text(learning_rate)}"
    if began is not None:
        why = [each for step, each in history.explanations.items() if step >= began]
        if any(each.kind == "divergence" for each in why):
            return _bad(history, "diverged", began, f"Diverged at step {began:,}", "every step since is skipped", rate)
    if len(losses.first) < 2 or not losses.first[0] > 0:
        return None
    was, now = float(losses.first[0]), float(np.median(losses.last))
    if not now > EXPLODED * was:
        return None
    first = int(np.argmax(history.column("loss") > EXPLODED * was))
    step = history.record(first).step
    grown = f"the loss is {short_text(now, digits=2)}, and was {short_text(was, digits=2)}"
    return _bad(history, "diverged", step, f"Diverged at step {step:,}", grown, rate)


def _skipping(history: History, floor: float | None) -> RunStatus | None:
    """Skips at the end: the scale searches while a smaller one fits, and does not come any further otherwise."""
    began, last = _skips_at_the_end(history), history.last
    if began is None or last is None:
        return None
    skips, now = count(last.step - began + 1, "step"), power(last.next_loss_scale, raised=True)
    fits = _fitting_scale(history, began)
    if floor is not None and last.next_loss_scale <= floor:
        below = "" if fits is None else f", and gradients fit at {power(fits, raised=True)}"
        why = f"the loss scale is at its floor, {power(floor, raised=True)}{below}"
    elif last.step - began + 1 < IN_A_ROW or (fits is not None and fits < last.loss_scale > last.next_loss_scale):
        if fits is not None and last.next_loss_scale <= fits:
            text = f"Loss scale found: {skips} skipped, and the gradients fit at the next one, {now}."
            return RunStatus("searching", text, began)
        goal = "" if fits is None else f"; gradients fit at {power(fits, raised=True)}"
        return RunStatus("searching", f"Searching for a loss scale that fits: {skips} skipped, now {now}{goal}.", began)
    else:
        why = "a smaller loss scale has not helped"
    return _bad(history, "skipping", began, f"Every step is skipped since step {began:,}", why)


def _fitting_scale(history: History, began: int) -> float | None:
    """The scale at which the latest explained skip fits, None if it is none of the scale, or was not explained."""
    why = [each for step, each in history.explanations.items() if step >= began]
    return why[-1].fits if why and why[-1].kind == "scale" else None


def _at_floor(history: History, floor: float | None) -> RunStatus | None:
    last = history.last
    if last is None or floor is None or last.next_loss_scale > floor or not history.skip_count:
        return None
    scale = power(floor, raised=True)
    text = f"Loss scale at its floor, {scale}: it cannot fall at the next overflow. {_skips(history)}."
    return RunStatus("floor", text)


def _learning(history: History, losses: _Losses, measured: Measured) -> RunStatus:
    finite, last = losses.first, history.last
    if last is None or not len(finite):
        return RunStatus("unknown", f"No loss is known. {_skips(history)}.")
    early, now = float(np.median(finite[:RECENT])), float(np.median(losses.last))
    rest = f"loss scale {power(last.next_loss_scale, raised=True)}, {_skips(history)}"
    was, present = short_text(float(finite[0])), short_text(now)
    if measured.task is not None and measured.task.has_opposed_losses:
        return RunStatus(
            "opposed", f"In training: loss {present}, {rest}. The losses oppose each other: none must fall."
        )
    has_fallen = now < LEARNED * early or now < LEARNED * float(finite[0])
    is_guessing, score = _guesses(history, measured), _score_text(history, measured)
    if has_fallen and (wrong := _evaluation(history, measured, is_guessing=is_guessing)) is not None:
        text = f"{wrong[:1].upper()}{wrong[1:]}. The training loss fell from {was} to {present}."
        return RunStatus("evaluation", text, 0, why=wrong)
    if has_fallen:
        return RunStatus("healthy", f"Healthy: the loss fell from {was} to {present}, {rest}.")
    if len(finite) < (GUESSED if is_guessing else STUCK):
        return RunStatus("unknown", f"Just begun: loss {present}, {rest}.")
    if is_guessing is False and now < early:
        return RunStatus("slow", f"Learning slowly: {score}, the loss is {present}, and was {was}; {rest}.")
    return RunStatus("stuck", f"Not learning: the loss is {present}, and was {was}; {rest}.", 0)


def _guesses(history: History, measured: Measured) -> bool | None:
    """Return whether the held-out score is no better than chance; None if that is unknown."""
    measure = None if measured.task is None else measured.task.score
    score = history.last_score if measured.held_out is None else measured.held_out
    return None if measure is None or score is None else measure.is_chance(score)


def _score_text(history: History, measured: Measured) -> str:
    measure = None if measured.task is None else measured.task.score
    score = history.last_score if measured.held_out is None else measured.held_out
    return "" if measure is None else f"held-out {measure.name} {measure.text(score)}"


def _evaluation(history: History, measured: Measured, *, is_guessing: bool | None) -> str | None:
    """Return why held-out data are scored wrongly while the training loss falls; None if they are not."""
    names = measured.nonfinite_buffers
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    buffers = f"{names[0]}{more} {'hold' if more else 'holds'} inf or NaN" if names else ""
    if is_guessing and (buffers or len(history) >= STUCK):
        score = f"{_score_text(history, measured)}, no better than chance"
        return f"{score}: {buffers}" if buffers else score
    return f"evaluation uses {buffers.replace(' hold', ', which hold', 1)}" if buffers and is_guessing is None else None


def _skips_at_the_end(history: History) -> int | None:
    """The first of the skips that the last step ends, None if it was not skipped; injected ones do not count."""
    if history.last is None or not history.last.skipped:
        return None
    end, first = len(history), None
    for start in reversed(range(0, end, _BLOCK)):
        skipped = history.column("skipped", slice(start, end))
        own = np.flatnonzero(~(skipped & _is_disturbed(history, start, end)))
        taken = np.flatnonzero(~skipped[own])
        after = own[taken[-1] + 1 :] if len(taken) else own
        first = start + int(after[0]) if len(after) else first
        if len(taken):
            break
        end = start
    return None if first is None else history.record(first).step


def _is_disturbed(history: History, start: int, end: int) -> np.ndarray:
    """Return which of some steps got an injected overflow or NaN, `(rows,)`; an injected underflow does not skip."""
    injected = history.column("injected", slice(start, end))
    disturbed: np.ndarray = (injected != None) & (injected != "underflow")  # noqa: E711 - elementwise on objects
    return disturbed


def _bad(history: History, kind: StatusKind, step: int, what: str, why: str, otherwise: str = "") -> RunStatus:
    """Return the status, with the change before it, or with what is said if there was none."""
    near = [each for each in history.changes if max(1, step - AFTER) <= each.step <= step]  # step 0 is the start
    change = near[-1] if near else None
    after = f", after {change.text[:1].lower()}{change.text[1:]}" if change else otherwise
    return RunStatus(kind, f"{what}{after}: {why}.", step, change, why)


def _skips(history: History) -> str:
    return f"{count(history.skip_count, 'skip')} in {count(len(history), 'step')}"
