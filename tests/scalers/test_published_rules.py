"""The published rules against a transcription of their sources, over random sequences of overflows."""

import math
import re
from dataclasses import FrozenInstanceError, asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    AscendScale,
    DeepSpeedScale,
    DynamicScale,
    HysteresisState,
    JmpScale,
    KerasScale,
    LossScaleAtMinimumError,
    MegatronScale,
    RecurrentRule,
    ScaleState,
    StaticScale,
)

overflows = st.lists(st.booleans(), max_size=80) | st.lists(st.sampled_from([False] * 6 + [True]), max_size=80)
intervals = st.integers(1, 6)
factors = st.floats(1.0625, 16.0)
backoffs = st.floats(0.0625, 0.9375)
floors = st.sampled_from([None, 1.0, 0.1, 1000.1, 2.0**30])


def scales(rule, found_infs):
    """The scale at every step, and after the last."""
    state, seen = rule.start(), [rule.start().scale]
    for found_inf in found_infs:
        state = rule.next(state, found_inf)
        seen.append(state.scale)
    return seen


def table_apex(found_infs, s, window, growth, backoff, floor, ceiling):
    """apex and Ascend's apex: Python floats."""
    s, t = min(ceiling, s), 0
    yield s
    for found_inf in found_infs:
        if found_inf:
            s, t = s * backoff, 0
            s = max(floor, s) if floor else s
        else:
            t += 1
            if t == window:
                s, t = min(ceiling, s * growth), 0
        yield s


def table_jmp(found_infs, s, period, factor, floor):
    """jmp: float32 arrays."""
    s, t, factor, floor = np.float32(s), 0, np.float32(factor), np.float32(floor)
    yield float(s)
    for found_inf in found_infs:
        with np.errstate(over="ignore"):
            grown = s * factor
        if found_inf:
            s = np.maximum(floor, s / factor)
        elif t == period - 1 and np.isfinite(grown):
            s = grown
        t = 0 if found_inf else (t + 1) % period
        yield float(s)


def table_keras(found_infs, s, steps):
    """Keras: a float32 variable, no look at what grew."""
    s, t = np.float32(s), 0
    yield float(s)
    for found_inf in found_infs:
        if found_inf:
            s, t = s * np.float32(0.5), 0
        elif t == steps - 1:
            with np.errstate(over="ignore"):
                s, t = s * np.float32(2), 0
        else:
            t += 1
        yield float(s)


def table_megatron(found_infs, s, growth, backoff, window, hysteresis, floor):
    """Megatron: float32 tensors, factors too."""
    s, growth, backoff, floor = (np.float32(x) for x in (s, growth, backoff, floor))
    t, h = 0, hysteresis
    yield float(s)
    for found_inf in found_infs:
        if found_inf:
            t, h = 0, h - 1
            if h <= 0:
                s = np.maximum(s * backoff, floor)
        else:
            t += 1
            if t == window:
                with np.errstate(over="ignore"):
                    t, h, s = 0, hysteresis, s * growth
        yield float(s)


def table_deepspeed(found_infs, s, factor, window, delayed_shift, consecutive, floor):
    """DeepSpeed, counted in iterations as its source does; ends with the string "raised"."""
    h, last = delayed_shift, -1
    yield s
    for iteration, found_inf in enumerate(found_infs):
        if found_inf:
            if delayed_shift == 1 or h == 1:
                if s == floor:
                    yield "raised"
                    return
                s = max(s / factor, floor)
            else:
                h -= 1
            last = iteration
        else:
            if consecutive:
                h = delayed_shift
            stable = iteration - last - 1
            if stable > 0 and stable % window == 0:
                h = delayed_shift
                s *= factor
        yield s


@given(overflows, intervals, floors, st.sampled_from([2.0**10, 2.0**24, 1000.1]))
def test_apex(found_infs, window, floor, ceiling):
    rule = ApexScale(2.0**16, window, floor, ceiling)
    assert scales(rule, found_infs) == list(table_apex(found_infs, 2.0**16, window, 2.0, 0.5, floor, ceiling))


