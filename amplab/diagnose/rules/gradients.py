"""Rules about what happens to gradients between backward and step: pure functions from a `Rehearsal` to findings.

Between backward and step a gradient is divided by the loss scale once, and may be clipped. So

    norm at the step / norm delivered / what clipping did  =  1 / loss_scale

and a wrong loop shows as another power of the loss scale:

    stepped-with-scaled-gradients   1: a step inside the block of scale_loss, or an optimizer that was not passed to it
    loss-not-scaled                 1 as well, and backward delivers the same at another scale
    unscaled-twice                  1 / loss_scale^2
    clips-scaled-gradients          a clipping that found them at 1, and does something else at another scale
    clips-model-gradients           a clipping that the masters never saw
    accumulation-across-scales      gradients of backwards at several scales were added up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from amplab.diagnose.finding import Finding
from amplab.diagnose.remedies.api_styles import clip_unscaled, scaled_loss, unscaled_once, unscaled_step
from amplab.diagnose.train_step.rehearsal import GradientWrite, Rehearsal, SteppedGradient
from amplab.display.numbers import power

__all__ = ["GRADIENT_RULES", "gradient_findings", "may_be_scaled", "may_clip_scaled_gradients", "shared_module"]

TOLERANCE = 0.1
"""In log2: 7 %, what rounding to half and a weight decay added by hand stay below."""

TOLD_APART = 4.0
"""A loss scale below this cannot be told from an ordinary factor."""


def gradient_findings(rehearsal: Rehearsal, face: str = "") -> list[Finding]:
    """Apply every rule of this file; in the words of a face, see `remedies.api_styles`."""
    return [finding for rule in GRADIENT_RULES for finding in rule(rehearsal, face)]


def clips_scaled_gradients(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """Gradients were made smaller, not to unscale them, while they still were what backward had delivered."""
    scale = rehearsal.scale
    for write in _while_scaled(rehearsal):
        if not _unscales(rehearsal, write) and not _follows_the_scale(rehearsal, write):
            yield Finding(
                "clips-scaled-gradients",
                "error",
                f"Gradients of norm {write.norm:.4g} were clipped by a factor of {write.factor:.3g} while still "
                f"multiplied by the loss scale, {power(scale)}.",
                f"Their true norm is {write.norm / scale:.4g}; what the step sees is smaller than the limit by the "
                "scale, and changes whenever the scale moves.",
                clip_unscaled(face),
                op=write.op,
                module=shared_module(write.names),
                tensor=f"gradient of {write.names[0]}",
                evidence={"norm": write.norm, "factor": write.factor, "loss_scale": scale},
            )
            return


def may_clip_scaled_gradients(rehearsal: Rehearsal) -> bool:
    """Whether a write needs a rehearsal at another scale to be told from one that is right."""
    return any(not _unscales(rehearsal, write) for write in _while_scaled(rehearsal))


def stepped_with_scaled_gradients(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """An optimizer saw gradients that nobody had divided by the scale."""
    yield from _wrong_power(
        rehearsal,
        1,
        "stepped-with-scaled-gradients",
        "was stepped with gradients still multiplied by the loss scale",
        *unscaled_step(face),
    )


def may_be_scaled(rehearsal: Rehearsal) -> bool:
    """Whether gradients came to a step as backward delivered them, so that another scale must tell what they are."""
    return bool(_off_by(rehearsal, 1))


def loss_not_scaled(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """A scale is in force, and no backward of an optimizer's gradients has seen it: half loses what is below 2^-24."""
    for number, off in _by_optimizer(_off_by(rehearsal, 1)).items():
        never = [each for each in off if _is_never_scaled(rehearsal, each.name)]
        if never:
            lost = "What is below 2^-24 of a gradient in half is lost, and the scale is there to hold it."
            yield Finding(
                "loss-not-scaled",
                "warning" if rehearsal.in_half else "note",
                f"{len(never)} gradients of optimizer {number} are the same at any scale: nothing scales their loss.",
                lost if rehearsal.in_half else "No op of this step writes half, so nothing is lost by that.",
                scaled_loss(face)
                if rehearsal.in_half
                else f"# without half no scale is needed; with it:\n{scaled_loss(face)}",
                module=shared_module([each.name for each in never]),
                tensor=f"gradient of {never[0].name}",
                evidence={"optimizer": number, "gradients": len(never), "loss_scale": rehearsal.scale},
            )


