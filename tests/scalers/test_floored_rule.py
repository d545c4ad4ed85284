"""A floor under any rule: the rule's own scales above it, never one below it, in the same device form."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.scalers import (
    PUBLISHED_RULES,
    ApexScale,
    DynamicScale,
    HostScale,
    RecurrentScale,
    ScaleState,
    StaticScale,
    device_scale,
    floored,
)


@dataclasses.dataclass(frozen=True)
class Dropping:
    """A rule that knows no floor."""

    skips_on_overflow: bool = True

    def start(self):
        return ScaleState(64.0)

    def next(self, state, found_inf):
        return ScaleState(state.scale / 8 if found_inf else state.scale, 0 if found_inf else state.clean_steps + 1)


@given(
    found=st.lists(st.booleans(), max_size=40),
    name=st.sampled_from([name for name in PUBLISHED_RULES if name != "DeepSpeed"]),
    floor=st.sampled_from([2.0**-126, 1.0, 2.0**15]),
)
def test_a_published_rule_with_a_floor_is_that_rule_with_its_scale_lifted(found, name, floor):
    rule = dataclasses.replace(PUBLISHED_RULES[name], growth_interval=10**6)
    state, bare = floored(rule, floor).start(), rule.start()
    device = device_scale(floored(rule, floor))
    for each in found:
        state, bare = floored(rule, floor).next(state, each), rule.next(bare, each)
        device.update_(torch.tensor(float(each)))
        assert state.scale == max(bare.scale, floor)
        assert state.clean_steps == bare.clean_steps
        assert device.state() == state


def test_a_user_defined_rule_gets_the_floor_too():
    rule = floored(Dropping(), 2.0)
    state = rule.start()
    for scale in (8.0, 2.0, 2.0):
        state = rule.next(state, True)
        assert state == ScaleState(scale)
    assert rule.next(state, False) == ScaleState(2.0, 1)
    assert rule.skips_on_overflow


def test_the_form_on_the_device_stays():
    assert isinstance(device_scale(floored(DynamicScale(), 1.0)), RecurrentScale)
    assert isinstance(device_scale(floored(Dropping(), 1.0)), HostScale)


def test_where_there_is_nothing_to_lift_the_rule_itself_comes_back():
    for rule, floor in ((DynamicScale(floor=2.0), 1.0), (StaticScale(4.0), 8.0), (DynamicScale(), None)):
        assert floored(rule, floor) is rule


def test_floors_that_are_refused():
    with pytest.raises(ValueError, match=r"floor=-1.0"):
        floored(DynamicScale(), -1.0)
    with pytest.raises(ValueError, match="is above the ceiling of"):
        floored(ApexScale(ceiling=2.0**10), 2.0**11)
