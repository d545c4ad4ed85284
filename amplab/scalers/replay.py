"""Another rule on a recorded run: its scale at every step, and the steps that it would have skipped.

    replay(rule, found_infs)                        found_inf of every step as recorded
    replay(rule, gradient_exponents=exponents)      found_inf of every step under this rule's scale

An unscaled gradient of exponent e is in [2^e, 2^(e+1)). Multiplied by the replayed scale it overflows, or does not, or
the record does not contain enough information to decide. A step that was recorded with inf or NaN does not show how
large its gradients were. For a finite step that was not measured, the measured steps around it decide, and only if
their gradients are far from the limit (`exponents_around`). Every undecided step gives its reason (``doubt``).

A rule that does not skip, such as a static scale, takes the step that overflows. The weights are then inf or NaN, and
so are all later gradients: the run is lost from there on (``lost_from``).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from amplab.formats import FLOAT16, ExponentHistogram, FloatFormat
from amplab.scalers.published_rules import LossScaleAtMinimumError
from amplab.scalers.rules import ScaleRule, ScaleState, require_rule

__all__ = ["Replay", "ReplayStep", "Verdict", "exponents_around", "overflow_verdict", "replay"]

_NOT_FINITE = "the recorded gradients were inf or NaN, so their size is not in the record"
_CENSORED = "the largest recorded gradients are in the top bin, which also counts everything larger"
_NOT_MEASURED = "the gradients were finite under a smaller scale, but their size was not measured"
_NEAR = 32  # steps; measured steps further away than this are not used
_LEAST_SPREAD = 3  # binades by which gradients may differ from those of a step nearby
_WITHIN_BINADE = "this scale moves part of the binade of the largest recorded gradient past the format's largest value"


@dataclass(frozen=True)
class Verdict:
    """Whether a step overflows; ``doubt`` is the reason if the record does not decide it, else None."""

    found_inf: bool
    doubt: str | None = None


@dataclass(frozen=True)
class ReplayStep:
    """One replayed step.

    Attributes:
        step: from 0.
        scale: the factor of the loss at this step.
        found_inf: whether its gradients overflow under that scale.
        skipped: whether the optimizer step is skipped.
        doubt: the reason if the record does not decide ``found_inf``, else None.
    """

    step: int
    scale: float
    found_inf: bool
    skipped: bool
    doubt: str | None = None


@dataclass(frozen=True)
class Replay:
    """A run under another rule.

    Attributes:
        rule: the rule.
        steps: one `ReplayStep` for each recorded step, up to the one at which the rule ended the run.
        end: the state after the last step.
        stopped: the message of the rule that ended the run (DeepSpeed at its floor), else None.
    """

    rule: ScaleRule
    steps: tuple[ReplayStep, ...]
    end: ScaleState
    stopped: str | None = None

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale at every step."""
        return tuple(step.scale for step in self.steps)

    @property
    def skips(self) -> tuple[int, ...]:
        """The steps that are skipped."""
        return tuple(step.step for step in self.steps if step.skipped)

    @property
    def taken_overflows(self) -> tuple[int, ...]:
        """The steps that are taken although their gradients are not finite."""
        return tuple(step.step for step in self.steps if step.found_inf and not step.skipped)

    @property
    def lost_from(self) -> int | None:
        """The first of `taken_overflows`, which leaves inf or NaN in the weights; None without one."""
        return next(iter(self.taken_overflows), None)

    @property
    def doubtful(self) -> tuple[int, ...]:
        """The steps for which the record does not decide found_inf. From the first on, the scale is a guess."""
        return tuple(step.step for step in self.steps if step.doubt is not None)