@given(overflows, st.floats(0.01, 1e30), factors, backoffs, intervals, floors)
def test_ascend(found_infs, init_scale, growth, backoff, window, floor):
    rule = AscendScale(init_scale, growth, backoff, window, floor)
    expected = table_apex(found_infs, init_scale, window, growth, backoff, floor, 2.0**24)
    assert scales(rule, found_infs) == list(expected)


@given(overflows, st.sampled_from([2.0**127, 1000.1, 3.0, 0.5]), factors, intervals, st.sampled_from([1.0, 0.1, 7.7]))
def test_jmp(found_infs, init_scale, factor, period, floor):
    rule = JmpScale(init_scale, factor, period, floor)
    assert scales(rule, found_infs) == list(table_jmp(found_infs, init_scale, period, factor, floor))


@given(overflows, st.sampled_from([2.0**15, 2.0**126, 2.0**-140, 1000.1]), intervals)
def test_keras(found_infs, init_scale, steps):
    assert scales(KerasScale(init_scale, steps), found_infs) == list(table_keras(found_infs, init_scale, steps))


@given(
    overflows,
    st.sampled_from([2.0**32, 2.0**126, 1000.1]),
    factors,
    backoffs,
    intervals,
    st.integers(1, 4),
    st.floats(0.1, 9),
)
def test_megatron(found_infs, init_scale, growth, backoff, window, hysteresis, floor):
    rule = MegatronScale(init_scale, growth, backoff, window, hysteresis, floor)
    expected = table_megatron(found_infs, init_scale, growth, backoff, window, hysteresis, floor)
    assert scales(rule, found_infs) == list(expected)


@settings(max_examples=200)
@given(
    overflows, st.sampled_from([2.0**16, 8.0]), st.sampled_from([2.0, 3.0]), intervals, st.integers(1, 4), st.booleans()
)
def test_deepspeed(found_infs, init_scale, factor, window, hysteresis, consecutive):
    rule = DeepSpeedScale(init_scale, factor, window, hysteresis, consecutive, floor=1.0)
    expected = list(table_deepspeed(found_infs, init_scale, factor, window, hysteresis, consecutive, 1.0))
    if expected[-1] == "raised":
        stopped = len(expected) - 2  # the step that raises
        assert scales(rule, found_infs[:stopped]) == expected[:-1]
        with pytest.raises(LossScaleAtMinimumError, match=r"^Current loss scale already at minimum"):
            scales(rule, found_infs[: stopped + 1])
    else:
        assert scales(rule, found_infs) == expected


def test_deepspeed_may_stay_at_its_floor():
    rule = DeepSpeedScale(init_scale=2.0, hysteresis=1, raises_at_floor=False)
    assert scales(rule, [True] * 4) == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_deepspeed_grows_at_the_step_after_a_window_of_clean_ones():
    seen = scales(DeepSpeedScale(), [False] * 2001)
    assert (seen[1000], seen[1001], seen[2000], seen[2001]) == (2.0**16, 2.0**17, 2.0**17, 2.0**18)


def test_the_others_grow_at_the_last_step_of_the_window():
    for name, window in {
        "torch": 2000,
        "apex": 2000,
        "Ascend": 2000,
        "jmp": 2000,
        "Keras": 2000,
        "Megatron": 1000,
    }.items():
        rule = PUBLISHED_RULES[name]
        seen = scales(rule, [False] * window)
        start = rule.start().scale
        assert (seen[window - 1], seen[window]) == (start, 2 * start), name


