"""Scale paths: the scales and overflows of `replay`, for every rule and every record, in a fraction of the time."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amplab.diagnose import ScaleHistory, what_if
from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    DeepSpeedScale,
    DynamicScale,
    MegatronScale,
    ScaleState,
    StaticScale,
    overflow_limits,
    replay,
    scale_path,
    steps_lost,
)


class Fussy:
    """A rule of one's own without any base: shrinks by a quarter at an overflow and creeps up at every clean step."""

    skips_on_overflow = True

    def start(self) -> ScaleState:
        return ScaleState(1000.0)

    def next(self, state: ScaleState, found_inf: bool) -> ScaleState:
        return ScaleState(state.scale * (0.75 if found_inf else 1.01), 0)


RULES = {
    **PUBLISHED_RULES,
    "short": DynamicScale(growth_interval=3),
    "backoff": DynamicScale(growth_interval=2, backoff_factor=0.25, init_scale=2.0**30),
    "floor": ApexScale(growth_interval=2, floor=2.0**10),
    "static": StaticScale(128.0),
    "static too high": StaticScale(2.0**24),
    "hysteresis": MegatronScale(growth_interval=3),
    "DeepSpeed short": DeepSpeedScale(growth_interval=3, init_scale=2.0**20),
    "DeepSpeed consecutive": DeepSpeedScale(growth_interval=4, hysteresis=3, consecutive_hysteresis=True),
    "own": Fussy(),
}
EXPONENTS = st.integers(-30, 12).map(float) | st.sampled_from([-math.inf, math.inf, None])
STEPS = st.tuples(EXPONENTS, st.integers(-10, 30).map(lambda power: 2.0**power))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=70))
def test_a_path_is_the_replay(name, steps):
    exponents, recorded = zip(*steps, strict=True)
    expected = replay(RULES[name], gradient_exponents=exponents, recorded_scales=recorded)
    known = np.array([math.nan if each is None else each for each in exponents])
    path = scale_path(RULES[name], overflow_limits(known, np.array(recorded)))
    assert path.scales.tolist() == list(expected.scales)
    assert path.found_infs.tolist() == [step.found_inf for step in expected.steps]
    assert path.lost_from == expected.lost_from


@pytest.mark.parametrize("name", PUBLISHED_RULES)
def test_a_long_run_too_and_the_steps_that_are_lost(name):
    generator = np.random.default_rng(0)
    exponents = np.floor(generator.normal(-4, 1, 1200))
    exponents[[100, 101, 1000]] = np.inf
    recorded, skipped = np.full(1200, 2.0**14), exponents == np.inf
    expected = what_if(ScaleHistory(recorded.tolist(), skipped.tolist(), exponents.tolist()), name)
    path = scale_path(PUBLISHED_RULES[name], overflow_limits(exponents, recorded))
    assert path.scales.tolist() == list(expected.scales)
    assert steps_lost(path, skipped) == expected.steps_lost


def test_all_published_rules_over_20000_steps_take_less_than_a_tenth_of_a_second():
    exponents = np.floor(np.random.default_rng(0).normal(-4, 1, 20_000))
    best = math.inf
    for _ in range(3):  # the machine may be busy
        began = time.perf_counter()
        limits = overflow_limits(exponents, np.full(20_000, 2.0**16))
        for rule in [*PUBLISHED_RULES.values(), DynamicScale(growth_interval=50)]:
            scale_path(rule, limits)
        best = min(best, time.perf_counter() - began)
    assert best < 0.1
