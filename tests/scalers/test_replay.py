"""Replaying a rule on a record: verdicts as they were, or decided anew under the replayed scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.formats import BFLOAT16, FLOAT16, ExponentHistogram, exponent_histogram
from amplab.scalers import (
    PUBLISHED_RULES,
    DeepSpeedScale,
    DynamicScale,
    ScaleState,
    StaticScale,
    overflow_verdict,
    replay,
)


@given(st.lists(st.booleans(), max_size=50), st.sampled_from([DynamicScale(growth_interval=3), StaticScale(8.0)]))
def test_verdicts_as_recorded_walk_the_rule(found_infs, rule):
    run, state = replay(rule, found_infs), rule.start()
    for step, found_inf in zip(run.steps, found_infs, strict=True):
        assert (step.scale, step.found_inf, step.doubt) == (state.scale, found_inf, None)
        assert step.skipped == (found_inf and rule.skips_on_overflow)
        state = rule.next(state, found_inf)
    assert run.end == state
    assert run.stopped is None
    assert run.scales == tuple(step.scale for step in run.steps)


def test_every_published_rule_on_one_sequence():
    sequence = [True, True, False, True]
    expected = {
        "torch": (2.0**16, 2.0**15, 2.0**14, 2.0**14),
        "apex": (2.0**16, 2.0**15, 2.0**14, 2.0**14),
        "Ascend": (2.0**16, 2.0**15, 2.0**14, 2.0**14),
        "jmp": (2.0**15, 2.0**14, 2.0**13, 2.0**13),
        "Keras": (2.0**15, 2.0**14, 2.0**13, 2.0**13),
        "DeepSpeed": (2.0**16, 2.0**16, 2.0**15, 2.0**15),
        "Megatron": (2.0**32, 2.0**32, 2.0**31, 2.0**31),
    }
    assert {name: replay(rule, sequence).scales for name, rule in PUBLISHED_RULES.items()} == expected
    assert all(replay(rule, sequence).skips == (0, 1, 3) for rule in PUBLISHED_RULES.values())


def test_a_rule_that_ends_the_run_ends_the_replay():
    run = replay(DeepSpeedScale(init_scale=2.0, hysteresis=1), [True, True, False])
    assert run.scales == (2.0, 1.0)
    assert run.stopped.startswith("Current loss scale already at minimum")
    assert run.end.scale == 1.0


@given(
    st.floats(-65504, 65504, width=16).filter(bool),
    st.integers(-24, 40).map(lambda exponent: 2.0**exponent) | st.floats(1e-6, 1e12),
)
def test_decides_as_float16_does(largest, scale):
    """Scale a gradient that is a float16 and round it to float16: the record must agree, or say it cannot tell."""
    overflows = bool(torch.tensor(largest * scale, dtype=torch.float64).half().isinf())
    exponent = math.frexp(abs(largest))[1] - 1
    histogram = exponent_histogram(torch.tensor([largest, 0.0], dtype=torch.float16))
    for recorded in (exponent, histogram):
        verdict = overflow_verdict(recorded, scale)
        assert verdict.doubt is not None or verdict.found_inf == overflows
        if math.frexp(scale)[0] == 0.5:
            assert verdict.doubt is None


def test_overflow_is_decided_under_the_replayed_scale():
    run = replay(DynamicScale(growth_interval=2), gradient_exponents=[3, 3, 3, 3, 3, 3, 3])
    assert run.scales == (2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12, 2.0**13)
    assert run.skips == (0, 1, 2, 3, 6)
    assert run.doubtful == ()
    wider = replay(DynamicScale(growth_interval=2), gradient_exponents=[3, 3], fmt=BFLOAT16)
    assert wider.skips == ()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_recorded_overflow_is_known_only_under_a_scale_as_large(bad):
    histogram = exponent_histogram(torch.tensor([bad, 2.0**-20]))
    for recorded in (bad, histogram):
        assert overflow_verdict(recorded, 8.0).doubt.startswith("the recorded gradients were inf or NaN")
        assert overflow_verdict(recorded, 8.0).found_inf
        assert overflow_verdict(recorded, 8.0, recorded_scale=16.0).doubt is not None
        assert overflow_verdict(recorded, 8.0, recorded_scale=8.0).doubt is None
        assert overflow_verdict(recorded, 16.0, recorded_scale=8.0).doubt is None
    run = replay(DynamicScale(), gradient_exponents=[bad, bad], recorded_scales=[2.0**16, 2.0**16])
    assert (run.skips, run.doubtful) == ((0, 1), (1,))


def test_an_overflow_is_guessed_from_the_steps_beside_it():
    """Recorded at 2^24, where gradients of 2^-3 overflow; whether 2^16 would have, only the neighbors suggest."""
    exponents = [math.inf, math.inf, -3, -3, math.inf, -3]
    run = replay(DynamicScale(), gradient_exponents=exponents, recorded_scales=[2.0**24, 2.0**23] + [2.0**18] * 4)
    assert (run.skips, run.doubtful) == ((), (0, 1, 4))
    high = replay(DynamicScale(init_scale=2.0**20), gradient_exponents=exponents, recorded_scales=[2.0**24] * 6)
    assert high.skips == (0, 1)  # 2^20, 2^19 overflow with 2^-3; 2^18 does not
    loud = replay(DynamicScale(init_scale=2.0**9), gradient_exponents=[math.inf, -3], recorded_scales=[2.0**8, 2.0**8])
    assert (loud.skips, loud.doubtful) == ((0,), ())  # it overflowed under a smaller scale


def test_a_finite_step_that_was_not_measured_is_known_up_to_its_scale():
    run = replay(DynamicScale(init_scale=8.0), gradient_exponents=[None, None], recorded_scales=[8.0, 4.0])
    assert (run.skips, run.doubtful) == ((), (1,))
    assert run.steps[1].doubt.endswith("size was not measured")


def test_what_is_finite_beside_an_inf_may_decide():
    histogram = exponent_histogram(torch.tensor([math.inf, 4.0]))
    assert overflow_verdict(histogram, 2.0**16).doubt is None
    assert overflow_verdict(histogram, 2.0**10).doubt is not None


def test_a_histogram_censored_at_its_top_cannot_tell():
    def histogram(*counts):
        counts = np.array(counts)
        return ExponentHistogram(counts, 0, 0, 0, 0, int(counts.sum()))

    assert overflow_verdict(histogram(5, 0, 1), 8.0).doubt.startswith("the largest recorded gradients are in the top")
    assert overflow_verdict(histogram(5, 0, 1), 2.0**14) == overflow_verdict(2, 2.0**14)  # it overflows all the same
    assert overflow_verdict(histogram(5, 1, 0), 8.0).doubt is None


def test_nothing_but_zeros_never_overflows_and_a_lost_scale_always_does():
    zeros = exponent_histogram(torch.zeros(3))
    for recorded in (-math.inf, zeros):
        assert overflow_verdict(recorded, 1e30) == overflow_verdict(-100, 1.0)
        assert overflow_verdict(recorded, 0.0).found_inf
        assert overflow_verdict(recorded, math.inf).found_inf


def test_the_exact_border_in_every_binade():
    for exponent in range(-14, 16):
        border = 65520 / 2.0**exponent
        assert overflow_verdict(exponent, border).found_inf
        assert overflow_verdict(exponent, border).doubt is None
        assert overflow_verdict(exponent, math.nextafter(border, 0)).doubt is not None
        assert overflow_verdict(exponent, border / (2 - FLOAT16.epsilon)).doubt is not None
        assert overflow_verdict(exponent, math.nextafter(border / (2 - FLOAT16.epsilon), 0)).doubt is None


def test_replays_of_users_rules():
    class Fixed:
        skips_on_overflow = True

        def start(self):
            return ScaleState(4.0)

        def next(self, state, found_inf):
            return state

    assert replay(Fixed(), [False, True]).skips == (1,)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="found_infs or gradient_exponents"):
        replay(DynamicScale())
    with pytest.raises(ValueError, match="found_infs or gradient_exponents"):
        replay(DynamicScale(), [True], gradient_exponents=[1])
    with pytest.raises(ValueError, match="recorded_scales: 2 for 1 steps"):
        replay(DynamicScale(), gradient_exponents=[1], recorded_scales=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"gradient exponent 1\.5"):
        replay(DynamicScale(), gradient_exponents=[1.5])


@pytest.mark.parametrize(
    ("exponents", "scale", "doubtful"),
    [
        ([-4.0, *[None] * 15, -4.0], 2.0**10, 0),  # ten binades below the limit
        ([-4.0, *[None] * 15, -4.0], 2.0**18, 15),  # the gradients between may reach it
        ([-4.0, *[None] * 15, -4.0], 2.0**30, 0),  # all overflow
        ([-4.0, *[None] * 15, -12.0, *[None] * 15, -4.0], 2.0**14, 30),  # they jump by eight
        ([-4.0, *[None] * 40, -4.0], 2.0**10, 40),  # nothing is known between
        ([-4.0, *[None] * 15], 2.0**10, 0),  # up to the end of the record
    ],
)
def test_unmeasured_steps_are_judged_by_those_around_them(exponents, scale, doubtful):
    run = replay(StaticScale(scale), gradient_exponents=exponents, recorded_scales=[1.0] * len(exponents))
    assert len(run.doubtful) == doubtful
