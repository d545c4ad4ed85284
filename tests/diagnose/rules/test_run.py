"""Rules about runs, each on a run that has it and on the nearest one that has not."""

import math
from dataclasses import replace

import pytest

from amplab.diagnose.observations import Observation, StepObservation
from amplab.diagnose.rules.run import run_findings


def run_of(losses, skipped="", scales=None, *, window=2000, **fields):
    """A run step by step; `scales` are those of the steps, with the one after the last at the end."""
    skipped = skipped or "." * len(losses)
    scales = scales or [65536.0] * (len(losses) + 1)
    steps = []
    for number, (loss, mark) in enumerate(zip(losses, skipped, strict=True)):
        own = {name: values[number] for name, values in fields.items()}
        steps.append(StepObservation(number, loss, scales[number], mark == "x", scales[number + 1], **own))
    return Observation(tuple(steps), growth_interval=window)


def names(run):
    return [finding.name for finding in run_findings(run)]


def test_a_run_that_learns_has_nothing():
    assert names(run_of([2.3, 2.0, 1.7, 1.2, 0.9, 0.8, 0.7])) == []
    assert names(Observation()) == []


@pytest.mark.parametrize(
    "losses",
    [
        [1, 2, 4, 8, 16, 32, 64, 128],
        [1.0, 40.0, 3e4, 2e7],
        [2.3, 1.0, 0.3, 0.1, 0.05, 0.05, 1.0, 3.0, 9.0, 9.0],
        [1.0, 50.0, 3e5, math.inf, math.nan],
    ],
)
def test_a_loss_that_grows_diverges(losses):
    (found,) = (
        each for each in run_findings(run_of(losses, learning_rate=[0.5] * len(losses))) if each.name == "diverging"
    )
    assert found.evidence["best_loss"] == min(loss for loss in losses if math.isfinite(loss))


@pytest.mark.parametrize(
    "losses",
    [
        [0.02, 0.08, 0.03, 0.09, 0.05, 0.06, 0.04, 0.08],  # batches differ
        [1.0, 3.0, 5.0],  # too few to say
        [2.3, 0.1, 0.01, 0.01, 0.012, 0.3, 0.01, 0.012, 0.01],  # one bad batch
        [-1.0, -5.0, -300.0, -900.0],  # a loss that is not positive has no such measure
    ],
)
def test_noise_does_not(losses):
    assert names(run_of(losses)) == []


@pytest.mark.parametrize(
    ("losses", "mark", "lost"),
    [
        ([2.0] + [math.nan] * 6, ".xxxxxx", True),
        ([2.0, 2.0, 31.0] + [math.inf] * 3, "x..xxx", True),
        ([2.0] + [math.nan] * 2, ".xx", False),  # too few to say
        ([2.0] * 4 + [math.nan] * 6, "....xxxxxx", False),  # it had learned for a while
        ([2.0, math.nan, math.nan, math.nan, 1.9], ".xxx.", False),  # bad batches
        ([2.0] + [math.nan] * 4, "xxxxx", False),  # no step was taken
        ([2.0] + [math.nan] * 4, "..xxx", False),  # one was with a loss of NaN, which is in the weights
    ],
)
def test_a_loss_that_the_first_steps_lose_for_good_diverges(losses, mark, lost):
    run = run_of(losses, mark, learning_rate=[1e3] * len(losses))
    found = [each for each in run_findings(run) if each.name == "diverging"]
    assert len(found) == lost
    if found:
        assert found[0].evidence["learning_rate"] == 1e3
        assert "group['lr'] = 1e+02" in found[0].remedy


def test_without_a_step_taken_a_loss_does_not_diverge():
    assert "diverging" not in names(run_of([1.0, 200.0, 4e4], "xxx", [8.0, 4.0, 2.0, 1.0]))


def test_a_continuing_row_of_skips_is_reported_until_it_is_a_collapse():
    scales = [2.0 ** (40 - n) for n in range(21)]
    (found,) = (each for each in run_findings(run_of([1.0] * 6, ".xxxxx", scales)) if each.name == "still-skipping")
    assert (found.severity, found.evidence["skips"], found.evidence["first_scale"]) == ("note", 5, 2.0**39)
    (one,) = (each for each in run_findings(run_of([1.0] * 2, ".x", scales)) if each.name == "still-skipping")
    assert one.symptom.startswith("The last step was skipped, with a finite loss")
    for losses, mark in ([1.0] * 6, "xxxxx."), ([math.nan] * 5, "xxxxx"), ([1.0] * 20, "x" * 20):
        assert "still-skipping" not in names(run_of(losses, mark, scales))


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_scale_that_collapses(loss):
    scales = [2.0 ** (40 - n) for n in range(21)]
    (found,) = (each for each in run_findings(run_of([loss] * 20, "x" * 20, scales)) if each.name == "scale-collapse")
    assert found.evidence["skips"] == 20
    assert ("before it is scaled" in found.cause) == math.isnan(loss)
    assert "scale-collapse" not in names(run_of([loss] * 19, "x" * 19, scales[:20]))


def test_a_scale_that_cannot_fall_is_not_said_to_fall():
    scales = [2.0**24, 2.0**23, *[2.0**22] * 19]
    (found,) = (each for each in run_findings(run_of([1.0] * 20, "x" * 20, scales)) if each.name == "scale-collapse")
    assert found.symptom == "The last 20 steps were all skipped; the loss scale stays at 2^22."
    assert "at its floor" in found.cause


def test_skips_at_a_scale_of_one_are_a_collapse_at_once():
    assert "scale-collapse" in names(run_of([1.0, 1.0], ".x", [1.0, 1.0, 0.5]))


