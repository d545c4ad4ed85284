"""What happened in each stage of a recorded step, in one sentence with the numbers of this step. No widget here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from amplab.display.numbers import count, percent, power, short_text
from amplab.formats import FLOAT16, FORMATS, LOW_PRECISION_DTYPES, FloatFormat
from amplab.lab import LEVELS, GradientCheck, ParameterStages, ScaleChange, Snapshot, StepStages, snapshot

__all__ = ["Told", "check_of", "say", "tell"]


_FLOAT32_NEARLY = 1e38
"""A format with a larger number than this has the range of float32: no gradient needs a scale."""


@dataclass(frozen=True)
class Told:
    """One stage.

    Attributes:
        name: Key of the stage.
        title: Its name in the page.
        brief: What it did, in a few letters.
        sentence: What it did to the chosen element, and why.
        operator: What is between the pictures, such as "× 2¹⁶".
        before: The tensor before, None if there is none.
        after: The tensor after.
        tone: "plain", "warning" for what is lost or skipped, or "idle" where nothing happened.
    """

    name: str
    title: str
    brief: str
    sentence: str
    operator: str
    before: Snapshot | None
    after: Snapshot | None
    tone: str = "plain"

    @property
    def compares(self) -> bool:
        """Whether both pictures show the same numbers, before and after; forward and backward make other ones."""
        return self.name not in ("forward", "backward")


def tell(stages: StepStages, seen: ParameterStages, element: int) -> list[Told]:
    """Return the stages of a step in order, told for an element of a parameter."""
    check = check_of(stages, seen)
    return [
        _cast(stages, seen, element),
        _forward(seen),
        _scale(stages, check),
        _backward(check, seen, element),
        _unscale(check, seen, element),
        _clip(seen, element),
        _step(stages, seen, element),
        _update(check),
    ]


def check_of(stages: StepStages, seen: ParameterStages) -> GradientCheck:
    """Return the loss and the check that belong to a parameter; the last of the step if none of them reached it."""
    if stages.checks:
        return stages.checks[-1 if seen.check is None else seen.check]
    scale = stages.record.loss_scale
    return GradientCheck(None, None, ScaleChange(scale, scale, 0, 0, None, skips=False), 0, 0, skipped=False)


# Before the gradients


def _cast(stages: StepStages, seen: ParameterStages, element: int) -> Told:
    stored, used = seen.stored, seen.used
    title = "Cast weights"
    if not (seen.is_cast or seen.has_master):
        is_half = stored.dtype in LOW_PRECISION_DTYPES
        level = LEVELS[stages.record.opt_level].label
        why = f"Nothing is cast: {seen.kind} reads this float32 {_word(seen)} as it is at {level}."
        if seen.outputs is None:
            why = f"No cast of this {_word(seen)} was seen in the step."
        if is_half:
            spacing = _spacing(stored, element)
            why = f"{level} stores this {_word(seen)} in {_dtype(stored)} and keeps no float32 copy: {spacing}"
        return Told("cast", title, f"{_dtype(stored)}", why, "=", stored, used, "idle")
    value, rounded = stored.value(element), used.value(element)
    source = "float32 master" if seen.has_master else f"float32 {_word(seen)}"
    when = ", the copy that the model already holds" if seen.has_master else " for this step"
    lost = max(0, used.stats.zeros - stored.stats.zeros)
    also = f" {lost:,} of {stored.stats.numel:,} elements became 0." if lost else ""
    became = _rounding(value, rounded, used)
    sentence = f"The {source} {_fine(value)} is rounded to {_dtype(used)}{when}: {became}{also}"
    brief = f"{_short_dtype(stored)}→{_short_dtype(used)}"
    return Told("cast", title, brief, sentence, "round", stored, used, "warning" if lost else "plain")


def _rounding(value: float, rounded: float, used: Snapshot) -> str:
    if rounded == value:
        return f"{_fine(rounded)}, exactly."
    if rounded == 0:
        return f"0, because it is at most half of {_dtype(used)}'s smallest number."
    if not math.isfinite(rounded):
        return f"{say(rounded)}, because it is above {_dtype(used)}'s largest number."
    off = abs(rounded - value)
    return f"{_fine(rounded)}, off by {say(off)} ({say(100 * off / abs(value), 2)} %)."


def _forward(seen: ParameterStages) -> Told:
    given, returned = seen.inputs, seen.outputs
    layer = seen.layer or "the model"
    if returned is None:
        text = f"{seen.kind} {layer} was not called: another module reads its {_word(seen)}."
        return Told("forward", "Forward", "not called", text, "→", given, returned, "idle")
    took = "reads its input" if given is None else f"reads {_shape(given)} {_dtype(given)} values"
    if given is not None and given.dtype != seen.used.dtype and seen.used.dtype in LOW_PRECISION_DTYPES:
        took = f"casts {_shape(given)} {_dtype(given)} values to {_dtype(seen.used)}"
    sentence = f"{seen.kind} {layer} {took} and returns {_shape(returned)} in {_dtype(returned)}. {_range_of(returned)}"
    brief = _broken_brief(returned) or f"max {say(returned.stats.absmax, 2)}"
    return Told("forward", "Forward", brief, sentence, seen.kind, given, returned, _tone(returned))


def _range_of(taken: Snapshot) -> str:
    broken = _broken(taken)
    if broken:
        limit = _format(taken)
        above = f", above {limit.max:g}, {limit.name}'s largest number" if limit and taken.stats.infs else ""
        return f"{broken}{above}."
    largest, limit = taken.stats.absmax, _format(taken)
    if limit is None or limit.max > _FLOAT32_NEARLY or not largest:
        return f"The largest magnitude is {say(largest)}."
    return f"The largest magnitude is {say(largest)}; {limit.name} overflows above {limit.max:g}."


def _scale(stages: StepStages, check: GradientCheck) -> Told:
    title, loss, scaled = "Loss × scale", check.loss, check.scaled_loss
    scale = check.scale.before
    if loss is None or scaled is None:
        return Told("scale", title, power(scale, raised=True), "The loss was not seen.", "×", loss, scaled, "idle")
    value, product = float(loss.kept.double().sum().item()), float(scaled.kept.double().sum().item())
    operator = f"× {power(scale, raised=True)}"
    injected = stages.record.injected or ""
    if not math.isfinite(value):
        text = f"The loss is {say(value)} before it is scaled: no loss scale can change that."
        return Told("scale", title, say(value), text, operator, loss, scaled, "warning")
    if "overflow" in injected and not 0.5 <= abs(product) / max(abs(value) * scale, 1e-300) <= 2:
        factor = _power(product / value if value else math.inf)
        text = f"Injected overflow: backward starts from {say(value)} × {factor} = {say(product)}, not {operator}."
        return Told("scale", title, f"× {factor}", text, f"× {factor}", loss, scaled, "warning")
    shrunk = " × 2⁻¹⁶ (injected underflow)" if "underflow" in injected else ""
    if scale == 1 and not shrunk:
        text = f"The loss scale is 1: backward starts from the loss itself, {say(value)}."
        return Told("scale", title, "× 1", text, "× 1", loss, scaled, "idle")
    moves = _is_power(scale) and math.isfinite(product) and product != value
    bits = " Only its exponent bits change." if moves else ""
    text = f"{say(value)}{shrunk} × {power(scale, raised=True)} = {say(product)}, in float32.{bits}"
    if FLOAT16.max < product < math.inf:
        text += " Float16 could not hold it: its largest number is 65504."
    elif not math.isfinite(product):
        text += " That is more than float32 can hold."
    return Told(
        "scale", title, operator, text, operator, loss, scaled, "plain" if math.isfinite(product) else "warning"
    )


# Gradients


def _backward(check: GradientCheck, seen: ParameterStages, element: int) -> Told:
    title, grad = "Backward", seen.computed or seen.scaled
    if grad is None:
        text = f"No backward reached {seen.name}: it has no gradient in this step."
        return Told("backward", title, "no gradient", text, "backward", seen.output_gradient, None, "idle")
    if grad.nonfinite:
        text = f"{_broken(grad)} in {_dtype(grad)}{_cause(check, grad)}."
        return Told("backward", title, _broken_brief(grad), text, "backward", seen.output_gradient, grad, "warning")
    text = _scaled_gradient(check.scale.before, grad, element) + _saved(check.scale.before, grad)
    brief = f"max {say(grad.stats.absmax, 2)}"
    tone = "warning" if grad.stats.zeros == grad.stats.numel else "plain"
    return Told("backward", title, brief, text, "backward", seen.output_gradient, grad, tone)


def _cause(check: GradientCheck, grad: Snapshot) -> str:
    """Why gradients are not finite, as far as this tensor shows it."""
    limit = _format(grad)
    if check.loss is not None and check.loss.nonfinite:
        return ", because the loss is not finite"
    if not grad.stats.infs:
        return ": a value on the way became inf, and inf × 0 or inf − inf is NaN"
    if limit is None or limit.max > _FLOAT32_NEARLY:
        return ""
    return f": scaled by {power(check.scale.before, raised=True)} they exceed {limit.max:g}, its largest number"


def _scaled_gradient(scale: float, grad: Snapshot, element: int) -> str:
    """What the scale did to the gradient of the chosen element."""
    value, limit = grad.value(element), _format(grad)
    if value == 0:
        zeros = f"{grad.stats.zeros:,} of {grad.stats.numel:,} here"
        why = "or too small for it" if scale == 1 else "or too small for it even when scaled"
        return f"This gradient is 0 in {_dtype(grad)}, as {zeros} are: exactly 0, {why}."
    if limit is None or limit.max > _FLOAT32_NEARLY:
        product = "" if scale == 1 else f"{say(value / scale)} × {power(scale, raised=True)} = "
        return f"This gradient is {product}{say(value)}, computed in {_dtype(grad)}, whose range needs no scale."
    kind = limit.kind(limit.bits(value))
    if scale == 1:
        return f"This gradient is {say(value)} in {limit.name}: {_kind_in_words(kind, value, limit)}."
    small = value / scale
    lesser = limit.kind(limit.bits(small))
    text = f"{say(small)} × {power(scale, raised=True)} = {say(value)}: {_kind_in_words(kind, value, limit)}"
    if lesser == "zero":
        return f"{text}. In {limit.name}, {say(small)} is 0."
    if lesser == "subnormal" and kind == "normal":
        return f"{text}. In {limit.name}, {say(small)} is subnormal, {_significant(small, limit)}."
    return f"{text}, as it would be without the scale."


def _saved(scale: float, grad: Snapshot) -> str:
    """Which share of the layer's gradients the scale keeps from becoming 0."""
    limit = _format(grad)
    if limit is None or limit.max > _FLOAT32_NEARLY or scale == 1 or not grad.stats.exponents.finite_nonzero:
        return ""
    lost = grad.stats.exponents.shifted(-math.log2(scale)).underflow_fraction(limit)
    return f" Without the scale, {percent(lost)} of the gradients here that are not 0 would become 0." if lost else ""