def unscaled_twice(rehearsal: Rehearsal, face: str = "") -> Iterator[Finding]:
    """Gradients were divided by the scale two times."""
    yield from _wrong_power(
        rehearsal,
        -1,
        "unscaled-twice",
        "was stepped with gradients divided by the loss scale twice",
        *unscaled_once(face),
    )


def clips_model_gradients(rehearsal: Rehearsal, _face: str = "") -> Iterator[Finding]:
    """Gradients of a step were clipped, and none of those of the masters was, in that write or in another."""
    masters = {each.name for each in rehearsal.stepped if each.of_master}
    clips = [write for write in _clips(rehearsal) if _near(write.before, 1 / rehearsal.scale)]
    names = list(dict.fromkeys(name for write in clips for name in write.names))
    if masters and names and masters.isdisjoint(names):
        yield Finding(
            "clips-model-gradients",
            "warning",
            f"{len(names)} gradients were clipped, and {len(masters)} that float32 masters are stepped with were not.",
            "model.parameters() holds the half weights; their gradients have moved on to the masters.",
            "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)",
            op=clips[0].op,
            tensor=f"gradient of {names[0]}",
            evidence={"clipped": len(names), "masters": len(masters), "factor": clips[0].factor},
        )
    elif masters and rehearsal.clips_by_name and not _touches(rehearsal, masters):
        yield Finding(
            "clips-model-gradients",
            "warning",
            f"{rehearsal.clips_by_name} is given the model's parameters, and the gradients of {len(masters)} float32 "
            "masters are stepped with as they are.",
            "After backward the gradients have moved on to the masters; those of the half weights are None.",
            f"torch.nn.utils.{rehearsal.clips_by_name}(amp.master_params(optimizer), max_norm)",
            "likely",
            op=rehearsal.clips_by_name,
            evidence={"masters": len(masters)},
        )


def _touches(rehearsal: Rehearsal, masters: set[str]) -> bool:
    """Whether a clipping has gone through the gradients of masters, whatever it left of them."""
    return not masters.isdisjoint(
        rehearsal.looked_through.union(*(write.names for write in _clips_of_masters(rehearsal)))
    )


def _clips_of_masters(rehearsal: Rehearsal) -> list[GradientWrite]:
    return [write for write in _clips(rehearsal) if not _near(write.factor, 1 / rehearsal.scale)]


def accumulates_across_scales(rehearsal: Rehearsal, _face: str = "") -> Iterator[Finding]:
    """A step whose gradients are of several backwards, between which the scale was moved."""
    for each in rehearsal.mixed:
        yield Finding(
            "accumulation-across-scales",
            "warning",
            f"Optimizer {each.optimizer} was stepped with gradients scaled by {', '.join(map(power, each.scales))}, "
            "added up.",
            "The scale moved between two backwards of one step, so that some count more than others.",
            "scaler.update()  # once for each optimizer step, after it, not for each backward",
            tensor=f"optimizer {each.optimizer}",
            evidence={"smallest_scale": min(each.scales), "largest_scale": max(each.scales)},
        )


def _while_scaled(rehearsal: Rehearsal) -> list[GradientWrite]:
    """The writes that made gradients smaller which still were what backward had delivered."""
    found = [write for write in _clips(rehearsal) if rehearsal.scale >= TOLD_APART and _near(write.before, 1.0)]
    return [write for write in found if not all(_is_never_scaled(rehearsal, name) for name in write.names)]


def _unscales(rehearsal: Rehearsal, write: GradientWrite) -> bool:
    """Whether a write divides by the scale: by about 1 / loss_scale, and nobody does so once more.

    A clipping of scaled gradients to nearly their true norm is by about that factor too, and then they are unscaled.
    """
    scale = rehearsal.scale
    if not _near(write.factor, 1 / scale) or _is_exactly(write.factor, 1 / scale):
        return _near(write.factor, 1 / scale)
    seen = (each for each in rehearsal.stepped if each.name in write.names)
    return not any(_near(each.ratio / (scale if each.scaled_inside else 1.0), scale**-2) for each in seen)


