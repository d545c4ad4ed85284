"""The recorded run of lesson 06, its picture, and what its checks say to right and wrong answers."""

from itertools import product

import pytest
import torch

from amplab.lessons.lesson_06 import (
    check_next,
    check_rule_for_the_run,
    check_skips_at_the_start,
    recorded_run,
    scale_over_run,
    scales_after,
)
from amplab.scalers import DynamicScale, ScaleState, StaticScale, replay


def test_the_record_has_the_largest_gradient_of_each_step() -> None:
    record = recorded_run()
    exponents = [exponent for exponent in record.grad_exponents if exponent is not None]
    assert len(exponents) == len(record.scales) == 1200
    early, late = exponents[:100], exponents[-100:]
    assert sum(late) < sum(early) - 100  # gradients shrink by more than a binade
    assert record.samples


@pytest.mark.parametrize("window", [4, 64, 2048])
def test_the_picture_has_the_skips_and_scales_of_the_replay(window: int) -> None:
    record, rule = recorded_run(), DynamicScale(growth_interval=window)
    slow = replay(rule, gradient_exponents=record.grad_exponents, recorded_scales=record.scales)
    run = scale_over_run(record, rule)
    assert tuple(run.path.scales) == slow.scales
    assert run.skips == len(slow.skips)
    assert run.median_scale == sorted(slow.scales)[600]
    assert repr(run) == f"<{run.sentence}>"
    assert run.sentence in run._repr_html_()
    assert "<svg" in run._repr_html_()


def test_scales_after_follows_the_rule_from_its_start() -> None:
    assert scales_after(DynamicScale(growth_interval=2), [True, False, False]) == [2.0**16, 2.0**15, 2.0**15, 2.0**16]


def test_the_skips_at_the_start_are_those_of_a_replay() -> None:
    rule = DynamicScale(init_scale=2.0**32)
    right = len(replay(rule, gradient_exponents=[0.0] * 100).skips)
    assert check_skips_at_the_start(right).right
    assert check_skips_at_the_start(float(right)).right
    assert check_skips_at_the_start(torch.tensor(right)).right
    assert "-3 skips cannot be right" in repr(check_skips_at_the_start(-3))
    assert "above 65504" in repr(check_skips_at_the_start(right - 1))
    assert "Would 2^15 have overflowed" in repr(check_skips_at_the_start(right + 1))
    assert "not a whole number" in repr(check_skips_at_the_start(16.5))


def test_a_rule_for_the_run_may_skip_little_and_must_scale_enough() -> None:
    assert check_rule_for_the_run(DynamicScale(growth_interval=128)).right
    assert "longer window" in repr(check_rule_for_the_run(DynamicScale(growth_interval=16)))
    assert "shorter window" in repr(check_rule_for_the_run(DynamicScale(growth_interval=2000)))
    assert "does not skip" in repr(check_rule_for_the_run(StaticScale(2.0**20)))
    assert "not a rule" in repr(check_rule_for_the_run(128))


def solution(state: ScaleState, found_inf: bool) -> ScaleState:
    if found_inf:
        return ScaleState(max(1.0, state.scale / 2), 0)
    if state.clean_steps + 1 == 3:
        return ScaleState(state.scale * 2, 0)
    return ScaleState(state.scale, state.clean_steps + 1)


def without_floor(state: ScaleState, found_inf: bool) -> ScaleState:
    return ScaleState(state.scale / 2, 0) if found_inf else solution(state, found_inf)


def keeps_the_count(state: ScaleState, found_inf: bool) -> ScaleState:
    return ScaleState(max(1.0, state.scale / 2), state.clean_steps) if found_inf else solution(state, found_inf)


def test_a_transition_is_compared_with_the_rule() -> None:
    assert check_next(solution).right
    assert "scale=0.5" in repr(check_next(without_floor))
    assert "expected ScaleState(scale=8.0, clean_steps=0)" in repr(check_next(keeps_the_count))
    assert "returned 8.0" in repr(check_next(lambda state, found_inf: 8.0))
    assert "write the next state" in repr(check_next(lambda state, found_inf: ScaleState(..., ...)))
    assert "not a function" in repr(check_next(3))


def test_the_solution_of_the_last_exercise_is_the_rule_in_every_state() -> None:
    rule = DynamicScale(init_scale=4.0, growth_interval=3, floor=1.0)
    for scale, clean, found in product((1.0, 2.0, 8.0), (0, 1, 2), (False, True)):
        state = ScaleState(scale, clean)
        assert solution(state, found) == rule.next(state, found)


@pytest.mark.parametrize("check", [check_skips_at_the_start, check_rule_for_the_run, check_next])
def test_an_exercise_without_an_answer_says_so(check: object) -> None:
    verdict = check(...)  # type: ignore[operator]
    assert not verdict.right
    assert "Not answered yet" in repr(verdict)
