"""How a run is, in one sentence: ready, healthy, stuck, searching for a scale, diverged, or damaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from amplab.display.numbers import count, power, short_text
from amplab.lab.changes import RunChange
from amplab.lab.history import History

__all__ = ["RunStatus", "StatusKind", "run_status"]

StatusKind = Literal["ready", "healthy", "unknown", "stuck", "searching", "floor", "skipping", "diverged", "damaged"]

EXPLODED = 100.0
"""A loss this many times the first one means that the run has diverged, as in `rules.run`."""

LEARNED = 0.8
"""A loss below this share of the first ones has fallen."""

STUCK = 100
"""Steps from which a loss that has not fallen is reported."""

IN_A_ROW = 5
"""Skips in a row from which a scale that settles is no longer the likely reason."""

RECENT = 20
"""Steps whose median is the present loss."""

AFTER = 200
"""Steps within which a change is named as what came before."""


@dataclass(frozen=True)
class RunStatus:
    """One sentence about a run.

    Attributes:
        kind: What it is about.
        text: The sentence.
        step: Where it began, None if that is no single step.
        change: The change of a person before it, None for none.
    """

    kind: StatusKind
    text: str
    step: int | None = None
    change: RunChange | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the run does not learn any more."""
        return self.kind in ("skipping", "diverged", "damaged")


def run_status(history: History, *, floor: float | None = None, learning_rate: float | None = None) -> RunStatus:
    """Return how a run is.

    Args:
        history: The run.
        floor: The least loss scale that its rule allows, None for none.
        learning_rate: The present one, None if unknown.
    """
    last = history.last
    if last is None:
        return RunStatus("ready", "Ready: no step yet.")
    losses = history.column("loss")
    return (
        _damaged(history, losses)
        or _diverged(history, losses, learning_rate)
        or _skipping(history, floor)
        or _at_floor(history, floor)
        or _learning(history, losses)
    )


def _damaged(history: History, losses: np.ndarray) -> RunStatus | None:
    """A loss that is not finite in a step that was not skipped."""
    last = history.last
    if last is None or last.skipped or math.isfinite(last.loss) or last.step in history.missing_losses():
        return None
    finite = np.flatnonzero(np.isfinite(losses))
    first = int(finite[-1]) + 1 if len(finite) else 0
    word = "NaN" if math.isnan(last.loss) else "inf"
    began = history.record(min(first, len(losses) - 1)).step
    return _bad(
        history, "damaged", began, f"Damaged since step {began:,}", f"the loss is {word}, and no step was skipped"
    )


def _diverged(history: History, losses: np.ndarray, learning_rate: float | None) -> RunStatus | None:
    """Every step is skipped because update steps were too large, or the loss has grown a hundredfold."""
    began = _skips_at_the_end(history)
    rate = "" if learning_rate is None else f" at learning rate {short_text(learning_rate)}"
    if began is not None:
        why = [each for step, each in history.explanations.items() if step >= began]
        if any(each.kind == "divergence" for each in why):
            return _bad(history, "diverged", began, f"Diverged at step {began:,}", "every step since is skipped", rate)
    finite = losses[np.isfinite(losses)]
    if len(finite) < 2 or not finite[0] > 0 or not np.median(finite[-RECENT:]) > EXPLODED * finite[0]:
        return None
    first = int(np.argmax(losses > EXPLODED * finite[0]))
    now, was = (short_text(float(each), digits=2) for each in (np.median(finite[-RECENT:]), finite[0]))
    step = history.record(first).step
    return _bad(history, "diverged", step, f"Diverged at step {step:,}", f"the loss is {now}, and was {was}", rate)


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


def _learning(history: History, losses: np.ndarray) -> RunStatus:
    last = history.last
    finite = losses[np.isfinite(losses)]
    if last is None or not len(finite):
        return RunStatus("unknown", f"No loss is known. {_skips(history)}.")
    early, now = float(np.median(finite[:RECENT])), float(np.median(finite[-RECENT:]))
    scale = f"loss scale {power(last.next_loss_scale, raised=True)}"
    was, present = short_text(float(finite[0])), short_text(now)
    if now < LEARNED * early or now < LEARNED * finite[0]:
        return RunStatus("healthy", f"Healthy: the loss fell from {was} to {present}, {scale}, {_skips(history)}.")
    if len(finite) < STUCK:
        return RunStatus("unknown", f"Just begun: loss {present}, {scale}, {_skips(history)}.")
    return RunStatus("stuck", f"Not learning: the loss is {present}, and was {was}; {scale}, {_skips(history)}.", 0)


def _skips_at_the_end(history: History) -> int | None:
    """The first of the skips that the last step ends, None if it was not skipped."""
    if history.last is None or not history.last.skipped:
        return None
    skipped = history.column("skipped")
    taken = np.flatnonzero(~skipped)
    first = int(taken[-1]) + 1 if len(taken) else 0
    return history.record(first).step if first < len(skipped) else None  # a step may have been added meanwhile


def _bad(history: History, kind: StatusKind, step: int, what: str, why: str, otherwise: str = "") -> RunStatus:
    """Return the status, with the change before it, or with what is said if there was none."""
    near = [each for each in history.changes if max(1, step - AFTER) <= each.step <= step]  # step 0 is the start
    change = near[-1] if near else None
    after = f", after {change.text[:1].lower()}{change.text[1:]}" if change else otherwise
    return RunStatus(kind, f"{what}{after}: {why}.", step, change)


def _skips(history: History) -> str:
    return f"{count(history.skip_count, 'skip')} in {count(len(history), 'step')}"
