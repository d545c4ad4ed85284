"""Rules about what happens to gradients between backward and step: pure functions from a `Rehearsal` to findings.

Between backward and step a gradient is divided by the loss scale once, and may be clipped. So

    norm at the step / norm after backward / factor of the clipping  =  1 / loss_scale

and a wrong loop shows as another power of the loss scale:

    stepped-with-scaled-gradients   1: a step inside the block of scale_loss, or an optimizer that was not passed to it
    loss-not-scaled                 1 as well, and backward computes the same gradients at another loss scale
    unscaled-twice                  1 / loss_scale^2
    loss-not-scaled                 1 / loss_scale, and backward computes the same gradients at another loss scale
    clips-scaled-gradients          a clipping while the ratio is 1, with another effect at another loss scale
    clips-scaled-gradients          a clipping of some gradients at 1 together with others at 1 / loss_scale
    clips-model-gradients           a clipping that does not reach the masters
    accumulation-across-scales      gradients of backward passes with different loss scales were added up
    unscaled-too-early              a backward added scaled gradients to gradients that were unscaled already
    two-scalers                     two scalers unscaled the same gradients
    gradients-left-over             backward added to gradients that a skipped step had left at inf or NaN
    another-scaler                  a scaler divided by another scale than that of the scaler that was passed
    nonfinite-gradients-hidden      the loop made gradients finite before the scaler checked them
    added-to-scaled-gradients       a term was added while the ratio is 1, and it does not grow with the loss scale
    backward-not-linear             gradients of some parameters grow with the loss scale, those further back less
    gradients-rounded               unscaled gradients were rounded to float16, which made elements 0
    zero-grad-in-accumulation       the step used only the last of several backwards; nothing used the others' gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from amplab.diagnose.catalogue import finding
from amplab.diagnose.finding import Finding, Number
from amplab.diagnose.remedies.api_styles import Api
from amplab.diagnose.train_step.rehearsal import GradientWrite, Rehearsal, SteppedGradient
from amplab.display.numbers import count, power

__all__ = [
    "GRADIENT_RULES",
    "gradient_findings",
    "left_over",
    "not_scaled_perhaps",
    "may_add_to_scaled_gradients",
    "may_be_scaled",
    "may_clip_scaled_gradients",
    "shared_module",
]

TOLERANCE = 0.1
"""In log2: 7 %, more than rounding to float16 or a weight decay added by hand changes."""

_SHRINKS = ("mul", "div", "clamp")

_FLUSHED = 0.01
"""A smaller share of gradients that become 0 is no finding."""

TOLD_APART = 4.0
"""A smaller loss scale cannot be distinguished from an ordinary factor."""


def gradient_findings(rehearsal: Rehearsal, api: Api | None = None) -> list[Finding]:
    """Apply every rule of this file, with remedies for `api`."""
    return [found for rule in GRADIENT_RULES for found in rule(rehearsal, api or Api())]


def clips_scaled_gradients(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients were made smaller while they were still scaled, and not in order to unscale them."""
    scale = rehearsal.scale
    for write in _while_scaled(rehearsal):
        if not _unscales(rehearsal, write) and not _follows_the_scale(rehearsal, write):
            yield finding(
                "clips-scaled-gradients",
                api=api,
                op=write.call or write.op,
                line=write.line,
                module=shared_module(write.names),
                tensor=f"gradient of {write.names[0]}",
                evidence={"norm": write.norm, "factor": write.factor, "loss_scale": scale},
                scale=power(scale),
                true_norm=write.norm / scale,
            )
            return