def replay(
    rule: ScaleRule,
    found_infs: Iterable[bool] | None = None,
    *,
    gradient_exponents: Iterable[float | ExponentHistogram | None] | None = None,
    recorded_scales: Sequence[float] | None = None,
    fmt: FloatFormat = FLOAT16,
) -> Replay:
    """Run a rule over a recorded run.

    Args:
        rule: any rule.
        found_infs: found_inf of every step, used for every scale.
        gradient_exponents: instead, for every step: floor(log2) of the largest unscaled gradient (-inf if all are
            zero, inf or nan if one was not finite, None if all were finite and their size is unknown), or the
            `ExponentHistogram` of the unscaled gradients.
        recorded_scales: the scale of every recorded step. With it, an overflow recorded under a scale no larger than
            the replayed one is certain; without it, no recorded overflow is.
        fmt: the format in which gradients overflow.

    Returns:
        The replayed run. A finite step without an exponent is taken to be like the measured ones near it. A step that
        the record does not decide is replayed as it was recorded, finite or overflowing. With ``recorded_scales``, the
        gradients of a recorded overflow are assumed to be as large as those of the nearest measured step, and large
        enough to overflow under the recorded scale. Of gradients that are measured, every step overflows after an
        overflow that is taken: its weights are not finite.

    Raises:
        TypeError: ``rule`` is not a scaling rule.
        ValueError: both or neither of the two records, scales of another length, or an exponent that is not whole.

    Sync: none.

    >>> from amplab.scalers import DynamicScale
    >>> run = replay(DynamicScale(growth_interval=2), gradient_exponents=[0, 0, 0, -2, -2])
    >>> run.scales, run.skips
    ((65536.0, 32768.0, 32768.0, 65536.0, 65536.0), (0,))
    """
    if (found_infs is None) == (gradient_exponents is None):
        raise ValueError("replay: expected either found_infs or gradient_exponents; leave the other out.")
    record: list[float | ExponentHistogram | None] = []
    for recorded_steps in (found_infs, gradient_exponents):
        record.extend(() if recorded_steps is None else recorded_steps)
    if recorded_scales is not None and len(recorded_scales) != len(record):
        raise ValueError(
            f"recorded_scales: {len(recorded_scales)} for {len(record)} steps; expected one scale for each step."
        )
    require_rule(rule)
    around = exponents_around(record) if found_infs is None else {}
    state, steps, lost = rule.start(), [], False
    neighbors = [None] * len(record) if recorded_scales is None or found_infs is not None else _nearest_finite(record)
    for step, recorded in enumerate(record):
        recorded_scale = None if recorded_scales is None else recorded_scales[step]
        if found_infs is not None:
            verdict = Verdict(bool(recorded))
        elif lost:
            verdict = Verdict(True)
        else:
            verdict = overflow_verdict(
                recorded, state.scale, recorded_scale=recorded_scale, neighbor=neighbors[step], fmt=fmt
            )
            if verdict.doubt == _NOT_MEASURED and step in around:
                verdict = _verdict_between(*around[step], state.scale, fmt) or verdict
        skipped = verdict.found_inf and rule.skips_on_overflow
        lost |= verdict.found_inf and not skipped
        steps.append(ReplayStep(step, state.scale, verdict.found_inf, skipped, verdict.doubt))
        try:
            state = rule.next(state, verdict.found_inf)
        except LossScaleAtMinimumError as end:
            return Replay(rule, tuple(steps), state, stopped=str(end))
    return Replay(rule, tuple(steps), state)


def overflow_verdict(
    recorded: float | ExponentHistogram | None,
    scale: float,
    *,
    recorded_scale: float | None = None,
    neighbor: int | None = None,
    fmt: FloatFormat = FLOAT16,
) -> Verdict:
    """Decide whether recorded gradients overflow under a scale.

    ::

        2^e * scale >= limit                    overflows
        (2 - epsilon) * 2^e * scale < limit     does not       limit = what rounds to inf in the format

    for the largest exponent e. The gradients are numbers of the format, so the largest of a binade is
    (2 - epsilon) * 2^e, and a scale that is a power of two always gives a decision. A scale of 0 or inf makes every
    gradient overflow.

    Args:
        recorded: as one of `replay`'s ``gradient_exponents``.
        scale: the scale to decide for.
        recorded_scale: the scale under which it was recorded.
        neighbor: exponent of the largest gradient of a step nearby, assumed for gradients that were not finite.
        fmt: the format in which gradients overflow.

    Raises:
        ValueError: an exponent that is not whole.

    >>> overflow_verdict(0, 65536.0)
    Verdict(found_inf=True, doubt=None)
    >>> overflow_verdict(0, 40000.0).doubt
    "this scale moves part of the binade of the largest recorded gradient past the format's largest value"
    """
    if not 0.0 < scale < math.inf:
        return Verdict(True)
    if recorded is None:
        known = recorded_scale is not None and scale <= recorded_scale
        return Verdict(False, None if known else _NOT_MEASURED)
    largest, censored, finite = _largest_exponent(recorded)
    limit = fmt.max + fmt.ulp(fmt.max) / 2  # the smallest number that rounds to inf
    surely = largest is not None and scale >= math.ldexp(limit, -largest)
    if surely:
        return Verdict(True)
    if not finite:
        known = recorded_scale is not None and scale >= recorded_scale
        return Verdict(True) if known else Verdict(_guess(scale, recorded_scale, neighbor, limit), _NOT_FINITE)
    if largest is None:
        return Verdict(False)
    if censored:
        return Verdict(False, _CENSORED)
    inside = scale * (2.0 - fmt.epsilon) < math.ldexp(limit, -largest)
    return Verdict(False, None if inside else _WITHIN_BINADE)