def _unscale(check: GradientCheck, seen: ParameterStages, element: int) -> Told:
    title, scale = "Unscale, check", check.scale.before
    operator = f"÷ {power(scale, raised=True)}"
    before, after = seen.scaled, seen.unscaled
    if before is None or after is None:
        return Told(
            "unscale", title, "no gradient", "There is no gradient to unscale.", operator, before, after, "idle"
        )
    if check.nonfinite:
        here = f"{after.nonfinite:,} of them" if after.nonfinite else "none of them"
        then = "the step will be skipped" if check.scale.skips else "a static scale takes the step all the same"
        text = (
            f"{check.nonfinite:,} of the {check.checked:,} gradients {_are(check.nonfinite)} inf or NaN "
            f"({here} in {seen.name}): found_inf = 1, and {then}."
        )
        return Told("unscale", title, "inf or NaN", text, operator, before, after, "warning")
    old, new = before.value(element), after.value(element)
    divided = f"{say(old)} {operator} = {say(new)}, in {_dtype(after)}."
    if seen.backwards > 1:
        last = f"{seen.backwards} backwards reach this {_word(seen)}."
        divided = f"{last} The last one gives {say(old)} {operator}; all together give {say(new)}."
    elif scale == 1:
        divided = "The scale is 1, so there is nothing to divide."
    text = f"{divided} None of the {check.checked:,} gradients is inf or NaN: found_inf = 0."
    return Told("unscale", title, "all finite", text, operator, before, after)


