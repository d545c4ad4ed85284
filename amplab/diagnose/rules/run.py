"""Rules about a run as a whole: pure functions from an `Observation` to findings.

diverging                    the loss grew before anything overflowed, or became non-finite within the first steps taken
scale-collapse               every recent step was skipped, and a smaller loss scale does not help
loss-missing                 the losses are unknown
nonfinite-loss               the loss itself is inf or NaN
window-too-short             steps are lost because the loss scale grows too often
window-too-long              the loss scale is small, gradients are lost, and it grows back too slowly
slow-start                   the first steps were all skipped because the loss scale began too large
still-skipping               the last steps were skipped while the loss scale falls; it may still find a value that fits
scheduler-counts-skips       the learning rate changed after a first step that was skipped
accumulation-across-scales   gradients with different loss scales were added up
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from amplab.amp.apex.loss_scaling import SKIPS_BEFORE_COLLAPSE
from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding, Number
from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.remedies.api_styles import ApiStyle
from amplab.display.numbers import count, power

__all__ = ["RUN_RULES", "diverging", "lost_at_once", "run_findings"]

GROWN = 4.0
"""Ratio of the median of the last losses to the largest of the first. If a model learns nothing, it is far smaller."""

FEW, EXPLODED = 6, 100.0
"""With fewer losses than this, single batches explain small growth: only two orders of magnitude count."""

RUINED = 10.0
"""A loss this many times its best, and larger than at the start: everything that the model had learned is lost."""

AT_ONCE, LOST_FOR = 3, 3
"""Steps taken before the loss stays non-finite, and for how many steps it must be so."""

RECENT = 5
"""The median of this many last losses counts as the present loss, so that one unusual batch does not matter."""

LOST_STEPS = 0.02
"""Share of steps skipped after the start above which the loss scale probes too often: 1 in 50."""

UNDERFLOW = 0.1
"""Share of gradient elements lost above which a small loss scale does harm."""

START = 5
"""Skips at the start from which they are reported: the scale was 2^5 too large, and 5 values of a schedule are lost."""


def run_findings(run: Observation) -> list[Finding]:
    """Apply every rule of this file."""
    return [finding for rule in RUN_RULES for finding in rule(run)]


def diverging(run: Observation) -> Iterator[Finding]:
    """The loss grew by a factor of `EXPLODED`, `GROWN` or `RUINED` after steps that changed the weights.

    Losses of skipped steps count, because they are computed with the weights of the steps before.
    """
    losses = run.losses
    if len(losses) < 3 or losses[0] <= 0 or all(step.skipped for step in run):
        return
    few = max(1, min(RECENT, len(losses) // 3))
    early, now = max(losses[:few]), statistics.median(losses[-few:])
    best = min(statistics.median(losses[place : place + few]) for place in range(len(losses) - few + 1))
    enough = len(losses) >= FEW
    if not (now > EXPLODED * losses[0] or (enough and (now > GROWN * early or now > max(early, RUINED * best)))):
        return
    taken = [step for step in run.steps[: _last_finite(run) + 1] if not step.skipped]
    norms = [step.gradient_norm for step in taken if step.gradient_norm is not None]
    evidence: dict[str, Number] = {"first_loss": losses[0], "best_loss": min(losses), "loss_now": now}
    evidence["steps_taken"] = len(taken)
    if len(norms) > 1:
        evidence["gradient_norm_growth"] = norms[-1] / norms[0] if norms[0] else float("inf")
    yield _diverging(run, "", evidence, taken[-1].learning_rate, until=_until(run))


def _diverging(run: Observation, case: str, evidence: dict[str, Number], rate: float | None, **fields: Any) -> Finding:
    known = {} if rate is None else {"learning_rate": rate}
    smaller = "group['lr'] / 10" if rate is None else f"{rate / 10:.2g}"
    return finding(
        "diverging", case, api=run.api, certainty="likely", evidence=evidence | known, rate=smaller, **fields
    )


def _last_finite(run: Observation) -> int:
    return max(place for place, step in enumerate(run) if step.loss is not None and step.loss_is_finite)


def _until(run: Observation) -> str:
    lost = [step.step for step in run if not step.loss_is_finite]
    return f"and is not finite in {len(lost)}, first in step {lost[0]}" if lost else "and is always finite"


def lost_at_once(run: Observation) -> Iterator[Finding]:
    """The loss was finite within `AT_ONCE` steps taken; in every step after, all of them skipped, it is not.

    Skipped steps do not change the weights, so the few steps taken moved them out of range.
    """
    finite = next((place for place, step in enumerate(run) if not step.loss_is_finite), len(run))
    before, after = run.steps[:finite], run.steps[finite:]
    taken = [step for step in before if not step.skipped]
    known = bool(before) and before[0].loss is not None and before[-1].loss is not None
    lost = known and len(after) >= LOST_FOR and all(step.skipped and not step.loss_is_finite for step in after)
    if not (lost and run[0].step == 0 and 0 < len(taken) <= AT_ONCE) or any(True for _ in diverging(run)):
        return
    evidence: dict[str, Number] = {"steps_taken": len(taken), "steps_lost": len(after)}
    first, last = before[0].loss, before[-1].loss
    if first is not None:
        evidence["first_loss"] = first
    steps = count(len(taken), "update step")
    yield _diverging(run, "at-once", evidence, taken[-1].learning_rate, last_loss=last, taken=steps)


def scale_collapse(run: Observation) -> Iterator[Finding]:
    """As many skips in a row as `LossScaleCollapse` needs, or skips at a loss scale of at most 1."""
    skips = run.skips_at_the_end
    if not skips:
        return
    last = run[-1]
    if skips < SKIPS_BEFORE_COLLAPSE and last.loss_scale > 1:
        return
    stays = run.steps[-2:] if skips > 1 else ()  # the scale of both: a skip that did not make it smaller
    at_floor = bool(stays) and stays[0].loss_scale == stays[1].loss_scale == last.next_loss_scale
    yield finding(
        "scale-collapse",
        "loss" if not last.loss_is_finite else "floor" if at_floor else "",
        api=run.api,
        tensor=f"gradient of {last.first_nonfinite}" if last.first_nonfinite else "",
        evidence={"skips": skips, "first_step": run[-skips].step, "loss_scale": last.loss_scale}
        | ({} if last.loss is None else {"loss": last.loss}),
        scale=power(last.loss_scale),
    )


def nonfinite_loss(run: Observation) -> Iterator[Finding]:
    """A loss that is inf or NaN: an error in steps that were taken, a warning in steps that were skipped.

    A scaler checks only gradients, so it takes a step with a non-finite loss if the gradients are finite.
    """
    bad = [step for step in run if not step.loss_is_finite]
    taken = [step for step in bad if not step.skipped]
    if not bad:
        return
    first = (taken or bad)[0]
    checked = run.dynamic and run.scaling != ApiStyle.PLAIN
    passed = "was taken: its gradients were finite, or they bypassed the scaler." if checked else _TAKEN
    yield finding(
        "nonfinite-loss",
        _case_of_loss(run, first),
        api=run.api,
        severity="error" if taken and not (checked and run[-1].loss_is_finite) else "warning",
        tensor=f"gradient of {first.first_nonfinite}" if first.first_nonfinite else "",
        evidence={"steps": len(bad), "taken": len(taken), "first_step": first.step, "loss_scale": first.loss_scale},
        all_steps=len(run),
        outcome=passed if taken else "was skipped.",
        scale=power(first.loss_scale),
    )


_TAKEN = "was taken: without a dynamic loss scale, nothing keeps inf and NaN out of the weights."


def _case_of_loss(run: Observation, first: StepObservation) -> str:
    """With a static loss scale an overflow reaches the weights, and then the next loss shows it."""
    before = run.steps[: run.steps.index(first)]
    if not run.dynamic and first.loss_scale > 1 and before and not first.skipped:
        return "static-scale"
    gone = not first.skipped and run.scaling and not run.dynamic  # the step has changed the weights that caused it
    return "taken" if gone else ""


def loss_missing(run: Observation) -> Iterator[Finding]:
    """No step has a loss, so the rules about losses cannot run."""
    if len(run) >= START and all(step.loss is None for step in run):
        yield finding("loss-missing", evidence={"steps": len(run)})


def window_too_short(run: Observation) -> Iterator[Finding]:
    """More than `LOST_STEPS` of the steps after the start are skipped, each by a scale that had grown before.

    A window of n clean steps costs 1 step in n + 1 once the loss scale has reached the largest that fits.
    """
    later = run.steps[run.skips_at_the_start :]
    skips, clean = _skips_after_growth(run), sum(not step.skipped for step in later)
    if len(skips) < 3 or len(skips) <= LOST_STEPS * len(later):
        return
    window = run.growth_interval or max(1, round(clean / len(skips)))
    yield finding(
        "window-too-short",
        api=run.api,
        certainty="certain" if run.growth_interval else "likely",
        tensor=f"gradient of {skips[-1].first_nonfinite}" if skips[-1].first_nonfinite else "",
        evidence={"skips": len(skips), "steps": len(later), "window": window, "share": len(skips) / len(later)},
        one_in=window + 1,
        new_window=max(1000, 20 * window),
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
        yield finding(
            "window-too-long",
            api=run.api,
            certainty="likely",
            evidence={"underflow": lost, "loss_scale": run[-1].loss_scale, "window": run.growth_interval},
            scale=power(run[-1].loss_scale),
            highest=power(highest),
            new_window=max(50, run.growth_interval // 10),
        )


def slow_start(run: Observation) -> Iterator[Finding]:
    """The first `START` steps or more were skipped, and then one was taken."""
    skips = run.skips_at_the_start
    if START <= skips < len(run) and all(step.loss_is_finite for step in run.steps[:skips]):
        fits = run[skips].loss_scale
        yield finding(
            "slow-start",
            api=run.api,
            evidence={"skips": skips, "first_scale": run[0].loss_scale, "first_scale_without_overflow": fits},
            scale=power(fits),
        )


def still_skipping(run: Observation) -> Iterator[Finding]:
    """The last step, or several, were skipped with a finite loss, and a smaller loss scale may still help."""
    skips = run.skips_at_the_end
    if not skips or not run[-1].loss_is_finite or any(True for _ in scale_collapse(run)):
        return
    first = run[-1].first_nonfinite
    yield finding(
        "still-skipping",
        api=run.api,
        certainty="possible",
        tensor=f"gradient of {first}" if first else "",
        evidence={
            "skips": skips,
            "first_step": run[-skips].step,
            "first_scale": run[-skips].loss_scale,
            "loss_scale": run[-1].loss_scale,
        },
        steps_were=_steps_were(skips),
        finite="" if run[-1].loss is None else ", with a finite loss",
        scale=power(run[-1].loss_scale),
    )


def _steps_were(skips: int) -> str:
    return "step was" if skips == 1 else f"{skips} steps were"


def scheduler_counts_skips(run: Observation) -> Iterator[Finding]:
    """The learning rate changed after a first step that was skipped.

    Most loops do this, and one value of a schedule hardly matters; `START` values are a large part of a warm-up.
    """
    if len(run) < 2 or run[0].step != 0 or not run[0].skipped:
        return
    before, after, skips = run[0].learning_rate, run[1].learning_rate, run.skips_at_the_start
    if before is None or after is None or before == after:
        return
    moved = run[min(skips, len(run) - 1)].learning_rate
    evidence: dict[str, Number] = {
        "rate_before": before,
        "rate_after": after if moved is None else moved,
        "skips": skips,
    }
    yield finding(
        "scheduler-counts-skips",
        "run",
        api=run.api,
        severity="warning" if skips >= START else "note",
        evidence=evidence,
        steps_were=_steps_were(skips),
    )


def accumulation_across_scales(run: Observation) -> Iterator[Finding]:
    """A step added up gradients of backward passes with different loss scales."""
    mixed = [step for step in run if len(set(step.backward_scales)) > 1]
    if mixed:
        scales = sorted(set(mixed[0].backward_scales))
        yield finding(
            "accumulation-across-scales",
            "run",
            evidence={"steps": len(mixed), "smallest_scale": scales[0], "largest_scale": scales[-1]},
            step=mixed[0].step,
            scales=", ".join(map(power, scales)),
        )


RUN_RULES: tuple[Callable[[Observation], Iterator[Finding]], ...] = (
    diverging,
    lost_at_once,
    scale_collapse,
    nonfinite_loss,
    loss_missing,
    accumulation_across_scales,
    window_too_short,
    window_too_long,
    scheduler_counts_skips,
    slow_start,
    still_skipping,
)