def _verdict_between(lowest: int, highest: int, scale: float, fmt: FloatFormat) -> Verdict | None:
    """Return the verdict if all exponents from `lowest` to `highest` lead to the same one."""
    low, high = (overflow_verdict(exponent, scale, fmt=fmt) for exponent in (lowest, highest))
    return low if low == high and low.doubt is None else None


def exponents_around(record: Sequence[float | ExponentHistogram | None]) -> dict[int, tuple[int, int]]:
    """Return for each unmeasured step the exponents that the measured steps around it allow.

    Gradients change little from step to step: they are taken to be within `_LEAST_SPREAD` binades of those nearby, or
    within one binade more than any two neighboring measurements of this record differ.
    """
    known = [(step, exponent) for step, each in enumerate(record) if (exponent := _measured(each)) is not None]
    jumps = (abs(one - other) for (_, one), (_, other) in pairwise(known))
    spread = max(_LEAST_SPREAD, 1 + max(jumps, default=0))
    found: dict[int, tuple[int, int]] = {}
    ends = [(len(record) + _NEAR // 2, each) for _, each in known[-1:]]  # half as far on one side
    for (first, one), (last, other) in pairwise([*known, *ends]):
        if last - first <= _NEAR:
            allowed = min(one, other) - spread, max(one, other) + spread
            found |= {step: allowed for step in range(first + 1, min(last, len(record))) if record[step] is None}
    return found


def _guess(scale: float, recorded_scale: float | None, neighbor: int | None, limit: float) -> bool:
    """Return whether gradients that overflowed under the larger `recorded_scale` would overflow under `scale`."""
    if recorded_scale is None or neighbor is None:
        return True
    at_least = math.frexp(limit / recorded_scale)[1] - 1 if 0.0 < recorded_scale < math.inf else neighbor
    return scale >= math.ldexp(limit, -max(neighbor, at_least))


def _nearest_finite(record: Sequence[float | ExponentHistogram | None]) -> list[int | None]:
    """Return for each step the largest exponent of the last measured step before it, or of the first one after it."""
    measured = [_measured(recorded) for recorded in record]
    newest = next((exponent for exponent in measured if exponent is not None), None)
    return [newest := newest if exponent is None else exponent for exponent in measured]


def _measured(recorded: float | ExponentHistogram | None) -> int | None:
    if recorded is None:
        return None
    largest, _, finite = _largest_exponent(recorded)
    return largest if finite else None


def _largest_exponent(recorded: float | ExponentHistogram) -> tuple[int | None, bool, bool]:
    """Return the largest finite exponent or None, whether its bin includes larger ones, whether all were finite."""
    if isinstance(recorded, ExponentHistogram):
        largest = None if recorded.span is None else recorded.span[1]
        top = largest is not None and largest == recorded.low + len(recorded.counts) - 1
        return largest, top, recorded.infs + recorded.nans == 0
    if math.isfinite(recorded):
        if recorded != int(recorded):
            raise ValueError(
                f"gradient exponent {recorded}: expected a whole number, floor(log2) of the largest gradient."
            )
        return int(recorded), False, True
    return None, False, recorded == -math.inf