def _clip(seen: ParameterStages, element: int) -> Told:
    title, before, after = "Clip", seen.unscaled, seen.clipped
    if after is None or before is None:
        text = (
            "Nothing is clipped, because the step is skipped."
            if seen.skipped
            else "This training loop clips nothing: the optimizer gets the unscaled gradients."
        )
        return Told("clip", title, "none", text, "=", before, before, "idle")
    old, new = before.value(element), after.value(element)
    factor = after.mean / before.mean if before.mean else 1.0
    text = (
        f"The training loop clipped the gradients after the check: {say(old)} became {say(new)}. "
        f"On average they are {say(factor)} times as large."
    )
    return Told("clip", title, f"× {say(factor, 2)}", text, f"× {say(factor)}", before, after)


# The step


def _step(stages: StepStages, seen: ParameterStages, element: int) -> Told:
    before, after = seen.stored, seen.stepped
    if after is None:
        text = "The optimizer has not stepped: the loop accumulates gradients over several backwards."
        return Told("step", "Step", "no step", text, "→", before, None, "idle")
    old, new = before.value(element), after.value(element)
    if seen.skipped:
        text = (
            f"Skipped, because found_inf is 1: the {_word(seen)} keeps every bit of {_fine(old)}. So do all other "
            "weights, and the optimizer's state."
        )
        return Told("step", "Skip", "kept", text, "skip", before, after, "warning")
    optimizer = stages.optimizers[0] if len(set(stages.optimizers)) == 1 else "The optimizer"
    if not math.isfinite(new):
        text = f"{optimizer} used a gradient that is not finite: the {_word(seen)} becomes {say(new)}."
        return Told("step", "Step", f"now {say(new)}", text, optimizer, before, after, "warning")
    if new == old:
        return Told("step", "Step", "no change", _standstill(seen, element), optimizer, before, after, "warning")
    which = "master" if seen.has_master else _word(seen)
    moved = f"{optimizer} moves the {which} by {say(new - old)}, from {_fine(old)} to {_fine(new)}."
    still = _still_half(seen)
    return Told("step", "Step", _signed(new - old), moved + _copied(seen, element) + still, optimizer, before, after)


