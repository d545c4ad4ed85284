"""Scale paths: the scales and overflows of `replay`, for every rule and every record, in a fraction of the time."""

import math
import time

import numpy as np
import pytest

from amplab.diagnose import ScaleHistory, what_if
from amplab.scalers import (
    PUBLISHED_RULES,
    DynamicScale,
    overflow_limits,
    scale_path,
    steps_lost,
)


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
        began = time.thread_time()
        limits = overflow_limits(exponents, np.full(20_000, 2.0**16))
        for rule in [*PUBLISHED_RULES.values(), DynamicScale(growth_interval=50)]:
            scale_path(rule, limits)
        best = min(best, time.thread_time() - began)
    assert best < 0.1


def test_exponents_that_no_float64_has_are_those_whose_limit_is_0_or_inf():
    exponents = np.array([1e308, -1e308, np.nan, 1e308, -1e308])  # NaN: finite, and of unknown size
    limits = overflow_limits(exponents, np.full(5, 1024.0))
    assert limits[[0, 1, 3, 4]].tolist() == [0.0, np.inf, 0.0, np.inf]
