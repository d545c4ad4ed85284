"""The form of a rule on the device: the bits of the pure rule, and no wait for the device."""

import dataclasses
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    AscendScale,
    DeepSpeedScale,
    DynamicScale,
    HostScale,
    HysteresisState,
    JmpScale,
    KerasScale,
    LossScaleAtMinimumError,
    MegatronScale,
    RecurrentScale,
    ScaleState,
    StaticScale,
    device_scale,
)

overflows = st.lists(st.booleans(), max_size=40) | st.lists(st.sampled_from([False] * 6 + [True]), max_size=40)
starts = st.sampled_from([2.0**16, 2.0**126, 2.0**-140, 1000.1, 0.3])
factors, backoffs, intervals = st.floats(1.0625, 16.0), st.floats(0.0625, 0.9375), st.integers(1, 5)
floors = st.sampled_from([None, 1.1, 2.0**-126])
RULES = st.one_of(
    st.builds(DynamicScale, starts, factors, backoffs, intervals, floors, st.sampled_from([None, 2.0**24, 3e38])),
    st.builds(ApexScale, starts, intervals, floors),
    st.builds(AscendScale, starts, factors, backoffs, intervals, floors, st.just(3e38)),
    st.builds(JmpScale, starts, factors, intervals, st.sampled_from([1.0, 0.1])),
    st.builds(KerasScale, starts, intervals),
    st.builds(MegatronScale, starts, factors, backoffs, intervals, st.integers(1, 4), st.just(2.0**-140)),
    st.builds(StaticScale, st.just(0.1)),
)


