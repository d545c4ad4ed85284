"""GradScaler's update, numbers and checkpoints, row by row of torch's contract, with torch's class as the oracle."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from amplab.amp import GradScaler
from amplab.scalers import DynamicScale

INF, NAN = float("inf"), float("nan")
BOTH = pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, GradScaler], ids=["torch", "amplab"])


def one_parameter(value=1.0, **options):
    parameter = nn.Parameter(torch.tensor([value]))
    return parameter, torch.optim.SGD([parameter], lr=0.5, **options)


def backward(scaler, parameter, gradient=2.0):
    scaler.scale((parameter * gradient).sum()).backward()


def iterate(scaler, parameter, optimizer, gradient=2.0):
    backward(scaler, parameter, gradient)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# -- update ----------------------------------------------------------------------------------------


@BOTH
def test_update_takes_a_float_and_a_tensor(scaler_type):
    scaler = scaler_type("cpu", growth_interval=3)
    parameter, optimizer = one_parameter()
    iterate(scaler, parameter, optimizer)
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0
    assert scaler._get_growth_tracker() == 1
    given = torch.tensor(5.0)
    scaler.update(given)
    given.fill_(9.0)
    assert scaler.get_scale() == 5.0


@BOTH
@pytest.mark.parametrize(
    "new_scale",
    [torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")],
    ids=["two elements", "requires grad", "elsewhere"],
)
def test_update_refuses_tensors_that_are_no_scale(scaler_type, new_scale):
    scaler = scaler_type("cpu")
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


@BOTH
def test_update_without_checks_is_refused_and_unscale_is_enough(scaler_type):
    scaler = scaler_type("cpu")
    parameter, optimizer = one_parameter()
    backward(scaler, parameter, INF)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update."):
        scaler.update()
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert len(scaler._per_optimizer_states) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 2},
        {"growth_interval": 1, "init_scale": 3e38},
        {"growth_interval": 0},
        {"init_scale": 1000.1, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
    ],
    ids=str,
)
def test_the_scale_moves_as_torchs_does(settings):
    verdicts = [False, True, False, False, False, True, True, False, False, False, False]
    ours, theirs = GradScaler("cpu", **settings), torch.amp.GradScaler("cpu", **settings)
    for scaler in (ours, theirs):
        scaler.scale(torch.tensor(1.0))
    _, optimizer = one_parameter()
    for found in verdicts:
        for scaler in (ours, theirs):
            row = scaler._per_optimizer_states[id(optimizer)]
            row["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(0.5 if found else 0.0)}
            scaler.update()
        assert ours.state_dict() == theirs.state_dict()


@BOTH
def test_verdicts_of_all_optimizers_move_one_scale(scaler_type):
    (good, good_optimizer), (bad, bad_optimizer) = one_parameter(), one_parameter()
    scaler = scaler_type("cpu", init_scale=8.0)
    backward(scaler, good)
    backward(scaler, bad, INF)
    scaler.step(good_optimizer)
    scaler.step(bad_optimizer)
    scaler.update()
    assert (good.item(), bad.item(), scaler.get_scale()) == (0.0, 1.0, 4.0)


# -- numbers and checkpoints -----------------------------------------------------------------------


@BOTH
def test_the_numbers_have_getters_and_setters(scaler_type):
    scaler = scaler_type("cpu")
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    scaler.set_growth_interval(0)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.0, 1.0, 0)
    assert scaler._get_growth_tracker() == 0


BAD_NUMBERS = {
    "init_scale": [NAN, INF, -1.0, 0.0, 1e39],
    "growth_factor": [NAN, INF, -2.0, 0.0, 0.5],
    "backoff_factor": [NAN, INF, -0.5, 0.0, 1.5],
    "growth_interval": [-1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in BAD_NUMBERS.items() for value in bad])
def test_bad_numbers_are_refused_by_constructor_setter_and_checkpoint(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}: expected a")):
        GradScaler("cpu", **{name: value})
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    if name == "init_scale":
        entry, bad = "scale", value if value != 0.0 else -0.5  # torch's scale can fall to 0
    else:
        entry, bad = name, value
        with pytest.raises(ValueError, match=re.escape(f"{name}={value}: expected a")):
            getattr(scaler, f"set_{name}")(value)
    with pytest.raises(ValueError, match=re.escape(f"state_dict['{entry}'] = {bad!r}: expected a")):
        scaler.load_state_dict({**before, entry: bad})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "wrong",
    [{"_growth_tracker": -1}, {"_growth_tracker": 2**31}, {"growth_interval": 0.5}, {"growth_factor": True}]
    + [{"rule_state": bad} for bad in ([], {"scale": NAN}, {"scale": "1"}, {"clean_steps": -1})],
)  # fmt: skip
def test_a_checkpoint_with_other_bad_entries_changes_nothing(wrong):
    for scaler in (GradScaler("cpu"), GradScaler("cpu", rule=DynamicScale())):
        before = scaler.state_dict()
        with pytest.raises(ValueError, match="expected"):
            scaler.load_state_dict({**before, **wrong})
        assert scaler.state_dict() == before


@pytest.mark.parametrize("new_scale", [NAN, INF, -INF, -2.0, 0, 1e39])
@pytest.mark.parametrize("rule", [None, DynamicScale()])
def test_update_refuses_numbers_that_are_no_scale(rule, new_scale):
    scaler = GradScaler("cpu", rule=rule)
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(ValueError, match=re.escape(f"new_scale={new_scale}")):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("bad", [NAN, INF, -2.0, 0.0])
@pytest.mark.parametrize("rule", [None, DynamicScale()])
def test_a_tensor_that_is_no_scale_leaves_the_scale(rule, bad):
    scaler = GradScaler("cpu", rule=rule)
    scaler.scale(torch.tensor(1.0))
    for given, scale in ((bad, 2.0**16), (4.0, 4.0)):
        scaler.update(torch.tensor(given))
        assert scaler.get_scale() == scale


@BOTH
def test_what_a_disabled_scaler_says(scaler_type):
    scaler = scaler_type("cpu", enabled=False)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()) == (1.0, 0, {})
    scaler.load_state_dict({})
    scaler.load_state_dict({"scale": 4.0})
    assert scaler.get_scale() == 1.0
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@pytest.mark.parametrize("live", [False, True], ids=["before scale", "after scale"])
def test_state_dicts_go_between_torchs_class_and_this_one(live):
    saved = {"scale": 3.5, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 4}
    for source, target in ((torch.amp.GradScaler, GradScaler), (GradScaler, torch.amp.GradScaler)):
        first, second = source("cpu"), target("cpu")
        if live:
            first.scale(torch.ones(()))
            second.scale(torch.ones(()))
        scale = second._scale
        first.load_state_dict(saved)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == saved
        assert second._scale is scale  # in place


@BOTH
def test_state_dicts_that_are_refused(scaler_type):
    scaler = scaler_type("cpu")
    with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it was saved from a dis"):
        scaler.load_state_dict({})
    for missing in scaler.state_dict():
        damaged = {name: value for name, value in scaler.state_dict().items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            scaler.load_state_dict(damaged)


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_are_made_between_iterations_only(scaler_type, copied):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu", growth_interval=3)
    iterate(scaler, parameter, optimizer, INF)
    iterate(scaler, parameter, optimizer)
    twin = copied(scaler)
    assert twin.state_dict() == scaler.state_dict() == {**scaler.state_dict(), "scale": 2.0**15, "_growth_tracker": 1}
    assert twin._scale is None
    for each in (twin, scaler):
        iterate(each, parameter, optimizer)
    assert twin.state_dict() == scaler.state_dict()
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    with pytest.raises(
        AssertionError,
        match=re.escape(
            "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after scaler."
        ),
    ):
        copied(scaler)
    scaler.update()
    scaler._per_optimizer_states["read"]
    with pytest.raises(AssertionError, match="may only be pickled"):
        copied(scaler)


# -- names that callers rely on --------------------------------------------------------------------


@BOTH
def test_private_names_that_others_call(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu", init_scale=4.0)
    assert scaler._get_scale_async() is None
    assert (scaler._init_scale, scaler._init_growth_tracker) == (4.0, 0)
    backward(scaler, parameter)
    assert scaler._get_scale_async() is scaler._scale
    verdicts = scaler._unscale_grads_(optimizer, torch.tensor(0.25), torch.zeros(()), False)
    assert [each.item() for each in verdicts.values()] == [0.0]
    assert parameter.grad.item() == 2.0
    parameter.grad.fill_(INF)
    assert scaler._check_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0
    row = {"stage": OptState.UNSCALED, "found_inf_per_device": {torch.device("cpu"): torch.tensor(1.0)}}
    assert scaler._maybe_opt_step(optimizer, row) is None
    assert parameter.item() == 1.0
    row["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(0.0)}
    scaler._maybe_opt_step(optimizer, row)
    assert parameter.item() == -INF


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": "a"}, {"init_scale": None}, {"init_scale": [1.0]}, {"growth_factor": "2"},
        {"backoff_factor": None}, {"growth_interval": "100"}, {"growth_interval": 2.5},
    ],
)  # fmt: skip
def test_what_is_not_a_number_is_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r}: expected a ")):
        GradScaler("cpu", **wrong)


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), torch.tensor(2.0)])
def test_every_kind_of_number_is_a_scale(scale):
    assert GradScaler("cpu", init_scale=scale, growth_interval=np.int64(7)).scale(torch.ones(())).item() == 2.0


@pytest.mark.parametrize("wrong", [{"growth_factor": "2"}, {"backoff_factor": None}, {"growth_interval": "100"}])
def test_a_rule_refuses_by_name_what_is_not_a_number(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r}: expected a number")):
        DynamicScale(**wrong)
