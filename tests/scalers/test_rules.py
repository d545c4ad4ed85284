"""The scaling rules against apex's and torch's own, over random overflows."""

import math
import re
from dataclasses import FrozenInstanceError, asdict, dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.scalers import APEX_DYNAMIC, TORCH_DYNAMIC, DynamicScale, ScaleState, StaticScale

overflows = st.lists(st.booleans(), max_size=60)
powers = st.integers(1, 4).map(lambda exponent: 2.0**exponent)


def history(rule, found_infs):
    """The states from the start on."""
    states = [rule.start()]
    for found_inf in found_infs:
        states.append(rule.next(states[-1], found_inf))
    return states


@dataclass
class Apex:
    """apex/amp/scaler.py, LossScaler.update_scale, as published; Python floats."""

    scale: float
    window: int
    floor: float | None
    ceiling: float
    unskipped: int = 0

    def update(self, overflow):
        if overflow:
            self.scale /= 2.0
            if self.floor:
                self.scale = max(self.floor, self.scale)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.ceiling, self.scale * 2.0)
            self.unskipped = 0


class TorchScaler:
    """torch.amp.GradScaler driven through its public methods by the gradients of one weight."""

    def __init__(self, rule):
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.scaler = torch.amp.GradScaler(
            "cpu", rule.init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        self.scaler.scale(torch.zeros(1))

    def update(self, overflow):
        self.weight.grad = torch.tensor([math.inf if overflow else 1.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def state(self):
        saved = self.scaler.state_dict()
        return ScaleState(saved["scale"], saved["_growth_tracker"])


@given(
    overflows,
    st.integers(1, 5),
    st.sampled_from([None, 1.0, 1024.0]),
    st.integers(10, 20).map(lambda exponent: 2.0**exponent),
)
def test_moves_as_apex_does(found_infs, window, floor, ceiling):
    rule = DynamicScale(growth_interval=window, floor=floor, ceiling=ceiling)
    apex = Apex(min(ceiling, 2.0**16), window, floor, ceiling)
    states = history(rule, found_infs)
    assert states[0] == ScaleState(apex.scale, 0)
    for state, found_inf in zip(states[1:], found_infs, strict=True):
        apex.update(found_inf)
        assert state == ScaleState(apex.scale, apex.unskipped)


@given(
    overflows,
    st.integers(1, 5),
    st.floats(1.0625, 16.0),
    st.floats(0.0625, 0.9375),
    st.integers(-140, 127).map(lambda exponent: 2.0**exponent),
)
def test_moves_as_torch_does_to_the_bit(found_infs, interval, growth_factor, backoff_factor, init_scale):
    rule = DynamicScale(init_scale, growth_factor, backoff_factor, interval)
    scaler = TorchScaler(rule)
    for state, found_inf in zip(history(rule, found_infs)[1:], found_infs, strict=True):
        scaler.update(found_inf)
        assert state == scaler.state


@given(overflows, powers)
def test_stays_between_floor_and_ceiling(found_infs, factor):
    rule = DynamicScale(8.0, factor, 1 / factor, 1, floor=2.0, ceiling=64.0)
    assert all(2.0 <= state.scale <= 64.0 for state in history(rule, found_infs))


@given(overflows)
def test_a_static_scale_never_moves_and_never_skips(found_infs):
    rule = StaticScale(128)
    states = history(rule, found_infs)
    assert {state.scale for state in states} == {128.0}
    assert not rule.skips_on_overflow
    clean = 0
    for found_inf in found_infs:
        clean = 0 if found_inf else clean + 1
    assert states[-1].clean_steps == clean


def test_a_dynamic_scale_skips():
    assert DynamicScale().skips_on_overflow


def test_growth_beyond_float32_is_dropped():
    rule = DynamicScale(init_scale=2.0**127, growth_interval=1)
    assert rule.next(rule.start(), found_inf=False) == ScaleState(2.0**127, 0)


def test_without_a_floor_the_scale_collapses_and_with_one_it_does_not():
    assert history(DynamicScale(), [True] * 166)[-1].scale == 0.0
    assert history(DynamicScale(), [True] * 165)[-1].scale == 2.0**-149
    smallest_normal = 2.0**-126
    assert history(DynamicScale(floor=smallest_normal), [True] * 10_000)[-1].scale == smallest_normal


def test_an_interval_made_shorter_than_the_count_still_grows():
    assert DynamicScale(growth_interval=5).next(ScaleState(8.0, 90), found_inf=False) == ScaleState(16.0, 0)


def test_starts_between_floor_and_ceiling():
    assert DynamicScale(init_scale=2.0**20, ceiling=4.0).start().scale == 4.0
    assert DynamicScale(init_scale=1.0, floor=4.0).start().scale == 4.0


def test_the_published_defaults():
    assert asdict(TORCH_DYNAMIC) == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "floor": None,
        "ceiling": None,
    }
    assert asdict(APEX_DYNAMIC) == {**asdict(TORCH_DYNAMIC), "ceiling": 16777216.0}


def test_values_are_frozen():
    with pytest.raises(FrozenInstanceError):
        TORCH_DYNAMIC.init_scale = 1.0
    with pytest.raises(FrozenInstanceError):
        TORCH_DYNAMIC.start().scale = 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0:"),
        ({"init_scale": math.nan}, "init_scale=nan:"),
        ({"init_scale": math.inf}, "init_scale=inf:"),
        ({"growth_factor": 0.5}, "growth_factor=0.5:"),
        ({"growth_factor": 1.0}, "growth_factor=1.0:"),
        ({"growth_factor": math.nan}, "growth_factor=nan:"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0:"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0:"),
        ({"growth_interval": 0}, "growth_interval=0:"),
        ({"growth_interval": 2.5}, "growth_interval=2.5:"),
        ({"growth_interval": math.nan}, "growth_interval=nan:"),
        ({"growth_interval": math.inf}, "growth_interval=inf:"),
        ({"floor": -1.0}, "floor=-1.0:"),
        ({"ceiling": 0}, "ceiling=0:"),
        ({"floor": 8.0, "ceiling": 4.0}, "floor=8.0 is above ceiling=4.0"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as refusal:
        DynamicScale(**arguments)
    assert len(refusal.value.args) == 1


@pytest.mark.parametrize("scale", [0, -128.0, math.nan, math.inf])
def test_a_nonsense_static_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale=.*> 0"):
        StaticScale(scale)


@pytest.mark.parametrize("scale", ["dynamic", None])
def test_a_scale_that_is_not_a_number_is_refused(scale):
    with pytest.raises(TypeError, match=r"expected a number"):
        StaticScale(scale)
