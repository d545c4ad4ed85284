"""Rules about a run as a whole: pure functions from an `Observation` to findings.

diverging                 the loss had been growing before anything overflowed, or was lost within the first steps that
                          were taken: a learning rate that is too high
scale-collapse            every recent step was skipped, and a smaller scale does not help
loss-not-told             nobody said what the loss was
nonfinite-loss            the loss itself is inf or NaN, and steps are not skipped for it
window-too-short          steps are lost to a scale that grows too often
window-too-long           the scale is low, gradients are lost, and it cannot grow back in time
slow-start                the first steps were all skipped, because the scale began too high
still-skipping            the last steps were all skipped, and nothing says yet that it will not end
scheduler-before-step     the learning rate moved after a first step that was skipped
accumulation-across-scales   gradients that were scaled differently were added up
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from amplab.amp.apex.collapse import SKIPS_BEFORE_COLLAPSE
from amplab.diagnose.finding import Finding
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.remedies.api_styles import (
    at_first_scale,
    look_at_step,
    look_while_it_happens,
    scheduler_after_step,
    smaller_rate,
    with_window,
)
from amplab.diagnose.remedies.float32 import dynamic_scale
from amplab.display.numbers import power

__all__ = ["RUN_RULES", "diverging", "lost_at_once", "run_findings"]

GROWN = 4.0
"""The median of the last losses over the largest of the first: four times cross entropy is far worse than guessing."""

FEW, EXPLODED = 6, 100.0
"""In fewer losses than this, batches alone could do it, and only growth by two orders of magnitude counts."""

SPOILT = 10.0
"""A loss this many times its best, and worse than at the start, has lost all that was learnt."""

AT_ONCE, LOST_FOR = 3, 3
"""Steps taken within which a run that had a finite loss can lose it for good, and for how many steps it must have."""

RECENT = 5
"""Steps whose median stands for "now"; one odd batch does not move it."""

LOST_STEPS = 0.02
"""Share of steps skipped, after the start, above which skips cost more than they find out: 1 in 50."""

UNDERFLOW = 0.1
"""Share of gradient elements lost above which a low scale does harm."""

START = 5
"""Skips in a row at the start that are worth a word, a scale 2^5 too high; and as many values of a schedule lost."""


def run_findings(run: Observation) -> list[Finding]:
    """Apply every rule of this file."""
    return [finding for rule in RUN_RULES for finding in rule(run)]


def diverging(run: Observation) -> Iterator[Finding]:
    """The loss grew, from weights that steps had moved: `EXPLODED`, `GROWN` or `SPOILT`.

    Losses of skipped steps count: they are those of the weights that the steps before had left.
    """
    losses = run.losses
    if len(losses) < 3 or losses[0] <= 0 or all(step.skipped for step in run):
        return
    few = max(1, min(RECENT, len(losses) // 3))
    early, now = max(losses[:few]), statistics.median(losses[-few:])
    best = min(statistics.median(losses[place : place + few]) for place in range(len(losses) - few + 1))
    enough = len(losses) >= FEW
    if not (now > EXPLODED * losses[0] or (enough and (now > GROWN * early or now > max(early, SPOILT * best)))):
        return
    taken = [step for step in run.steps[: _last_finite(run) + 1] if not step.skipped]
    norms = [step.gradient_norm for step in taken if step.gradient_norm is not None]
    evidence = {"first_loss": losses[0], "best_loss": min(losses), "loss_now": now, "steps_taken": len(taken)}
    if len(norms) > 1:
        evidence["gradient_norm_growth"] = norms[-1] / norms[0] if norms[0] else float("inf")
    rate = taken[-1].learning_rate
    yield Finding(
        "diverging",
        "error",
        f"The loss went from {losses[0]:.4g} to {now:.4g} in {len(taken)} steps that were taken, {_until(run)}.",
        "The steps are too large. What overflows afterwards, in float32 sooner or later too, is a consequence.",
        smaller_rate(run.scaling, rate),
        "likely",
        evidence=evidence | ({} if rate is None else {"learning_rate": rate}),
    )


def _last_finite(run: Observation) -> int:
    return max(place for place, step in enumerate(run) if step.loss is not None and step.loss_is_finite)


def _until(run: Observation) -> str:
    lost = [step.step for step in run if not step.loss_is_finite]
    return f"and is not finite in {len(lost)}, first in step {lost[0]}" if lost else "finite all the way"


def lost_at_once(run: Observation) -> Iterator[Finding]:
    """Within `AT_ONCE` steps taken the loss was finite, and in every step after, all skipped, it is not.

    Skipped steps leave the weights alone, so that the few which were taken brought them where no loss is finite.
    """
    finite = next((place for place, step in enumerate(run) if not step.loss_is_finite), len(run))
    before, after = run.steps[:finite], run.steps[finite:]
    taken = [step for step in before if not step.skipped]
    told = bool(before) and before[0].loss is not None and before[-1].loss is not None
    lost = told and len(after) >= LOST_FOR and all(step.skipped and not step.loss_is_finite for step in after)
    if not (lost and run[0].step == 0 and 0 < len(taken) <= AT_ONCE) or any(True for _ in diverging(run)):
        return
    rate = taken[-1].learning_rate
    evidence = {"first_loss": before[0].loss, "steps_taken": len(taken), "steps_lost": len(after)}
    yield Finding(
        "diverging",
        "error",
        f"The loss was {before[-1].loss:.4g} and is not finite in any of the {len(after)} steps since, after "
        f"{len(taken)} that {'was' if len(taken) == 1 else 'were'} taken.",
        "The first steps were too large: they brought the weights out of range. What overflows now is a consequence.",
        smaller_rate(run.scaling, rate),
        "likely",
        evidence=evidence | ({} if rate is None else {"learning_rate": rate}),
    )


def scale_collapse(run: Observation) -> Iterator[Finding]:
    """As many skips in a row as `LossScaleCollapse` waits for, or skips at a scale of 1 and below."""
    skips = run.skips_at_the_end
    if not skips:
        return
    last = run[-1]
    if skips < SKIPS_BEFORE_COLLAPSE and last.loss_scale > 1:
        return
    finite = last.loss_is_finite
    yield Finding(
        "scale-collapse",
        "error",
        f"The last {skips} steps were all skipped; the loss scale is down to {power(last.loss_scale)}.",
        "Gradients are not finite at a scale that makes nothing larger."
        if finite
        else "The loss is not finite before it is scaled, so no scale can help.",
        f"{look_at_step(run.scaling)}  # names the op",
        "certain",
        tensor=f"gradient of {last.first_nonfinite}" if last.first_nonfinite else "",
        evidence={"skips": skips, "loss_scale": last.loss_scale} | ({} if last.loss is None else {"loss": last.loss}),
    )


def nonfinite_loss(run: Observation) -> Iterator[Finding]:
    """A loss that is inf or NaN: an error in steps that were taken, a warning in steps that were skipped.

    A scaler that looks at gradients lets a step go where those are finite; then the loss may be finite again.
    """
    bad = [step for step in run if not step.loss_is_finite]
    taken = [step for step in bad if not step.skipped]
    if not bad:
        return
    first = (taken or bad)[0]
    checked = run.dynamic and run.scaling != "none"
    passed = "was taken: its gradients were finite, or went past the scaler." if checked else _TAKEN
    done = passed if taken else "was skipped; no scale is to blame."
    yield Finding(
        "nonfinite-loss",
        "error" if taken and not (checked and run[-1].loss_is_finite) else "warning",
        f"The loss is not finite in {len(bad)} of {len(run)} steps; step {first.step} {done}",
        *_why_nonfinite(run, first),
        tensor=f"gradient of {first.first_nonfinite}" if first.first_nonfinite else "",
        evidence={"steps": len(bad), "taken": len(taken), "first_step": first.step, "loss_scale": first.loss_scale},
    )


def loss_not_told(run: Observation) -> Iterator[Finding]:
    """Nobody said what the loss was, so that the rules about losses have nothing to go by."""
    if len(run) >= START and all(step.loss is None for step in run):
        yield Finding(
            "loss-not-told",
            "note",
            f"None of the {len(run)} steps came with a loss.",
            "torch's GradScaler and loops without one do not tell it; whether it grows or is inf stays unknown.",
            "loss = w.loss(loss)  # w is the watch; before backward, in every step",
            evidence={"steps": len(run)},
        )


_TAKEN = "was taken: nothing keeps inf and NaN out of the weights."


def _why_nonfinite(run: Observation, first: StepObservation) -> tuple[str, str]:
    """Cause and remedy: a static scale lets what overflows into the weights, and then the next loss shows it."""
    before = run.steps[: run.steps.index(first)]
    if not run.dynamic and first.loss_scale > 1 and before and not first.skipped:
        cause = f"Under a static scale, here {power(first.loss_scale)}, a step whose gradients overflow is taken: "
        return cause + "then the weights hold NaN, and every loss after.", dynamic_scale(_words(run))
    gone = not first.skipped and run.scaling and not run.dynamic  # the step has changed what it was made with
    look = f"{look_at_step(run.scaling)}  # with the batch of that step: names the op"
    look = look_while_it_happens(run.scaling) if gone else look
    return "Scaling comes after the loss, so that a loss which is not finite has another cause.", look


def _words(run: Observation) -> str | None:
    return run.level or "O1" if run.scaling in ("apex", "") else run.scaling if run.scaling == "amplab" else None


def window_too_short(run: Observation) -> Iterator[Finding]:
    """More than `LOST_STEPS` of the steps after the start are skipped, each by a scale that had grown before.

    A window of n clean steps costs 1 step in n + 1 once the scale has reached what the gradients bear.
    """
    later = run.steps[run.skips_at_the_start :]
    skips, clean = _skips_after_growth(run), sum(not step.skipped for step in later)
    if len(skips) < 3 or len(skips) <= LOST_STEPS * len(later):
        return
    window = run.growth_interval or max(1, round(clean / len(skips)))
    yield Finding(
        "window-too-short",
        "warning",
        f"{len(skips)} of {len(later)} steps were skipped because the scale had just grown.",
        f"The scale grows after every {window} clean steps, and overflows again: one step in {window + 1} is lost.",
        with_window(run.scaling, max(1000, 20 * window), run.level),
        "certain" if run.growth_interval else "likely",
        tensor=f"gradient of {skips[-1].first_nonfinite}" if skips[-1].first_nonfinite else "",
        evidence={"skips": len(skips), "steps": len(later), "window": window, "share": len(skips) / len(later)},
    )


def _skips_after_growth(run: Observation) -> list[StepObservation]:
    """The skips, with a finite loss, before which the scale had grown since the skip before."""
    found, grew = [], False
    for step in run:
        if step.skipped:
            if grew and step.loss_is_finite:
                found.append(step)
            grew = False
        elif step.next_loss_scale is not None and step.next_loss_scale > step.loss_scale:
            grew = True
    return found


def window_too_long(run: Observation) -> Iterator[Finding]:
    """Gradients are lost at a scale that fell and has not grown since; needs `underflow` and `growth_interval`."""
    lost = run[-1].underflow if len(run) else None
    if lost is None or run.growth_interval is None or lost <= UNDERFLOW or not run.skips:
        return
    highest = max(step.loss_scale for step in run)
    since = next(n for n, step in enumerate(reversed(run.steps)) if step.skipped)
    if run[-1].loss_scale < highest and since < run.growth_interval:
        yield Finding(
            "window-too-long",
            "warning",
            f"{lost:.0%} of the gradient elements are 0 in half at a scale of {power(run[-1].loss_scale)}.",
            f"The scale was {power(highest)} and grows back by one doubling in {run.growth_interval} clean steps.",
            with_window(run.scaling, max(50, run.growth_interval // 10), run.level),
            "likely",
            evidence={"underflow": lost, "loss_scale": run[-1].loss_scale, "window": run.growth_interval},
        )


def slow_start(run: Observation) -> Iterator[Finding]:
    """The first `START` steps or more were skipped, and then it went on."""
    skips = run.skips_at_the_start
    if START <= skips < len(run) and all(step.loss_is_finite for step in run.steps[:skips]):
        fits = run[skips].loss_scale
        yield Finding(
            "slow-start",
            "note",
            f"The first {skips} steps were skipped while the scale came down to {power(fits)}.",
            "The scale began higher than these gradients bear; that is what a dynamic scale does.",
            at_first_scale(run.scaling, fits, run.level),
            evidence={"skips": skips, "first_scale": run[0].loss_scale, "fitting_scale": fits},
        )


def still_skipping(run: Observation) -> Iterator[Finding]:
    """The last step or more were skipped with a finite loss, and the scale is not yet at its end."""
    skips = run.skips_at_the_end
    if not skips or not run[-1].loss_is_finite or any(True for _ in scale_collapse(run)):
        return
    first = run[-1].first_nonfinite
    last = "step was" if skips == 1 else f"{skips} steps were"
    told = "" if run[-1].loss is None else ", with a finite loss"
    yield Finding(
        "still-skipping",
        "note",
        f"The last {last} skipped{told}; the scale came down to {power(run[-1].loss_scale)}.",
        "A scale that is too high skips until it fits. If that does not end, an op overflows whatever the scale.",
        look_while_it_happens(run.scaling),
        "possible",
        tensor=f"gradient of {first}" if first else "",
        evidence={"skips": skips, "first_scale": run[-skips].loss_scale, "loss_scale": run[-1].loss_scale},
    )


def scheduler_before_step(run: Observation) -> Iterator[Finding]:
    """The learning rate changed after a first step that was skipped: a scheduler that counts steps not taken.

    Most loops are written so, and one value of a schedule is next to nothing; `START` of them are a warm-up.
    """
    rates = [step.learning_rate for step in run]
    if len(run) < 2 or run[0].step != 0 or not run[0].skipped or None in rates[:2] or rates[0] == rates[1]:
        return
    skips = run.skips_at_the_start
    moved = rates[min(skips, len(rates) - 1)]
    now = rates[1] if moved is None else moved
    yield Finding(
        "scheduler-before-step",
        "warning" if skips >= START else "note",
        f"The first {'step was' if skips == 1 else f'{skips} steps were'} skipped, and the learning rate went from "
        f"{rates[0]:g} to {now:g} all the same.",
        "The scheduler counts steps that were not taken; torch warns of it, and a warm-up is shorter than meant.",
        scheduler_after_step(run.scaling),
        evidence={"rate_before": rates[0], "rate_after": now, "skips": skips},
    )


def accumulation_across_scales(run: Observation) -> Iterator[Finding]:
    """A step added up gradients of backwards at different scales."""
    mixed = [step for step in run if len(set(step.backward_scales)) > 1]
    if mixed:
        scales = sorted(set(mixed[0].backward_scales))
        yield Finding(
            "accumulation-across-scales",
            "warning",
            f"Step {mixed[0].step} accumulates gradients that were scaled by {', '.join(map(power, scales))}.",
            "The scale moved between two backwards of one step, so that some count more than others.",
            "scaler.update()  # once for each optimizer step, after it, not for each backward",
            evidence={"steps": len(mixed), "smallest_scale": scales[0], "largest_scale": scales[-1]},
        )


RUN_RULES: tuple[Callable[[Observation], Iterator[Finding]], ...] = (
    diverging,
    lost_at_once,
    scale_collapse,
    nonfinite_loss,
    loss_not_told,
    accumulation_across_scales,
    window_too_short,
    window_too_long,
    scheduler_before_step,
    slow_start,
    still_skipping,
)