def _standstill(seen: ParameterStages, element: int) -> str:
    """Why a weight has not moved."""
    grad = seen.clipped or seen.unscaled
    value = seen.stored.value(element)
    if grad is not None and grad.value(element) == 0:
        return f"The gradient is 0: the {_word(seen)} stays {_fine(value)}."
    limit = _format(seen.stored)
    if limit is None:
        return f"The update does not change {_fine(value)}."
    spacing = limit.ulp(value)
    return (
        f"The update is lost: {limit.name} numbers near {_fine(value)} are {say(spacing)} apart, and a change of less "
        f"than half of that rounds back.{_still_half(seen)}"
    )


def _still_half(seen: ParameterStages) -> str:
    """How many weights that are stored in 16 bits have a gradient and yet were not changed."""
    grad, before, after = seen.clipped or seen.unscaled, seen.stored, seen.stepped
    if before.dtype not in LOW_PRECISION_DTYPES or grad is None or after is None:
        return ""
    has_gradient = grad.kept != 0
    total = int(has_gradient.sum().item())
    same = int(((before.kept == after.kept) & has_gradient).sum().item())
    return f" {same:,} of {total:,} weights with a gradient did not change." if same else ""


def _copied(seen: ParameterStages, element: int) -> str:
    """Whether the model's half copy has followed the master."""
    if seen.copied is None:
        return ""
    old, new, limit = seen.used.value(element), seen.copied.value(element), _format(seen.copied)
    if old != new:
        return f" The model's {_dtype(seen.copied)} copy follows, from {_fine(old)} to {_fine(new)}."
    spacing = f" ({say(limit.ulp(old))} apart here)" if limit else ""
    return (
        f" The model's {_dtype(seen.copied)} copy stays {_fine(old)}: its numbers are too coarse{spacing}. The master "
        "keeps the update."
    )


def _update(check: GradientCheck) -> Told:
    title, change = "Update scale", check.scale
    before, after = _scalar("loss scale", change.before), _scalar("loss scale, next step", change.after)
    old, new = power(change.before, raised=True), power(change.after, raised=True)
    if change.growth_interval is None:
        text = f"The loss scale is static: it stays {old}, whatever the gradients are."
        return Told("update", title, f"{old}, static", text, "=", before, after, "idle")
    if check.skipped:
        limit = ", its lower limit" if change.after == change.before else ""
        text = f"found_inf is 1: the scale goes from {old} to {new}{limit}, and clean steps are counted from 0 again."
        factor = f"÷ {say(change.before / change.after)}"
        return Told("update", title, f"{old} → {new}", text, factor, before, after, "warning")
    reached = change.clean_after == 0
    if reached and change.after != change.before:
        text = f"{change.growth_interval} clean steps in a row: the scale grows from {old} to {new}."
        return Told("update", title, f"{old} → {new}", text, f"× {say(change.after / change.before)}", before, after)
    if reached:
        text = f"{change.growth_interval} clean steps in a row, but the scale stays {old}, its upper limit."
        return Told("update", title, f"stays {old}", text, "=", before, after)
    left = count(change.growth_interval - change.clean_after, "more clean step")
    text = (
        f"No overflow: {change.clean_after} of {change.growth_interval} clean steps are done. The scale stays {old}, "
        f"and grows after {left}."
    )
    return Told("update", title, f"{change.clean_after} of {change.growth_interval}", text, "=", before, after)


