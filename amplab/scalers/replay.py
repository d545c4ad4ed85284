"""Another rule on a recorded run: its scale at every step, and the steps that it would have skipped.

    replay(rule, found_infs)                        found_inf of every step as recorded
    replay(rule, gradient_exponents=exponents)      found_inf of every step under this rule's scale

Multiplied by the replayed scale a recorded gradient overflows, or does not, or the record does not contain enough
information to decide (`recorded_overflows.py`). Every undecided step gives its reason (``doubt``).

A rule that does not skip, such as a static scale, takes the step that overflows. The weights are then inf or NaN, and
so are all later gradients: the run is lost from there on (``lost_from``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from amplab.formats import FLOAT16, ExponentHistogram, FloatFormat
from amplab.scalers.recorded_overflows import REASONS, RecordedOverflows, recorded_overflows
from amplab.scalers.rules import ScaleRule, ScaleState
from amplab.scalers.scale_path import ScalePath, recorded_path, scale_path

__all__ = ["Replay", "ReplayStep", "first_doubt", "replay"]


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


@dataclass(frozen=True, eq=False)
class Replay:
    """A run under another rule, up to the step at which the rule ended it.

    Attributes:
        rule: the rule.
        path: the scale and found_inf of every step as arrays.
        reasons: uint8 ``(steps,)``: why the record does not decide found_inf, as positions in `REASONS`.
    """

    rule: ScaleRule
    path: ScalePath
    reasons: np.ndarray

    def __len__(self) -> int:
        """Return the number of replayed steps."""
        return len(self.path.scales)

    @property
    def steps(self) -> tuple[ReplayStep, ...]:
        """One `ReplayStep` for each recorded step; they are made anew at each use."""
        found_infs, doubts = self.path.found_infs.tolist(), [REASONS[reason] for reason in self.reasons.tolist()]
        columns = self.path.scales.tolist(), found_infs, (self.path.found_infs & self.path.skips).tolist(), doubts
        return tuple(ReplayStep(step, *values) for step, values in enumerate(zip(*columns, strict=True)))

    @property
    def end(self) -> ScaleState:
        """The state after the last step."""
        return self.path.end

    @property
    def stopped(self) -> str | None:
        """The message of the rule that ended the run (DeepSpeed at its floor), else None."""
        return self.path.stopped

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale at every step."""
        return tuple(self.path.scales.tolist())

    @property
    def skips(self) -> tuple[int, ...]:
        """The steps that are skipped."""
        return self._overflows if self.path.skips else ()

    @property
    def taken_overflows(self) -> tuple[int, ...]:
        """The steps that are taken although their gradients are not finite."""
        return () if self.path.skips else self._overflows

    @property
    def _overflows(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.path.found_infs).tolist())

    @property
    def lost_from(self) -> int | None:
        """The first of `taken_overflows`, which leaves inf or NaN in the weights; None without one."""
        return self.path.lost_from

    @property
    def doubtful(self) -> tuple[int, ...]:
        """The steps for which the record does not decide found_inf. From the first on, the scale is a guess."""
        return tuple(np.flatnonzero(self.reasons).tolist())


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
    if found_infs is not None:
        verdicts = np.fromiter(map(bool, found_infs), dtype=np.bool_)
        _require_length(recorded_scales, len(verdicts))
        path = recorded_path(rule, verdicts)
        return Replay(rule, path, np.zeros(len(path.scales), dtype=np.uint8))
    record = list(() if gradient_exponents is None else gradient_exponents)
    _require_length(recorded_scales, len(record))
    overflows = recorded_overflows(record, recorded_scales, fmt)
    path = scale_path(rule, overflows.limits)
    return Replay(rule, path, _reasons(path, overflows))


def first_doubt(path: ScalePath, overflows: RecordedOverflows) -> tuple[int, str] | None:
    """Return the first step of a path for which the record does not decide found_inf, and why; None without one.

    From that step on, the scale is a guess. Sync: none.

    >>> from amplab.scalers import DynamicScale, measured_overflows, scale_path
    >>> overflows = measured_overflows(np.array([0.0, np.inf]), np.full(2, 2.0**16))
    >>> first_doubt(scale_path(DynamicScale(), overflows.limits), overflows)
    (1, 'the recorded gradients were inf or NaN, so their size is not in the record')
    """
    reasons = _reasons(path, overflows)
    doubtful = np.flatnonzero(reasons)
    return (int(doubtful[0]), str(REASONS[reasons[doubtful[0]]])) if len(doubtful) else None


def _reasons(path: ScalePath, overflows: RecordedOverflows) -> np.ndarray:
    reasons = overflows.doubts(path.scales)
    if path.lost_from is not None:
        reasons[path.lost_from + 1 :] = 0  # the weights are not finite: what was recorded does not matter
    return reasons


def _require_length(recorded_scales: Sequence[float] | None, steps: int) -> None:
    if recorded_scales is not None and len(recorded_scales) != steps:
        raise ValueError(
            f"recorded_scales: {len(recorded_scales)} for {steps} steps; expected one scale for each step."
        )