def _follows_the_scale(rehearsal: Rehearsal, write: GradientWrite) -> bool:
    """Whether the gradients of a write come to the same at another scale: then its limit moves with the scale.

    A limit acts by its ratio to the norm, which another batch may have changed.
    """
    other = rehearsal.elsewhere
    if other is None:
        return False
    here, there = _left(rehearsal, write.names), _left(other, write.names)
    alike = next((each for each in other.writes if (each.op, each.names) == (write.op, write.names)), None)
    norms = 1.0 if alike is None else (alike.norm / other.scale) / (write.norm / rehearsal.scale)
    tolerance = TOLERANCE + 2 * abs(math.log2(norms))
    both = here.keys() & there.keys()
    return bool(both) and all(abs(math.log2(there[name] / here[name])) < tolerance for name in both)


def _left(rehearsal: Rehearsal, names: tuple[str, ...]) -> dict[str, float]:
    """What is left of each gradient at the step, unscaled: 1 where nothing was clipped."""
    known = (each for each in rehearsal.stepped if each.name in names and not math.isnan(each.ratio))
    return {each.name: each.ratio * (1.0 if each.scaled_inside else rehearsal.scale) for each in known}


def _clips(rehearsal: Rehearsal) -> list[GradientWrite]:
    """The writes that made gradients smaller by multiplying or clamping them; adding something is no clipping."""
    return [
        write
        for write in rehearsal.writes
        if write.factor < 1 - 1e-6 and any(word in write.op for word in ("mul", "div", "clamp"))
    ]


GRADIENT_RULES: tuple[Callable[[Rehearsal, str], Iterator[Finding]], ...] = (
    clips_scaled_gradients,
    stepped_with_scaled_gradients,
    loss_not_scaled,
    unscaled_twice,
    clips_model_gradients,
    accumulates_across_scales,
)


def _wrong_power(
    rehearsal: Rehearsal, power: int, name: str, symptom: str, cause: str, remedy: str
) -> Iterator[Finding]:
    scaled = [each for each in _off_by(rehearsal, power) if not _is_never_scaled(rehearsal, each.name)]
    for number, wrong in _by_optimizer(scaled).items():
        yield Finding(
            name,
            "error",
            f"Optimizer {number} {symptom}, {len(wrong)} of them.",
            cause,
            remedy,
            module=shared_module([each.name for each in wrong]),
            tensor=f"gradient of {wrong[0].name}",
            evidence={
                "optimizer": number,
                "gradients": len(wrong),
                "ratio": wrong[0].ratio,
                "loss_scale": rehearsal.scale,
            },
        )


def _off_by(rehearsal: Rehearsal, power: int) -> list[SteppedGradient]:
    return [each for each in rehearsal.stepped if any(_is_off_by(each, scale, power) for scale in rehearsal.scales)]


def _by_optimizer(gradients: Sequence[SteppedGradient]) -> dict[int, list[SteppedGradient]]:
    numbers = dict.fromkeys(each.optimizer for each in gradients)
    return {number: [each for each in gradients if each.optimizer == number] for number in numbers}


def _is_never_scaled(rehearsal: Rehearsal, name: str) -> bool:
    """Whether backward delivers a gradient that is nearer to the same at another scale than to following it."""
    other = rehearsal.elsewhere
    here, there = (_delivered(each, name) for each in (rehearsal, other)) if other is not None else (0.0, 0.0)
    if not (0 < here < math.inf and 0 < there < math.inf):
        return False
    return abs(math.log2(there / here)) < abs(math.log2(other.scale / rehearsal.scale)) / 2


def _delivered(rehearsal: Rehearsal, name: str) -> float:
    return next((each.delivered for each in rehearsal.stepped if each.name == name), 0.0)


def _is_off_by(gradient: SteppedGradient, scale: float, power: int) -> bool:
    """Whether a gradient is too large by `scale` to the `power`; told only where backward delivered it once."""
    if scale < TOLD_APART or gradient.backwards != 1 or gradient.scaled_inside or math.isnan(gradient.ratio):
        return False
    return _near(gradient.ratio / gradient.clipped * scale, scale**power)


def _is_exactly(value: float, expected: float) -> bool:
    """Up to the rounding of norms: a division by a power of two changes no bit, a clipping hardly ever hits one."""
    return abs(math.log2(value / expected)) < 1e-4


def _near(value: float, expected: float) -> bool:
    return value > 0 and abs(math.log2(value / expected)) < TOLERANCE


def shared_module(names: Sequence[str]) -> str:
    """What the modules of several parameters have in common; the module of one."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