# Words


def _scalar(name: str, value: float) -> Snapshot:
    return snapshot(name, torch.tensor(value, dtype=torch.float32))


def _word(seen: ParameterStages) -> str:
    """What the parameter is called in a sentence."""
    last = seen.name.rpartition(".")[2]
    return last if last in ("weight", "bias") else "parameter"


def _dtype(taken: Snapshot) -> str:
    return str(taken.dtype).removeprefix("torch.")


def _short_dtype(taken: Snapshot) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(
        _dtype(taken), _dtype(taken)
    )


def _format(taken: Snapshot) -> FloatFormat | None:
    return FORMATS.get(_dtype(taken))


def _shape(taken: Snapshot) -> str:
    return " × ".join(map(str, taken.shape)) or "1"


def say(value: float, digits: int = 3) -> str:
    """Write a number with a few significant digits, in decimals from 0.0001 to 99999.

    >>> say(23776.1), say(9.67e-6), say(-0.0317), say(float("inf"))
    ('23800', '9.67e-6', '-0.0317', 'inf')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{digits}g}")
    if 1e4 <= abs(rounded) < 1e5:
        return f"{rounded:.0f}"
    if abs(rounded) >= 1e5:
        return f"{rounded:.{digits - 1}e}".replace("e+0", "e").replace("e+", "e")
    return short_text(rounded, digits=digits)


def _fine(value: float) -> str:
    """A value with as many digits as float32 has, so that a small change is seen."""
    return say(value, 7)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{say(value, 2)}"


def _is_power(value: float) -> bool:
    return value > 0 and math.frexp(value)[0] == 0.5


def _power(factor: float) -> str:
    """A factor as a power of two, rounded to one."""
    return power(2.0 ** round(math.log2(factor)), raised=True) if 0 < factor < math.inf else say(factor)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _broken(taken: Snapshot) -> str:
    """How many elements are inf or NaN: "5 of 640 elements are inf, 1 is NaN"; "" for none."""
    infs, nans, total = taken.stats.infs, taken.stats.nans, taken.stats.numel
    if not taken.nonfinite:
        return ""
    for number, name in ((infs, "inf"), (nans, "NaN")):
        if number == total:
            return f"All {total:,} elements are {name}" if total > 1 else f"The only element is {name}"
    words = [f"{number:,} {_are(number)} {name}" for number, name in ((infs, "inf"), (nans, "NaN")) if number]
    return f"Of {total:,} elements, {' and '.join(words)}"


def _broken_brief(taken: Snapshot) -> str:
    infs, nans = taken.stats.infs, taken.stats.nans
    return f"{infs:,} inf" if infs else f"{nans:,} NaN" if nans else ""


def _tone(taken: Snapshot) -> str:
    return "warning" if taken.nonfinite else "plain"


def _kind_in_words(kind: str, value: float, limit: FloatFormat) -> str:
    if kind == "normal":
        return f"a normal {limit.name} number"
    if kind == "subnormal":
        return f"a subnormal {limit.name} number, {_significant(value, limit)}"
    return kind


def _significant(value: float, limit: FloatFormat) -> str:
    """How many significant bits a subnormal number has: "with 3 of 11 significant bits"."""
    steps = max(1, round(abs(value) / limit.smallest_subnormal))
    return f"with {steps.bit_length()} of {limit.mantissa_bits + 1} significant bits"


def _spacing(taken: Snapshot, element: int) -> str:
    limit, value = _format(taken), taken.value(element)
    if limit is None or not math.isfinite(value):
        return "no step can be finer than its spacing."
    return f"near {_fine(value)} its numbers are {say(limit.ulp(value))} apart."
