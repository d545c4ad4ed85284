"""An observation counts the skips of a run."""

import math

import pytest

from amplab.diagnose.observations import Observation, StepObservation


def run(skipped: str, losses=None):
    losses = losses or [1.0] * len(skipped)
    steps = (StepObservation(n, losses[n], 2.0**16, mark == "x") for n, mark in enumerate(skipped))
    return Observation(tuple(steps))


@pytest.mark.parametrize(
    ("skipped", "start", "end", "all_"), [("..x.", 0, 0, 1), ("xx.x", 2, 1, 3), ("xxx", 3, 3, 3), ("", 0, 0, 0)]
)
def test_skips_are_counted(skipped, start, end, all_):
    seen = run(skipped)
    assert (seen.skips_at_the_start, seen.skips_at_the_end, seen.skips) == (start, end, all_)


def test_losses_are_the_finite_ones():
    assert run("...", [1.0, math.nan, 3.0]).losses == (1.0, 3.0)


def test_one_more_step_is_another_value():
    before = run(".")
    after = before.then(StepObservation(1, 2.0, 1.0))
    assert (len(before), len(after), after[1].loss) == (1, 2, 2.0)
