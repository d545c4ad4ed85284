"""Lesson 06, dynamic loss scaling: a real run on record, its picture under any rule, the checks of the exercises.

    record = recorded_run()                              for each step floor(log2) of its largest gradient
    scale_over_run(record, DynamicScale(growth_interval=64))

The replay itself is `amplab.scalers`; what a run would have been is `amplab.diagnose.what_if`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from amplab.diagnose import ScaleHistory
from amplab.display.charts import line_chart
from amplab.display.html import page
from amplab.display.numbers import power
from amplab.formats.kept_property import kept_property
from amplab.lab import ExperimentConfig, Trainer
from amplab.lessons.exercises import exercise
from amplab.lessons.forms import shown
from amplab.scalers import DynamicScale, ScalePath, ScaleRule, ScaleState, overflow_limits, scale_path

__all__ = [
    "ScaleOverRun",
    "check_next",
    "check_rule_for_the_run",
    "check_skips_at_the_start",
    "recorded_run",
    "scale_over_run",
    "scales_after",
]

STEPS = 1200
_MOST_SKIPS = 10
_LEAST_MEDIAN = 2.0**17
_WINDOW, _FLOOR = 3, 1.0  # of the rule that exercise 3 asks for


@lru_cache(maxsize=1)
def recorded_run() -> ScaleHistory:
    """Train an MLP on the digits for 1,200 steps in float32, and record the size of the largest gradient of each step.

    In float32 the loss needs no scale, so that no step is skipped and every size is known. It is also the same on every
    CPU: float16 would round differently where the order of a sum differs.
    """
    config = ExperimentConfig(opt_level="O0", batch_size=16, lr=0.2, momentum=0.0)
    history = Trainer(config).run(STEPS)
    samples = [(sample.step, sample.histogram) for sample in history.gradient_samples]
    return ScaleHistory([1.0] * STEPS, [False] * STEPS, history.column("grad_exponent").tolist(), samples)


def scales_after(rule: ScaleRule, found_infs: Sequence[bool]) -> list[float]:
    """Return the loss scale at the start and after each step with this found_inf.

    >>> scales_after(DynamicScale(growth_interval=2), [True, False, False])
    [65536.0, 32768.0, 32768.0, 65536.0]
    """
    states = [rule.start()]
    for found_inf in found_infs:
        states.append(rule.next(states[-1], found_inf))
    return [state.scale for state in states]


@dataclass(frozen=True, repr=False)
class ScaleOverRun:
    """The loss scale of a recorded run under one rule.

    Attributes:
        path: its scale and its overflows at every step.
        limits: the least scale at which each step overflows.
    """

    path: ScalePath
    limits: np.ndarray

    @property
    def skips(self) -> int:
        """The number of skipped steps."""
        return int(self.path.found_infs.sum())

    @property
    def median_scale(self) -> float:
        """Half of the steps have at least this scale."""
        return float(np.sort(self.path.scales)[len(self.path.scales) // 2])

    @kept_property
    def sentence(self) -> str:
        """The two numbers that a rule is chosen by."""
        steps = len(self.path.scales)
        return f"{self.skips} of {steps:,} steps skipped; the loss scale is {power(self.median_scale)} in the median"

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _repr_html_(self) -> str:
        fits = np.exp2(np.ceil(np.log2(self.limits)) - 1)  # the largest power of two below the limit
        curves = {"largest scale that fits": fits.tolist(), "loss scale": self.path.scales.tolist()}
        chart = line_chart(curves, x_label="step", y_label="loss scale", log_y=True)
        return page(f"{self.sentence}.", chart.html())


def scale_over_run(record: ScaleHistory, rule: ScaleRule) -> ScaleOverRun:
    """Return the loss scale of a recorded run under another rule; takes about a millisecond."""
    limits = overflow_limits(np.array(record.grad_exponents, dtype=np.float64), np.array(record.scales), record.fmt)
    return ScaleOverRun(scale_path(rule, limits), limits)


@exercise("06-1")
def check_skips_at_the_start(answer: int) -> str | None:
    """Check the number of steps that are skipped from 2^32 on, if the largest gradient is 1.

    Form:
        count the steps.

    Right:
        At 2^16 the gradient is 65536 in half, which overflows; at 2^15 it is 32768, which fits.
    """
    if not 0 <= answer <= 64:
        return f"{answer} skips cannot be right: each one halves the scale, which starts at 2^32 and ends above 0."
    scale = 2.0 ** (32 - answer)
    if scale > 2.0**15:
        return f"after {answer} skips the scale is {power(scale)}, and 1 × {power(scale)} is above 65504."
    if scale < 2.0**15:
        return f"after {answer} skips the scale is {power(scale)}. Would {power(2 * scale)} have overflowed?"
    return None


@exercise("06-2")
def check_rule_for_the_run(answer: Any) -> str | None:
    """Check that a rule skips at most 10 steps of the recorded run, and has a median scale of 2^17 or more.

    Right:
        The window is long enough to skip little, and short enough to grow while the run lasts.
    """
    try:
        run = scale_over_run(recorded_run(), answer)
    except TypeError:
        return f"{shown(answer)} is not a rule: write DynamicScale(growth_interval=…) with a number."
    if run.path.lost_from is not None:
        return "this rule does not skip a step that overflows: its first overflow would destroy the weights."
    if run.skips > _MOST_SKIPS:
        return f"{run.skips} steps are skipped, and at most {_MOST_SKIPS} may be: try a longer window."
    if run.median_scale < _LEAST_MEDIAN:
        return f"the median scale is {power(run.median_scale)}, below {power(_LEAST_MEDIAN)}: try a shorter window."
    return None


@exercise("06-3")
def check_next(answer: Callable[[ScaleState, bool], Any]) -> str | None:
    """Check the transition of a rule with a window of 3 and a floor of 1, against `DynamicScale`.

    Form:
        run the cell that defines next_state(state, found_inf) first.

    Right:
        It gives the states of DynamicScale(growth_interval=3, floor=1.0) for every sequence of 8 steps from scale 4.
    """
    rule = DynamicScale(init_scale=4.0, growth_interval=_WINDOW, floor=_FLOOR)
    for found_infs in product((False, True), repeat=8):
        state = rule.start()
        for found_inf in found_infs:
            expected, found = rule.next(state, found_inf), answer(state, found_inf)
            if found is ... or (isinstance(found, ScaleState) and found == ScaleState(..., ...)):  # type: ignore[arg-type]
                return "the function still returns ...: write the next state in its place."
            if not isinstance(found, ScaleState):
                return f"it returned {shown(found)} for {state}: expected a ScaleState."
            if found != expected:
                return f"from {state}, with found_inf={found_inf}, it returned {found}; expected {expected}."
            state = expected
    return None
