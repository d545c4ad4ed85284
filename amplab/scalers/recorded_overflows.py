"""Under which loss scales the gradients of a recorded run overflow, and where the record does not decide it.

    scale >= limits[i]                                       step i overflows, as far as is known or assumed
    sure_to[i] < scale < sure_from[i]                        the record does not decide it, for the reason
      and  scale * (2 - epsilon) >= fits_below[i]            REASONS[reasons[i]]

An unscaled gradient of exponent e is in [2^e, 2^(e+1)). The gradients are numbers of the format, so the largest of a
binade is (2 - epsilon) * 2^e, and a scale that is a power of two always gives a decision. A step that was recorded with
inf or NaN does not show how large its gradients were: they are taken to be as large as those of a step nearby. A finite
step that was not measured is taken to be within some binades of the measured steps around it. A scale of 0 or inf makes
every gradient overflow.

All values are arrays over the steps of a run. A rule is followed over them in `scale_path.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amplab.formats import FLOAT16, ExponentHistogram, FloatFormat

__all__ = [
    "REASONS",
    "RecordedOverflows",
    "Verdict",
    "measured_overflows",
    "overflow_limits",
    "overflow_verdict",
    "recorded_overflows",
]

REASONS = (
    None,
    "the recorded gradients were inf or NaN, so their size is not in the record",
    "the largest recorded gradients are in the top bin, which also counts everything larger",
    "the gradients were finite under a smaller scale, but their size was not measured",
    "this scale moves part of the binade of the largest recorded gradient past the format's largest value",
)
"""Why a record does not decide whether a step overflows; None: it does."""

_DECIDED, _NOT_FINITE, _CENSORED, _NOT_MEASURED, _WITHIN_BINADE = range(len(REASONS))
_NEAR = 32  # steps; measured steps further away than this are not used
_FARTHEST = 9999  # exponents of which every limit is inf or 0 anyway
_LEAST_SPREAD = 3  # binades by which gradients may differ from those of a step nearby


@dataclass(frozen=True)
class Verdict:
    """Whether a step overflows; ``doubt`` is the reason if the record does not decide it, else None."""

    found_inf: bool
    doubt: str | None = None


@dataclass(frozen=True, eq=False)
class RecordedOverflows:
    """Which scales overflow at each step of a recorded run; see the equations of this module.

    Attributes:
        limits, sure_to, sure_from, fits_below: float64 ``(steps,)``.
        reasons: uint8 ``(steps,)``, positions in `REASONS`.
        fmt: the format in which gradients overflow.
    """

    limits: np.ndarray
    sure_to: np.ndarray
    sure_from: np.ndarray
    fits_below: np.ndarray
    reasons: np.ndarray
    fmt: FloatFormat

    def doubts(self, scales: np.ndarray) -> np.ndarray:
        """Return why the first steps are not decided under these scales: uint8, positions in `REASONS`."""
        first = slice(len(scales))
        with np.errstate(over="ignore", invalid="ignore"):
            undecided = scales * (2.0 - self.fmt.epsilon) >= self.fits_below[first]
        undecided &= (self.sure_to[first] < scales) & (scales < self.sure_from[first])
        undecided &= (scales > 0.0) & np.isfinite(scales)
        return np.where(undecided, self.reasons[first], np.uint8(_DECIDED))


@dataclass(frozen=True, eq=False)
class _Sizes:
    """What was recorded of the largest gradient of each step.

    Attributes:
        exponents: float64: floor(log2) of the largest finite gradient, -inf if there is none.
        reasons: uint8: what the exponent leaves open; `_WITHIN_BINADE` if it is measured.
    """

    exponents: np.ndarray
    reasons: np.ndarray

    @property
    def measured(self) -> np.ndarray:
        """The steps with the exponent of a gradient, all of whose gradients were finite."""
        known = (self.reasons == _WITHIN_BINADE) | (self.reasons == _CENSORED)
        return np.flatnonzero(known & np.isfinite(self.exponents))


def recorded_overflows(
    record: Sequence[float | ExponentHistogram | None],
    recorded_scales: Sequence[float] | np.ndarray | None = None,
    fmt: FloatFormat = FLOAT16,
) -> RecordedOverflows:
    """Return which scales overflow at each step.

    Args:
        record: for every step: floor(log2) of the largest unscaled gradient (-inf if all are zero, inf or nan if one
            was not finite, None if all were finite and their size is unknown), or the `ExponentHistogram` of the
            unscaled gradients.
        recorded_scales: the scale of every recorded step. With it, an overflow recorded under a scale no larger than
            the one to decide for is certain, and a finite step under one no smaller; without it, none is.
        fmt: the format in which gradients overflow.

    Raises:
        ValueError: an exponent that is not whole.

    Sync: none.
    """
    sizes = _sizes(record)
    scales = None if recorded_scales is None else np.asarray(recorded_scales, dtype=np.float64)
    return _overflows(sizes, scales, fmt, None if scales is None else _nearby(sizes))


def measured_overflows(
    exponents: np.ndarray, recorded_scales: np.ndarray, fmt: FloatFormat = FLOAT16
) -> RecordedOverflows:
    """Return which scales overflow at each step of a record without histograms; see `overflow_limits`. Sync: none."""
    sizes = _sizes_of(exponents, np.isnan(exponents))
    return _overflows(sizes, recorded_scales, fmt, _nearby(sizes))


def overflow_limits(exponents: np.ndarray, recorded_scales: np.ndarray, fmt: FloatFormat = FLOAT16) -> np.ndarray:
    """Return for each recorded step the least scale under which its gradients overflow.

    Args:
        exponents: float64 ``(steps,)``: floor(log2) of the largest unscaled gradient; -inf if all are zero, inf if one
            was not finite, NaN if all were finite and their size is unknown.
        recorded_scales: float64 ``(steps,)``: the scale of each recorded step.
        fmt: the format in which gradients overflow.

    Returns:
        float64 ``(steps,)``, inf for a step that never overflows.

    Sync: none.

    >>> overflow_limits(np.array([0.0, -3.0, -np.inf]), np.full(3, 1024.0))
    array([ 65520., 524160.,     inf])
    """
    return measured_overflows(exponents, recorded_scales, fmt).limits


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

    for the largest exponent e.

    Args:
        recorded: as one of `recorded_overflows`.
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
    scales = None if recorded_scale is None else np.array([recorded_scale])
    nearby = None if neighbor is None else _sizes([neighbor]).exponents
    overflows = _overflows(_sizes([recorded]), scales, fmt, nearby)
    (reason,) = overflows.doubts(np.array([scale])).tolist()
    found_inf = bool(scale >= overflows.limits[0]) if 0.0 < scale < math.inf else True
    return Verdict(found_inf, REASONS[reason])


def _sizes(record: Sequence[float | ExponentHistogram | None]) -> _Sizes:
    """Read the records of the steps."""
    unmeasured = np.fromiter((each is None for each in record), dtype=np.bool_, count=len(record))
    histograms = {step: each for step, each in enumerate(record) if isinstance(each, ExponentHistogram)}
    numbers: list[object] = list(record)
    for step in histograms:
        numbers[step] = -math.inf
    exponents = np.array(numbers, dtype=np.float64)
    broken = np.flatnonzero(np.isfinite(exponents) & (exponents != np.trunc(exponents)))
    if len(broken):
        raise ValueError(
            f"gradient exponent {numbers[broken[0]]}: expected a whole number, floor(log2) of the largest gradient."
        )
    sizes = _sizes_of(exponents, unmeasured)
    for step, histogram in histograms.items():
        sizes.exponents[step], sizes.reasons[step] = _size_of(histogram)
    return sizes


def _sizes_of(exponents: np.ndarray, unmeasured: np.ndarray) -> _Sizes:
    """Return the sizes of exponents, of which inf and NaN stand for gradients that were not finite."""
    reasons = np.full(len(exponents), _WITHIN_BINADE, dtype=np.uint8)
    unknown = ~(exponents < math.inf)
    reasons[unknown] = _NOT_FINITE
    reasons[unmeasured] = _NOT_MEASURED
    whole = np.where(np.isfinite(exponents), np.clip(exponents, -_FARTHEST, _FARTHEST), -math.inf)
    return _Sizes(whole, reasons)


def _size_of(histogram: ExponentHistogram) -> tuple[float, int]:
    """Return the largest finite exponent of a histogram, and what it leaves open."""
    largest = -math.inf if histogram.span is None else float(histogram.span[1])
    if histogram.infs + histogram.nans:
        return largest, _NOT_FINITE
    return largest, _CENSORED if largest == histogram.low + len(histogram.counts) - 1 else _WITHIN_BINADE


def _overflows(
    sizes: _Sizes, recorded_scales: np.ndarray | None, fmt: FloatFormat, nearby: np.ndarray | None
) -> RecordedOverflows:
    """Return which scales overflow; `nearby` holds for each step the exponent that is taken if it was not finite."""
    surely = _limit_of(sizes.exponents, fmt)
    limits, sure_from, fits_below = surely.copy(), surely.copy(), surely.copy()
    sure_to = np.full(len(surely), -math.inf)
    fits_below[sizes.reasons != _WITHIN_BINADE] = 0.0

    broken = np.flatnonzero(sizes.reasons == _NOT_FINITE)
    guessed = np.zeros(len(broken))
    if recorded_scales is not None:
        sure_from[broken] = np.fmin(surely[broken], recorded_scales[broken])
        if nearby is not None:
            guessed = _guessed_limits(nearby[broken], recorded_scales[broken], fmt)
    limits[broken] = np.minimum(sure_from[broken], guessed)

    unmeasured = np.flatnonzero(sizes.reasons == _NOT_MEASURED)
    if recorded_scales is not None:
        sure_to[unmeasured] = np.fmax(recorded_scales[unmeasured], -math.inf)
    steps, lowest, highest = _around(sizes, unmeasured)
    sure_from[steps], fits_below[steps] = _limit_of(lowest, fmt), _limit_of(highest, fmt)
    # It was finite under the recorded scale, and so is it under a smaller one.
    limits[steps] = np.maximum(sure_from[steps], np.nextafter(sure_to[steps], math.inf))
    return RecordedOverflows(limits, sure_to, sure_from, fits_below, sizes.reasons, fmt)


def _limit_of(exponents: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Return the least scale under which a gradient of 2^exponent rounds to inf; inf for -inf, no gradient."""
    limits = np.full(len(exponents), math.inf)
    finite = np.isfinite(exponents)
    powers = -exponents[finite].astype(np.int32)
    with np.errstate(over="ignore", under="ignore"):
        limits[finite] = np.ldexp(_smallest_inf(fmt), powers)
    return limits