class NoReading(TorchDispatchMode):
    """Raise where a tensor's value is read on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default:
            raise AssertionError("the host reads a tensor")
        return func(*args, **(kwargs or {}))


class CountReadings(TorchDispatchMode):
    """Count the values read on the host."""

    readings = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.readings += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Own:
    """A rule of a user: a third off at an overflow, for good."""

    skips_on_overflow: bool = True

    def start(self):
        return ScaleState(90.0)

    def next(self, state, found_inf):
        return ScaleState(state.scale * 2 / 3 if found_inf else state.scale, 0 if found_inf else state.clean_steps + 1)


@settings(max_examples=200)
@given(RULES, overflows, st.floats(2.0**-149, 2.0**127, width=32), st.integers(0, 9))
def test_goes_on_from_any_state(rule, found_infs, start, clean_steps):
    state = ScaleState(start, clean_steps)
    scale = device_scale(rule, state=state)
    for found_inf in found_infs:
        scale.update_(torch.tensor([float(found_inf)]))
        state = rule.next(state, found_inf)
        assert scale.state() == state


@given(overflows, intervals, intervals, floors, floors, factors)
def test_follows_any_rule_of_torchs_kind(found_infs, interval, other_interval, floor, other_floor, growth_factor):
    rule, other = (
        DynamicScale(4.0, 2.0, 0.5, interval, floor),
        DynamicScale(4.0, growth_factor, 0.3, other_interval, other_floor),
    )
    scale, state = device_scale(rule), rule.start()
    for step, found_inf in enumerate(found_infs):
        if step == len(found_infs) // 2:
            scale.follow(other)
            rule = other
        scale.update_(torch.tensor([float(found_inf)]))
        state = rule.next(state, found_inf)
        assert scale.state() == state


@settings(max_examples=300)
@given(RULES, overflows)
def test_has_the_bits_of_the_pure_rule(rule, found_infs):
    scale, state = device_scale(rule), rule.start()
    assert scale.state() == state
    for found_inf in found_infs:
        scale.update_(torch.tensor([float(found_inf)]))
        state = rule.next(state, found_inf)
        assert scale.state() == state
        assert scale.scale.item() == torch.tensor(state.scale).item()
        assert scale.clean_steps.item() == state.clean_steps


@pytest.mark.parametrize("name", [name for name in PUBLISHED_RULES if name != "DeepSpeed"])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_scaling_and_updating_never_wait(name, found_inf):
    flag, loss = torch.tensor([found_inf]), torch.ones((), requires_grad=True)
    scale = device_scale(PUBLISHED_RULES[name])
    assert isinstance(scale, RecurrentScale)
    assert scale.syncs == 0
    with NoReading():
        device_scale(PUBLISHED_RULES[name])
        (loss * scale.scale).backward()
        scale.update_(flag)
        scale.update_(True)
        scale.load_(ScaleState(2.0, 1))
    with pytest.raises(AssertionError, match="the host reads"), NoReading():  # the check itself: this one waits
        scale.scale.item()


@pytest.mark.parametrize("rule", [DeepSpeedScale(), Own()])
def test_rules_that_are_asked_read_found_inf_once(rule):
    found_inf, scale, state = torch.ones(1), device_scale(rule), rule.start()
    assert isinstance(scale, HostScale)
    assert scale.syncs == 1
    for _ in range(3):
        with CountReadings() as count:
            scale.update_(found_inf)
        assert count.readings == 1
        with NoReading():
            scale.update_(False)
        state = rule.next(rule.next(state, True), False)
        assert scale.state() == state
        assert (scale.scale.item(), scale.clean_steps.item()) == (torch.tensor(state.scale).item(), 1)


def test_deepspeed_raises_at_its_floor_and_stays_where_it_was():
    scale = device_scale(DeepSpeedScale(init_scale=1.0, hysteresis=1))
    with pytest.raises(LossScaleAtMinimumError):
        scale.update_(torch.ones(1))
    assert scale.scale.item() == 1.0


def test_a_scale_beyond_float32_is_inf_on_the_device():
    scale = device_scale(DeepSpeedScale(), state=HysteresisState(2.0**200, 0, 2))
    assert scale.scale.item() == math.inf
    assert scale.state().scale == 2.0**200


@pytest.mark.parametrize("found_inf", [torch.tensor(2.0), torch.tensor([0.5]), torch.tensor([math.inf]), True])
def test_any_found_inf_above_zero_is_an_overflow(found_inf):
    scale = device_scale(DynamicScale())
    scale.update_(found_inf)
    assert scale.state() == ScaleState(2.0**15)


def test_the_tensors_stay_the_same_objects():
    scale = device_scale(DynamicScale())
    kept, address = scale.scale, scale.scale.data_ptr()
    scale.update_(torch.ones(1))
    scale.load_(ScaleState(8.0, 5))
    assert kept is scale.scale
    assert kept.data_ptr() == address
    assert (kept.item(), scale.clean_steps.item()) == (8.0, 5)
    assert kept.shape == scale.clean_steps.shape == ()
    assert (kept.dtype, scale.clean_steps.dtype) == (torch.float32, torch.int32)


def test_follows_another_rule_from_the_current_state():
    scale = device_scale(DynamicScale(growth_interval=1))
    scale.follow(DynamicScale(growth_factor=4.0, growth_interval=1))
    scale.update_(False)
    assert scale.state() == ScaleState(2.0**18)
    scale.follow(MegatronScale())
    scale.update_(True)
    assert scale.state() == HysteresisState(2.0**18, 0, 1)
    with pytest.raises(TypeError, match=r"^DeepSpeedScale\("):
        scale.follow(DeepSpeedScale())
    asked = device_scale(DeepSpeedScale())
    asked.follow(DeepSpeedScale(hysteresis=1))
    asked.update_(True)
    assert asked.rule == DeepSpeedScale(hysteresis=1)
    with pytest.raises(TypeError, match=r"^DynamicScale\("):
        asked.follow(DynamicScale())


@pytest.mark.parametrize("rule", [MegatronScale(), DeepSpeedScale()])
def test_can_be_pickled(rule):
    scale = device_scale(rule)
    scale.update_(True)
    copy = pickle.loads(pickle.dumps(scale))
    copy.update_(True)
    assert scale.state() == rule.next(rule.start(), True)
    assert copy.state() == rule.next(scale.state(), True)


def test_growth_beyond_float32_ends_at_a_ceiling_below_it():
    rule = DynamicScale(init_scale=2.0**127, growth_interval=1, ceiling=3e38)
    scale = device_scale(rule)
    scale.update_(torch.zeros(1))
    assert scale.state() == rule.next(rule.start(), found_inf=False) == ScaleState(torch.tensor(3e38).item())


@pytest.mark.parametrize(
    "rule", [DynamicScale(growth_interval=2), DynamicScale(floor=4.0), ApexScale(), MegatronScale()]
)
@pytest.mark.parametrize("given_scale", [48.0, 2.0, 0.1])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scale_of_the_caller_is_not_checked(rule, given_scale, as_tensor):
    scale = device_scale(rule)
    scale.update_(torch.zeros(()))
    state = scale.state()
    with NoReading():
        scale.set_scale_(torch.tensor([given_scale], dtype=torch.float64) if as_tensor else given_scale)
    state = dataclasses.replace(state, scale=rule.recurrence.round(given_scale))
    assert scale.state() == state
    for found in (False, True, True, False):
        scale.update_(torch.tensor(float(found)))
        state = rule.next(state, found)
        assert scale.state() == state
        assert scale.scale.item() == torch.tensor(state.scale).item()


def test_set_scale_keeps_the_count_of_a_host_rule():
    scale = device_scale(DeepSpeedScale())
    scale.update_(True)
    scale.set_scale_(torch.tensor(8.0))
    assert scale.state() == HysteresisState(8.0, 0, 1)
    assert scale.scale.item() == 8.0