def test_ends_of_a_long_run_of_overflows():
    """What each source does without mercy: zero, a floor, an end."""
    after = {name: rule for name, rule in PUBLISHED_RULES.items() if name != "DeepSpeed"}
    last = {name: scales(rule, [True] * 10_000)[-1] for name, rule in after.items()}
    assert last == {"torch": 0.0, "apex": 0.0, "Ascend": 0.0, "jmp": 1.0, "Keras": 0.0, "Megatron": 1.0}
    assert scales(ApexScale(), [True] * 1091)[-2:] == [5e-324, 0.0]
    with pytest.raises(LossScaleAtMinimumError):
        scales(DeepSpeedScale(), [True] * 18)
    assert scales(DeepSpeedScale(), [True] * 17)[-1] == 1.0


def test_keras_grows_to_infinity_where_jmp_stays():
    assert scales(KerasScale(2.0**127, 1), [False, False, True])[1:] == [math.inf] * 3
    assert scales(JmpScale(2.0**127, 2.0, 1), [False])[-1] == 2.0**127


def test_the_published_defaults():
    assert asdict(ApexScale()) == {"init_scale": 65536.0, "growth_interval": 2000, "floor": None, "ceiling": 16777216.0}
    assert asdict(AscendScale()) == {**asdict(ApexScale()), "growth_factor": 2.0, "backoff_factor": 0.5}
    assert asdict(JmpScale()) == {"init_scale": 32768.0, "factor": 2.0, "growth_interval": 2000, "floor": 1.0}
    assert asdict(KerasScale()) == {"init_scale": 32768.0, "growth_interval": 2000}
    assert asdict(MegatronScale()) == {
        "init_scale": 4294967296.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "floor": 1.0,
    }
    assert asdict(DeepSpeedScale()) == {
        "init_scale": 65536.0,
        "factor": 2.0,
        "growth_interval": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "floor": 1.0,
        "raises_at_floor": True,
    }
    assert PUBLISHED_RULES["torch"] == DynamicScale()


@pytest.mark.parametrize("name", PUBLISHED_RULES)
def test_rules_are_frozen_values_that_skip(name):
    rule = PUBLISHED_RULES[name]
    assert rule == type(rule)()
    assert rule.skips_on_overflow
    with pytest.raises(FrozenInstanceError):
        rule.init_scale = 1.0


def test_a_state_of_another_rule_has_all_its_patience():
    assert MegatronScale().next(ScaleState(8.0), True) == HysteresisState(8.0, 0, 1)
    assert DeepSpeedScale().next(ScaleState(8.0), True) == HysteresisState(8.0, 0, 1)
    assert ApexScale().next(HysteresisState(8.0, 3, 2), True) == ScaleState(4.0)
    assert StaticScale(8.0).next(HysteresisState(8.0, 3, 2), False) == ScaleState(8.0, 4)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (ApexScale, {"floor": 0.0}, "floor=0.0:"),
        (ApexScale, {"growth_interval": 0}, "growth_interval=0:"),
        (AscendScale, {"backoff_factor": 2.0}, "backoff_factor=2.0:"),
        (AscendScale, {"init_scale": 1e39}, "init_scale=1e+39:"),
        (JmpScale, {"factor": 1.0}, "factor=1.0:"),
        (KerasScale, {"init_scale": 1e-60}, "init_scale=1e-60:"),
        (
            MegatronScale,
            {"hysteresis": 0},
            "hysteresis=0:",
        ),
        (MegatronScale, {"floor": 2.0**33}, "floor=8589934592.0 is above init_scale=4294967296.0"),
        (DeepSpeedScale, {"factor": math.inf}, "factor=inf:"),
    ],
)
def test_nonsense_is_refused(make, arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as refusal:
        make(**arguments)
    assert len(refusal.value.args) == 1


@pytest.mark.parametrize("name", [name for name, rule in PUBLISHED_RULES.items() if isinstance(rule, RecurrentRule)])
def test_constants_are_computed_once(name):
    rule = PUBLISHED_RULES[name]
    assert rule.recurrence is rule.recurrence
