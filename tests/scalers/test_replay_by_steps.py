"""`replay` and `scale_path` hold against one transition and one verdict at a time, for every rule and every record."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amplab.formats import BFLOAT16, FLOAT16, ExponentHistogram
from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    DeepSpeedScale,
    DynamicScale,
    KerasScale,
    LossScaleAtMinimumError,
    MegatronScale,
    ReplayStep,
    ScaleState,
    StaticScale,
    Verdict,
    floored,
    overflow_limits,
    overflow_verdict,
    replay,
    scale_path,
)
from amplab.scalers.recorded_overflows import REASONS

NOT_FINITE, CENSORED, NOT_MEASURED, WITHIN_BINADE = REASONS[1:]
NEAR, LEAST_SPREAD = 32, 3


def stepwise(rule, found_infs=None, exponents=None, recorded_scales=None, fmt=FLOAT16):
    """Return the steps, the state at the end and what stopped the run, one step after the other."""
    record = list(exponents if found_infs is None else found_infs)
    around = exponents_around(record) if found_infs is None else {}
    neighbors = [None] * len(record) if recorded_scales is None or found_infs is not None else nearest_finite(record)
    state, steps, lost = rule.start(), [], False
    for step, recorded in enumerate(record):
        if found_infs is not None:
            seen = Verdict(bool(recorded))
        elif lost:
            seen = Verdict(True)
        else:
            recorded_scale = None if recorded_scales is None else recorded_scales[step]
            seen = verdict(recorded, state.scale, recorded_scale, neighbors[step], fmt)
            if seen.doubt == NOT_MEASURED and step in around:
                low, high = (verdict(exponent, state.scale, None, None, fmt) for exponent in around[step])
                seen = low if low == high and low.doubt is None else seen
        skipped = seen.found_inf and rule.skips_on_overflow
        lost |= seen.found_inf and not skipped
        steps.append(ReplayStep(step, state.scale, seen.found_inf, skipped, seen.doubt))
        try:
            state = rule.next(state, seen.found_inf)
        except LossScaleAtMinimumError as error:
            return tuple(steps), state, str(error)
    return tuple(steps), state, None


def verdict(recorded, scale, recorded_scale, neighbor, fmt):
    if not 0.0 < scale < math.inf:
        return Verdict(True)
    if recorded is None:
        known = recorded_scale is not None and scale <= recorded_scale
        return Verdict(False, None if known else NOT_MEASURED)
    largest, censored, finite = largest_exponent(recorded)
    limit = fmt.max + fmt.ulp(fmt.max) / 2  # the smallest number that rounds to inf
    surely = largest is not None and scale >= math.ldexp(limit, -largest)
    if surely:
        return Verdict(True)
    if not finite:
        known = recorded_scale is not None and scale >= recorded_scale
        return Verdict(True) if known else Verdict(guess(scale, recorded_scale, neighbor, limit), NOT_FINITE)
    if largest is None:
        return Verdict(False)
    if censored:
        return Verdict(False, CENSORED)
    inside = scale * (2.0 - fmt.epsilon) < math.ldexp(limit, -largest)
    return Verdict(False, None if inside else WITHIN_BINADE)


def exponents_around(record):
    known = [(step, exponent) for step, each in enumerate(record) if (exponent := measured(each)) is not None]
    jumps = (abs(one - other) for (_, one), (_, other) in pairwise(known))
    spread = max(LEAST_SPREAD, 1 + max(jumps, default=0))
    found = {}
    ends = [(len(record) + NEAR // 2, each) for _, each in known[-1:]]  # half as far on one side
    for (first, one), (last, other) in pairwise([*known, *ends]):
        if last - first <= NEAR:
            allowed = min(one, other) - spread, max(one, other) + spread
            found |= {step: allowed for step in range(first + 1, min(last, len(record))) if record[step] is None}
    return found


def guess(scale, recorded_scale, neighbor, limit):
    if recorded_scale is None or neighbor is None:
        return True
    at_least = math.frexp(limit / recorded_scale)[1] - 1 if 0.0 < recorded_scale < math.inf else neighbor
    return scale >= math.ldexp(limit, -max(neighbor, at_least))


def nearest_finite(record):
    known = [measured(recorded) for recorded in record]
    newest = next((exponent for exponent in known if exponent is not None), None)
    return [newest := newest if exponent is None else exponent for exponent in known]


def measured(recorded):
    if recorded is None:
        return None
    largest, _, finite = largest_exponent(recorded)
    return largest if finite else None


def largest_exponent(recorded):
    if isinstance(recorded, ExponentHistogram):
        largest = None if recorded.span is None else recorded.span[1]
        top = largest is not None and largest == recorded.low + len(recorded.counts) - 1
        return largest, top, recorded.infs + recorded.nans == 0
    if math.isfinite(recorded):
        if recorded != int(recorded):
            raise ValueError(recorded)
        return int(recorded), False, True
    return None, False, recorded == -math.inf


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
    "static that is lost at once": StaticScale(2.0**127),
    "Keras to zero": KerasScale(init_scale=2.0**-140, growth_interval=2),
    "Megatron at its floor": MegatronScale(init_scale=2.0, growth_interval=5, hysteresis=3),
    "DeepSpeed stays": DeepSpeedScale(init_scale=4.0, growth_interval=3, raises_at_floor=False),
    "floored": floored(DynamicScale(init_scale=8.0, growth_interval=4), 2.0),
    "own floored": floored(Fussy(), 600.0),
    "own": Fussy(),
}


def histograms():
    counts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    return st.builds(
        lambda counts, low, infs: ExponentHistogram(np.array(counts), low, 0, infs, 0, sum(counts) + infs),
        counts,
        st.integers(-30, 8),
        st.integers(0, 1),
    )


SCALES = (
    st.integers(-10, 30).map(lambda power: 2.0**power)
    | st.integers(14, 16).map(lambda power: 2.0**power)
    | st.sampled_from([0.0, math.inf, math.nan, 3.7, 40000.0])
)
MEASURED = st.integers(-30, 12).map(float) | st.sampled_from([-math.inf, math.inf, math.nan])
SIZES = MEASURED | st.integers(0, 6).map(float) | st.none() | st.none() | histograms()
# Runs of equal records as in training: overflows that follow one another, steps that were not measured.
STEPS = st.lists(
    st.tuples(st.tuples(SIZES, SCALES), st.integers(1, 12) | st.sampled_from([15, 16, 31, 32])), min_size=1, max_size=25
).map(lambda runs: [step for step, times in runs for _ in range(times)])


def shown(steps, end, stopped):
    return [(each, repr(each.scale)) for each in steps], repr(end), stopped


@settings(max_examples=150)
@given(st.sampled_from(list(RULES)), STEPS, st.sampled_from([FLOAT16, BFLOAT16]), st.booleans())
@example("static", [(-4.0, 1.0), *[(None, 1.0)] * 31, (-4.0, 1.0)], FLOAT16, True)  # measured steps just near enough
@example("static", [(-4.0, 1.0), *[(None, 1.0)] * 32, (-4.0, 1.0)], FLOAT16, True)
@example("Megatron", [(3.0, 2.0**32), (None, 2.0**32), (3.0, 2.0**32)], FLOAT16, True)  # finite at this very scale
def test_a_replay_is_that_of_single_steps(name, steps, fmt, has_scales):
    exponents, recorded = zip(*steps, strict=True)
    scales = recorded if has_scales else None
    run = replay(RULES[name], gradient_exponents=exponents, recorded_scales=scales, fmt=fmt)
    expected = stepwise(RULES[name], exponents=exponents, recorded_scales=scales, fmt=fmt)
    assert shown(run.steps, run.end, run.stopped) == shown(*expected)
    lost = [step.step for step in expected[0] if step.found_inf and not step.skipped]
    assert (run.taken_overflows, run.lost_from) == (tuple(lost), min(lost, default=None))
    assert run.skips == tuple(step.step for step in expected[0] if step.skipped)
    assert run.doubtful == tuple(step.step for step in expected[0] if step.doubt)
    assert run.scales == tuple(step.scale for step in expected[0])


@settings(max_examples=60)
@given(st.sampled_from(list(RULES)), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=20))
def test_a_replay_of_recorded_verdicts_is_that_of_single_steps(name, runs):
    found_infs = [found_inf for found_inf, times in runs for _ in range(times)]
    run = replay(RULES[name], found_infs)
    assert shown(run.steps, run.end, run.stopped) == shown(*stepwise(RULES[name], found_infs))


@settings(max_examples=60)
@given(st.sampled_from(list(RULES)), STEPS)
def test_a_path_is_the_replay_of_its_columns(name, steps):
    """A column of a run has NaN for what was not measured, and no histograms."""
    known = [(math.nan if isinstance(size, ExponentHistogram | None) else size, scale) for (size, scale) in steps]
    exponents, recorded = map(np.array, zip(*known, strict=True))
    expected, *_ = stepwise(
        RULES[name], exponents=[None if math.isnan(each) else each for each in exponents], recorded_scales=recorded
    )
    path = scale_path(RULES[name], overflow_limits(exponents, recorded))
    assert path.scales.tolist() == [step.scale for step in expected]
    assert path.found_infs.tolist() == [step.found_inf for step in expected]


@settings(max_examples=200)
@given(
    MEASURED | st.none() | histograms(),
    SCALES | st.floats(1e-6, 1e12),
    st.none() | SCALES,
    st.none() | st.integers(-20, 15),
)
def test_a_verdict_is_that_of_one_step(recorded, scale, recorded_scale, neighbor):
    seen = overflow_verdict(recorded, scale, recorded_scale=recorded_scale, neighbor=neighbor)
    assert seen == verdict(recorded, scale, recorded_scale, neighbor, FLOAT16)