def clips_some_scaled_gradients(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients were clipped together of which some were still scaled and others were not, by several optimizers."""
    for write in _clips(rehearsal):
        scaled = _still_scaled(rehearsal, write)
        if scaled:
            number = next((each.optimizer for each in rehearsal.stepped if each.name == scaled[0]), 0)
            yield finding(
                "clips-scaled-gradients",
                "some",
                api=api,
                op=write.call or write.op,
                line=write.line,
                module=shared_module(scaled),
                tensor=f"gradient of {scaled[0]}",
                evidence={"factor": write.factor, "scaled": len(scaled), "clipped": len(write.names)}
                | {"optimizer": number, "loss_scale": rehearsal.scale},
                scale=power(rehearsal.scale),
            )
            return


def _still_scaled(rehearsal: Rehearsal, write: GradientWrite) -> list[str]:
    """The gradients of a write that were still scaled although others of it had been unscaled."""
    seen = dict(zip(write.names, write.ratios, strict=False))
    unscaled = [name for name, ratio in seen.items() if any(_near(ratio, 1 / scale) for scale in rehearsal.scales)]
    if rehearsal.scale < TOLD_APART or not unscaled or _is_exactly(write.factor, 1 / rehearsal.scale):
        return []
    return [name for name, ratio in seen.items() if _near(ratio, 1.0) and not _is_never_scaled(rehearsal, name)]


def may_clip_scaled_gradients(rehearsal: Rehearsal) -> bool:
    """Whether only a rehearsal at another loss scale shows if a write is correct."""
    return any(not _unscales(rehearsal, write) for write in _while_scaled(rehearsal)) or any(
        _still_scaled(rehearsal, write) for write in _clips(rehearsal)
    )


def stepped_with_scaled_gradients(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """An optimizer was stepped with gradients that were not divided by the loss scale.

    A GradScaler skips a step whose gradients are not finite, so a step with such gradients did not go through it.
    """
    yield from _wrong_power(rehearsal, api, 1, "stepped-with-scaled-gradients")
    never_scaled = rehearsal.loss_gradient is not None and rehearsal.loss_gradient < math.sqrt(rehearsal.scale)
    for each in () if rehearsal.scale < TOLD_APART or never_scaled else rehearsal.unguarded:
        yield finding(
            "stepped-with-scaled-gradients",
            api=api,
            certainty="likely",
            module=shared_module(each.names),
            tensor=f"gradient of {each.names[0]}",
            evidence={"optimizer": each.optimizer, "gradients": len(each.names), "loss_scale": rehearsal.scale},
        )


def another_scaler(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Only other scalers than the one that was passed divided gradients."""
    # Without a scaler a run can be watched, too; only its skipped steps are not seen.
    if rehearsal.another_scaler is None or (rehearsal.scales == (1.0,) and not rehearsal.overflowed):
        return
    used, passed = rehearsal.another_scaler
    yield finding(
        "another-scaler",
        api=api,
        evidence={"used": used, "passed": passed},
        used_scale=power(used),
        passed_scale=power(passed),
    )


def nonfinite_gradients_hidden(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A step used gradients that were inf or NaN after backward and are finite now: the scaler could not see them.

    Clipping by value makes inf finite too; that it clips scaled gradients says more.
    """
    if any(clips_scaled_gradients(rehearsal, api)):
        return
    seen = next((each for each in (rehearsal, rehearsal.skipped) if each is not None and each.hidden), None)
    if seen is not None:
        call, line = seen.hidden_at
        names = [name for each in seen.hidden for name in each.names]
        yield finding(
            "nonfinite-gradients-hidden",
            api=api,
            op=call,
            line=line,
            module=shared_module(names),
            tensor=f"gradient of {names[0]}",
            evidence={"gradients": len(names), "loss_scale": seen.scale},
        )


def added_to_scaled_gradients(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A term was added to gradients while they were scaled, and it is the same at another loss scale."""
    other = rehearsal.elsewhere
    if other is None:
        return
    for write in _additions(rehearsal):
        alike = next((each for each in other.writes if (each.op, each.names) == (write.op, write.names)), None)
        if alike is None or not alike.added:
            continue
        growth = abs(math.log2(write.added / alike.added))
        if growth < abs(math.log2(rehearsal.scale / other.scale)) / 2:
            yield finding(
                "added-to-scaled-gradients",
                api=api,
                op=write.call or write.op,
                line=write.line,
                module=shared_module(write.names),
                tensor=f"gradient of {write.names[0]}",
                evidence={"added": write.added, "norm": write.norm, "loss_scale": rehearsal.scale},
                scale=power(rehearsal.scale),
            )
            return


def may_add_to_scaled_gradients(rehearsal: Rehearsal) -> bool:
    """Whether only a rehearsal at another loss scale shows if an addition to gradients is correct."""
    return bool(_additions(rehearsal))


def _additions(rehearsal: Rehearsal) -> list[GradientWrite]:
    """The additions to gradients that were still scaled."""
    return [
        each for each in rehearsal.writes if rehearsal.scale >= TOLD_APART and each.added and _near(each.before, 1.0)
    ]


def backward_not_linear(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients of the same loss grow with the loss scale near the loss and less further back: backward clamps."""
    clamped = [each for each in _stepped_once(rehearsal) if _is_clamped(rehearsal, each.name)]
    if clamped:
        yield finding(
            "backward-not-linear",
            api=api,
            module=shared_module([each.name for each in clamped]),
            tensor=f"gradient of {clamped[0].name}",
            evidence={"gradients": len(clamped), "loss_scale": rehearsal.scale},
            scale=power(rehearsal.scale),
        )


def not_scaled_perhaps(rehearsal: Rehearsal) -> bool:
    """Whether gradients do not grow with the loss scale: because their loss is not scaled, or backward clamps them."""
    other = rehearsal.elsewhere
    return other is not None and any(_is_constant(rehearsal, other, each.name) for each in rehearsal.stepped)


def gradients_rounded(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Unscaled gradients were rounded to float16: the loss scale had kept elements that are 0 now."""
    flushed = [each for each in rehearsal.stepped if each.flushed > 0]
    worst = max(flushed, key=lambda each: each.flushed, default=None)
    if worst is not None and worst.flushed >= _FLUSHED and rehearsal.scale >= TOLD_APART:
        yield finding(
            "gradients-rounded",
            api=api,
            module=shared_module([each.name for each in flushed]),
            tensor=f"gradient of {worst.name}",
            evidence={"share": worst.flushed, "gradients": len(flushed), "loss_scale": rehearsal.scale},
            scale=power(rehearsal.scale),
        )


def may_be_scaled(rehearsal: Rehearsal) -> bool:
    """Whether gradients reached a step unchanged or divided by the loss scale.

    A rehearsal at another loss scale shows whether backward scaled them.
    """
    return bool(_off_by(rehearsal, 1) or _divided(rehearsal))


def loss_not_scaled(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A loss scale is in use, but the gradients of an optimizer do not depend on it."""
    for number, off in _by_optimizer(_off_by(rehearsal, 1)).items():
        never = [each for each in off if _is_never_scaled(rehearsal, each.name)]
        if never:
            yield finding(
                "loss-not-scaled",
                "" if rehearsal.in_half else "no-half",
                api=api,
                severity="warning" if rehearsal.in_half else "note",
                module=shared_module([each.name for each in never]),
                tensor=f"gradient of {never[0].name}",
                evidence={"optimizer": number, "gradients": len(never), "loss_scale": rehearsal.scale},
            )


def divided_without_scaling(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients were divided by the loss scale although the loss that they belong to was not multiplied by it."""
    other = rehearsal.elsewhere
    if other is None:
        return
    divided = [each for each in _divided(rehearsal) if not _is_clamped(rehearsal, each.name)]
    never = [each for each in divided if _is_the_same(each.delivered, _delivered(other, each.name))]
    for number, wrong in _by_optimizer(never).items():
        yield finding(
            "loss-not-scaled",
            "divided",
            api=api,
            severity="error",
            module=shared_module([each.name for each in wrong]),
            tensor=f"gradient of {wrong[0].name}",
            evidence={"optimizer": number, "gradients": len(wrong), "loss_scale": rehearsal.scale},
            scale=power(rehearsal.scale),
        )


def _divided(rehearsal: Rehearsal) -> list[SteppedGradient]:
    """The gradients that a step divided by a loss scale once."""

    def is_divided(gradient: SteppedGradient, scale: float) -> bool:
        return scale >= TOLD_APART and (gradient.scaled_inside or _near(gradient.unclipped, 1 / scale))

    return [each for each in rehearsal.stepped if any(is_divided(each, scale) for scale in rehearsal.scales)]


def _is_the_same(here: float, there: float) -> bool:
    """Whether two norms differ by less than a factor of 1.4; another batch may change a norm."""
    return 0 < here < math.inf and 0 < there < math.inf and abs(math.log2(there / here)) < 0.5


def unscaled_twice(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients were divided by the loss scale two times."""
    yield from _wrong_power(rehearsal, api, -1, "unscaled-twice")


def clips_model_gradients(rehearsal: Rehearsal, _api: Api) -> Iterator[Finding]:
    """Gradients of a step were clipped, but none of those of the masters was, in that write or in another."""
    masters = {each.name for each in rehearsal.stepped if each.of_master}
    clips = [write for write in _clips(rehearsal) if _near(write.before, 1 / rehearsal.scale)]
    names = list(dict.fromkeys(name for write in clips for name in write.names))
    if masters and names and masters.isdisjoint(names):
        yield finding(
            "clips-model-gradients",
            op=clips[0].call or clips[0].op,
            line=clips[0].line,
            tensor=f"gradient of {names[0]}",
            evidence={"clipped": len(names), "masters": len(masters), "factor": clips[0].factor},
        )
    elif masters and rehearsal.empty_clips and not _touches(rehearsal, masters):
        clip = rehearsal.empty_clips[0]
        yield finding(
            "clips-model-gradients", "by-name", op=clip.call, line=clip.line, evidence={"masters": len(masters)}
        )
    elif masters and rehearsal.clips_by_name and not _touches(rehearsal, masters):
        yield finding(
            "clips-model-gradients",
            "by-name",
            certainty="likely",
            op=rehearsal.clips_by_name,
            evidence={"masters": len(masters)},
        )


def _touches(rehearsal: Rehearsal, masters: set[str]) -> bool:
    """Whether a clipping read the gradients of masters, with or without changing them."""
    return not masters.isdisjoint(
        rehearsal.looked_through.union(*(write.names for write in _clips_of_masters(rehearsal)))
    )


def _clips_of_masters(rehearsal: Rehearsal) -> list[GradientWrite]:
    return [write for write in _clips(rehearsal) if not _near(write.factor, 1 / rehearsal.scale)]


def accumulates_across_scales(rehearsal: Rehearsal, _api: Api) -> Iterator[Finding]:
    """A step whose gradients come from several backward passes, between which the loss scale changed."""
    for each in rehearsal.mixed:
        yield finding(
            "accumulation-across-scales",
            tensor=f"optimizer {each.optimizer}",
            evidence={"smallest_scale": min(each.scales), "largest_scale": max(each.scales)},
            optimizer=each.optimizer,
            scales=", ".join(map(power, each.scales)),
        )


def unscaled_too_early(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """A step whose gradients were unscaled between two backward passes."""
    for each in rehearsal.early:
        evidence: dict[str, Number] = {"gradients": len(each.names), "backwards_after": each.times}
        yield finding(
            "unscaled-too-early",
            api=api,
            module=shared_module(each.names),
            tensor=f"gradient of {each.names[0]}",
            evidence=evidence | {"loss_scale": rehearsal.scale},
            optimizer=each.optimizer,
            backwards=count(each.times, "backward"),
            scale=power(rehearsal.scale),
        )


def two_scalers(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients that two scalers unscaled; one scaler refuses to do so twice."""
    for each in rehearsal.unscaled_by_two:
        yield finding(
            "two-scalers",
            api=api,
            module=shared_module(each.names),
            tensor=f"gradient of {each.names[0]}",
            evidence={"optimizer": each.optimizer, "gradients": len(each.names), "times": each.times},
        )


def zero_grad_in_accumulation(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Backward passes of a step whose gradients were dropped before any step used them."""
    for each in rehearsal.dropped:
        yield finding(
            "zero-grad-in-accumulation",
            certainty="certain" if each.of_other_batches else "likely",
            api=api,
            module=shared_module(each.names),
            tensor=f"gradient of {each.names[0]}",
            evidence={"optimizer": each.optimizer, "gradients": len(each.names), "dropped": each.times},
            before=count(each.times, "backward"),
        )


def left_over(rehearsal: Rehearsal, api: Api) -> Iterator[Finding]:
    """Gradients of a skipped step that are not set to zero before the next backward."""
    if rehearsal.left_over:
        yield finding(
            "gradients-left-over",
            api=api,
            module=shared_module(rehearsal.left_over),
            tensor=f"gradient of {rehearsal.left_over[0]}",
            evidence={"gradients": len(rehearsal.left_over), "loss_scale": rehearsal.scale},
        )


def _while_scaled(rehearsal: Rehearsal) -> list[GradientWrite]:
    """The writes that made gradients smaller while they were still scaled."""
    found = [write for write in _clips(rehearsal) if rehearsal.scale >= TOLD_APART and _near(write.before, 1.0)]
    return [write for write in found if not all(_is_never_scaled(rehearsal, name) for name in write.names)]


def _unscales(rehearsal: Rehearsal, write: GradientWrite) -> bool:
    """Whether a write unscales: its factor is about 1 / loss_scale, and the gradients are not unscaled again.

    A clipping of scaled gradients to nearly their true norm has about that factor too; then they are unscaled later.
    """
    scale = rehearsal.scale
    if not _near(write.factor, 1 / scale) or _is_exactly(write.factor, 1 / scale):
        return _near(write.factor, 1 / scale)
    seen = (each for each in rehearsal.stepped if each.name in write.names)
    return not any(_near(each.ratio / (scale if each.scaled_inside else 1.0), scale**-2) for each in seen)


def _follows_the_scale(rehearsal: Rehearsal, write: GradientWrite) -> bool:
    """Whether the gradients after a write are the same at another loss scale: then its limit follows the loss scale.

    The effect of a limit depends on its ratio to the norm, which differs between batches. Where only one scale was
    seen, a limit that is a round number only after it is divided by the loss scale follows the scale.
    """
    other = rehearsal.elsewhere
    if other is None:
        limit = write.norm * write.factor
        return _is_round(limit / rehearsal.scale) and not _is_round(limit)
    here, there = _left(rehearsal, write.names), _left(other, write.names)
    alike = next((each for each in other.writes if (each.op, each.names) == (write.op, write.names)), None)
    norms = 1.0 if alike is None else (alike.norm / other.scale) / (write.norm / rehearsal.scale)
    tolerance = TOLERANCE + 2 * abs(math.log2(norms))
    both = here.keys() & there.keys()
    return bool(both) and all(abs(math.log2(there[name] / here[name])) < tolerance for name in both)


def _left(rehearsal: Rehearsal, names: tuple[str, ...]) -> dict[str, float]:
    """The share that is left of each gradient at the step, unscaled: 1 without clipping."""
    known = (each for each in rehearsal.stepped if each.name in names and not math.isnan(each.ratio))
    return {each.name: each.ratio * (1.0 if each.scaled_inside else rehearsal.scale) for each in known}


def _clips(rehearsal: Rehearsal) -> list[GradientWrite]:
    """The writes that made gradients smaller by multiplication or clamping; an addition is not a clipping."""
    return [
        write
        for write in rehearsal.writes
        if write.factor < 1 - 1e-6 and any(word in write.op.removeprefix("amplab.multi") for word in _SHRINKS)
    ]


GRADIENT_RULES: tuple[Callable[[Rehearsal, Api], Iterator[Finding]], ...] = (
    another_scaler,
    nonfinite_gradients_hidden,
    added_to_scaled_gradients,
    backward_not_linear,
    gradients_rounded,
    clips_scaled_gradients,
    clips_some_scaled_gradients,
    stepped_with_scaled_gradients,
    loss_not_scaled,
    divided_without_scaling,
    unscaled_twice,
    clips_model_gradients,
    accumulates_across_scales,
    unscaled_too_early,
    two_scalers,
    zero_grad_in_accumulation,
    left_over,
)


def _wrong_power(rehearsal: Rehearsal, api: Api, power: int, name: str) -> Iterator[Finding]:
    scaled = [each for each in _off_by(rehearsal, power) if not _is_never_scaled(rehearsal, each.name)]
    for number, wrong in _by_optimizer(scaled).items():
        evidence: dict[str, Number] = {"optimizer": number, "gradients": len(wrong)}
        yield finding(
            name,
            api=api,
            module=shared_module([each.name for each in wrong]),
            tensor=f"gradient of {wrong[0].name}",
            evidence=evidence | {"ratio": wrong[0].ratio, "loss_scale": rehearsal.scale},
        )


def _off_by(rehearsal: Rehearsal, power: int) -> list[SteppedGradient]:
    return [each for each in rehearsal.stepped if any(_is_off_by(each, scale, power) for scale in rehearsal.scales)]


def _by_optimizer(gradients: Sequence[SteppedGradient]) -> dict[int, list[SteppedGradient]]:
    numbers = dict.fromkeys(each.optimizer for each in gradients)
    return {number: [each for each in gradients if each.optimizer == number] for number in numbers}


def _is_never_scaled(rehearsal: Rehearsal, name: str) -> bool:
    """Whether a gradient after backward depends little on the loss scale, judged by a rehearsal at another one."""
    other = rehearsal.elsewhere
    if other is None:
        loss_gradient = rehearsal.loss_gradient
        return loss_gradient is not None and 0 < loss_gradient < math.sqrt(rehearsal.scale)
    return _is_constant(rehearsal, other, name) and not _is_clamped(rehearsal, name)


def _is_clamped(rehearsal: Rehearsal, name: str) -> bool:
    """Whether a gradient hardly grows with a large loss scale, and is smaller at a scale far below 1."""
    below = rehearsal.far_below
    return (
        below is not None
        and rehearsal.elsewhere is not None
        and _is_constant(rehearsal, rehearsal.elsewhere, name)
        and _delivered(below, name) < _delivered(rehearsal, name) / 2
    )


def _is_constant(rehearsal: Rehearsal, other: Rehearsal, name: str) -> bool:
    """Whether a gradient after backward depends little on the loss scale."""
    here, there = _delivered(rehearsal, name), _delivered(other, name)
    if not (0 < here < math.inf and 0 < there < math.inf):
        return False
    return abs(math.log2(there / here)) < abs(math.log2(other.scale / rehearsal.scale)) / 2


def _stepped_once(rehearsal: Rehearsal) -> list[SteppedGradient]:
    return list({each.name: each for each in rehearsal.stepped}.values())


def _delivered(rehearsal: Rehearsal, name: str) -> float:
    return next((each.delivered for each in rehearsal.stepped if each.name == name), 0.0)


def _is_off_by(gradient: SteppedGradient, scale: float, power: int) -> bool:
    """Whether a gradient is too large by `scale` to the `power`; False if several backward passes contributed."""
    if scale < TOLD_APART or gradient.backwards != 1 or gradient.scaled_inside or math.isnan(gradient.ratio):
        return False
    return _near(gradient.unclipped * scale, scale**power)


def _is_exactly(value: float, expected: float) -> bool:
    """Equality up to the rounding of norms: division by a power of two is exact; a clipping rarely has that factor."""
    return 0 < value < math.inf and abs(math.log2(value / expected)) < 1e-4


def _is_round(value: float) -> bool:
    """Whether a number has two significant digits, as people write limits."""
    return value > 0 and abs(value / float(f"{value:.1e}") - 1) < 1e-4


def _near(value: float, expected: float) -> bool:
    return 0 < value < math.inf and abs(math.log2(value / expected)) < TOLERANCE


def shared_module(names: Sequence[str]) -> str:
    """Return the module that contains all of several parameters."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
