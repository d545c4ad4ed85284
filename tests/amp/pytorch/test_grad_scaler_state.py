"""What a GradScaler says of a rule or a saved state that is none, or is another's."""

import warnings

import pytest
import torch

from amplab.amp import GradScaler
from amplab.scalers import ApexScale, DeepSpeedScale, DynamicScale, StaticScale, floored, replay

SAVED = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 3}
RULES = [None, DynamicScale(), StaticScale(8.0), DeepSpeedScale(), ApexScale()]

REFUSED = [
    (
        None,
        TypeError,
        "an object of type NoneType: expected the dict that state_dict() returned; with a checkpoint pass",
    ),
    ([1], TypeError, "an object of type list: expected the dict"),
    ({}, RuntimeError, "The source state dict is empty"),
    (
        {"scale": 8.0},
        KeyError,
        "growth_factor: expected scale, growth_factor, backoff_factor, growth_interval, _growth_",
    ),
    ({"loss_scaler0": {}}, KeyError, "amp.state_dict() wrote this: use amp.load_state_dict."),
    (SAVED | {"scale": "x"}, ValueError, "state_dict['scale'] = 'x': expected a finite number >= 0"),
    (SAVED | {"scale": -1.0}, ValueError, "state_dict['scale'] = -1.0: expected a finite number >= 0"),
    (SAVED | {"scale": float("nan")}, ValueError, "state_dict['scale'] = nan: expected a finite number >= 0"),
    (SAVED | {"scale": float("inf")}, ValueError, "state_dict['scale'] = inf: expected a finite number >= 0"),
    (SAVED | {"scale": True}, ValueError, "state_dict['scale'] = True: expected a finite number >= 0"),
    (SAVED | {"growth_factor": None}, ValueError, "state_dict['growth_factor'] = None: expected a finite number"),
    (SAVED | {"growth_interval": 2.5}, ValueError, "state_dict['growth_interval'] = 2.5: expected a whole number"),
    (SAVED | {"_growth_tracker": -3}, ValueError, "state_dict['_growth_tracker'] = -3: expected a whole number"),
    (
        SAVED | {"rule_state": 3},
        ValueError,
        "state_dict['rule_state'] = 3: expected the dict that state_dict() returned",
    ),
    (SAVED | {"losses": 3}, ValueError, "state_dict['losses'] = 3: expected a list of states"),
    (SAVED | {"losses": [3]}, ValueError, "The state has 2 losses, and this scaler has num_losses=1"),
]


@pytest.mark.parametrize("rule", [None, DynamicScale()], ids=["torchs", "rule"])
@pytest.mark.parametrize(("saved", "error", "said"), REFUSED, ids=[said[:40] for _, _, said in REFUSED])
def test_states_that_are_none_are_refused_and_change_nothing(rule, saved, error, said):
    scaler = GradScaler("cpu", rule=rule)
    before = scaler.state_dict()
    with pytest.raises(error) as refusal:
        scaler.load_state_dict(saved)
    assert said in str(refusal.value)
    assert scaler.state_dict() == before


def test_the_state_of_one_of_several_losses_is_looked_at_too():
    scaler = GradScaler("cpu", num_losses=2)
    with pytest.raises(ValueError, match=r"^state_dict\['scale'\] = -1: expected"):
        scaler.load_state_dict(SAVED | {"losses": [SAVED | {"scale": -1}]})
    assert scaler.get_scale(0) == 2.0**16


@pytest.mark.parametrize("rule", [None, DynamicScale()], ids=["torchs", "rule"])
def test_a_scale_of_0_becomes_the_floor_and_a_tensor_its_number(rule):
    scaler = GradScaler("cpu", rule=rule, floor=4.0)
    scaler.load_state_dict(SAVED | {"scale": 0.0})
    assert scaler.get_scale() == 4.0
    scaler.load_state_dict(SAVED | {"scale": torch.tensor(16.0)})
    assert (scaler.get_scale(), type(scaler.get_scale())) == (16.0, float)


@pytest.mark.parametrize("into", RULES, ids=repr)
@pytest.mark.parametrize("of", RULES[1:], ids=repr)
def test_the_state_of_another_rule_is_warned_of(of, into):
    saved = GradScaler("cpu", rule=of).state_dict()
    scaler = GradScaler("cpu", rule=into)
    if type(of) is type(into) or (into is None and isinstance(of, DynamicScale)):  # torch's, in its two forms
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.load_state_dict(saved)
    else:
        own = "torch's own rule" if into is None else type(into).__name__
        said = rf"^The state was saved with {type(of).__name__}, and this GradScaler has {own}: the scale continues"
        with pytest.warns(UserWarning, match=said) as told:
            scaler.load_state_dict(saved)
        assert told[0].filename == __file__
    assert scaler.get_scale() == saved["scale"]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_state_of_torchs_own_class_goes_to_any_rule(rule, recwarn):
    scaler = GradScaler("cpu", rule=rule)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert scaler.get_scale() == 8.0
    assert not recwarn.list


def test_torchs_own_class_loads_the_state_of_a_rule():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu", rule=StaticScale(8.0)).state_dict())
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("rule", ["apex", 3, DynamicScale, dict])
@pytest.mark.parametrize(
    "take",
    [
        lambda rule: GradScaler("cpu", rule=rule),
        lambda rule: GradScaler("cpu").follow(rule),
        lambda rule: replay(rule, [True]),
        lambda rule: floored(rule, None),
    ],
)
def test_what_is_no_rule_is_refused(take, rule):
    given = rule.__name__ if isinstance(rule, type) else repr(rule)
    example = given if isinstance(rule, type) else "DynamicScale"
    with pytest.raises(
        TypeError, match=f"^rule={given}: expected an instance of a scaling rule; pass one such as {example}"
    ):
        take(rule)