def _smallest_inf(fmt: FloatFormat) -> float:
    """Return the smallest number that rounds to inf in the format."""
    return fmt.max + fmt.ulp(fmt.max) / 2


def _nearby(sizes: _Sizes) -> np.ndarray | None:
    """Return for each step the exponent of the last measured step up to it, or of the first one after it."""
    measured = sizes.measured
    if not len(measured):
        return None
    last = np.searchsorted(measured, np.arange(len(sizes.exponents)), side="right") - 1
    nearby: np.ndarray = sizes.exponents[measured[np.maximum(last, 0)]]
    return nearby


def _guessed_limits(nearby: np.ndarray, recorded_scales: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Return the limits of gradients as large as those nearby, and large enough to overflow as recorded."""
    usable = (recorded_scales > 0.0) & np.isfinite(recorded_scales)
    with np.errstate(over="ignore"):
        at_least = np.frexp(_smallest_inf(fmt) / np.where(usable, recorded_scales, 1.0))[1] - 1
    return _limit_of(np.where(usable, np.maximum(nearby, at_least), nearby), fmt)


def _around(sizes: _Sizes, unmeasured: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unmeasured steps with measured ones around them, and the lowest and the highest exponents they may have.

    Gradients change little from step to step: they are taken to be within `_LEAST_SPREAD` binades of those nearby, or
    within one binade more than any two neighboring measurements of this record differ.
    """
    measured = sizes.measured
    known = sizes.exponents[measured]
    if not len(known) or not len(unmeasured):
        return unmeasured[:0], known[:0], known[:0]
    spread = max(_LEAST_SPREAD, 1.0 + np.abs(np.diff(known)).max(initial=0.0))
    measured = np.append(measured, len(sizes.exponents) + _NEAR // 2)  # after the last one, half as far
    known = np.append(known, known[-1])
    before = np.searchsorted(measured, unmeasured) - 1
    steps, before = unmeasured[before >= 0], before[before >= 0]
    near = measured[before + 1] - measured[before] <= _NEAR
    steps, one, other = steps[near], known[before[near]], known[before[near] + 1]
    return steps, np.minimum(one, other) - spread, np.maximum(one, other) + spread