def test_a_loss_that_is_not_finite():
    taken, skipped = run_of([1.0, math.nan]), run_of([1.0, math.nan], ".x", [8.0, 8.0, 4.0])
    assert [(each.name, each.severity) for each in run_findings(taken)] == [("nonfinite-loss", "error")]
    assert [(each.name, each.severity) for each in run_findings(skipped)] == [("nonfinite-loss", "warning")]


def test_a_missing_loss_is_not_a_non_finite_loss():
    assert names(run_of([None] * 6)) == ["loss-missing"]
    assert names(run_of([None, 0.5, 0.5, 0.4, 0.4])) == []
    assert names(run_of([None, math.nan])) == ["nonfinite-loss"]
    assert names(run_of([None] * 20, "x" * 20, [2.0 ** (40 - n) for n in range(21)])) == [
        "scale-collapse",
        "loss-missing",
    ]
    found = run_findings(run_of([None] * 6, ".xxxxx"))[-1]
    assert (found.name, "finite" in found.symptom) == ("still-skipping", False)


@pytest.mark.parametrize("after", [0.6, math.nan])
def test_a_step_taken_by_a_scaler_has_finite_gradients_whatever_its_loss(after):
    run = replace(run_of([0.7, 0.6, math.nan, after]), scaling="amplab")
    (found,) = run_findings(run)
    assert (found.name, found.severity) == ("nonfinite-loss", "error" if math.isnan(after) else "warning")
    assert "nothing keeps" not in found.symptom


def test_a_static_scale_lets_what_overflows_into_the_weights():
    static = replace(run_of([2.3, math.nan, math.nan], scales=[2.0**23] * 4), dynamic=False, scaling="apex", level="O2")
    (found,) = run_findings(static)
    assert "2^23" in found.cause
    assert 'opt_level="O2", loss_scale="dynamic"' in found.remedy
    for other in (
        replace(static, steps=static.steps[1:]),  # not finite from the first step on: it came before the scale
        replace(run_of([2.3, math.nan], scales=[1.0] * 3), dynamic=False, scaling="none"),
    ):
        (found,) = run_findings(other)
        assert "before it is scaled" in found.cause


def test_a_loss_that_diverges_out_of_its_format_is_not_called_finite():
    run = run_of([0.5, 40.0, 3e9, math.inf, math.nan, math.nan], learning_rate=[30.0] * 6)
    found = next(each for each in run_findings(replace(run, scaling="none", dynamic=False)) if each.name == "diverging")
    assert "in 3 steps that were taken, and is not finite in 3, first in step 3" in found.symptom
    assert "amp." not in found.remedy
    assert "model.parameters()" in found.remedy
    assert "always finite" in run_findings(run_of([0.5, 40.0, 3e9, 1e11]))[0].symptom


def sawtooth(window, times):
    """What a scale does that bears 2^10: grow after `window` clean steps, overflow, back off."""
    marks, scales = "", [1024.0]
    for _ in range(times):
        marks += "." * window + "x"
        scales += [1024.0] * (window - 1) + [2048.0, 1024.0]
    return run_of([1.0] * len(marks), marks, scales, window=window)


@pytest.mark.parametrize(("window", "short"), [(3, True), (20, True), (60, False)])
def test_a_window_is_short_where_it_costs_more_than_one_step_in_fifty(window, short):
    assert ("window-too-short" in names(sawtooth(window, 4))) == short


def test_skips_without_growth_are_not_the_windows_fault():
    scales = [2.0 ** (16 - n) for n in range(11)]
    run = run_of([1.0] * 10, ".xxxxxxxxx", [scales[0], *scales[:10]], window=3)
    assert "window-too-short" not in names(run)


@pytest.mark.parametrize(("lost", "long"), [(0.5, True), (0.05, False), (None, False)])
def test_a_window_is_long_where_gradients_are_lost_meanwhile(lost, long):
    scales = [65536.0] * 3 + [8.0] * 6
    run = run_of([1.0] * 8, "..x.....", scales, underflow=[None] * 7 + [lost])
    assert ("window-too-long" in names(run)) == long


def test_a_start_from_far_above_is_a_note():
    scales = [2.0 ** (24 - n) for n in range(7)] + [2.0**18] * 2
    (found,) = run_findings(run_of([1.0] * 8, "xxxxxx..", scales))
    assert (found.name, found.severity, found.evidence["first_scale_without_overflow"]) == (
        "slow-start",
        "note",
        2.0**18,
    )
    assert names(run_of([1.0] * 8, "xx......", scales)) == []


@pytest.mark.parametrize(
    ("rates", "mark", "found"), [((0.1, 0.2), "x", True), ((0.1, 0.1), "x", False), ((0.1, 0.2), ".", False)]
)
def test_a_scheduler_that_counts_a_skipped_first_step(rates, mark, found):
    run = run_of([1.0, 1.0], f"{mark}.", [8.0, 4.0, 4.0], learning_rate=rates)
    assert ("scheduler-counts-skips" in names(run)) == found


@pytest.mark.parametrize(("skips", "severity"), [(1, "note"), (4, "note"), (5, "warning"), (8, "warning")])
def test_a_schedule_that_loses_one_value_is_a_note_and_its_warm_up_a_warning(skips, severity):
    rates = [0.1 * (n + 1) for n in range(skips + 2)]
    run = run_of([1.0] * len(rates), "x" * skips + "..", learning_rate=rates)
    (found,) = (each for each in run_findings(run) if each.name == "scheduler-counts-skips")
    assert (found.severity, found.evidence["rate_after"]) == (severity, rates[skips])


def test_gradients_of_different_scales_in_one_step():
    assert names(run_of([1.0], backward_scales=[(8.0, 4.0)])) == ["accumulation-across-scales"]
    assert names(run_of([1.0], backward_scales=[(8.0, 8.0)])) == []
