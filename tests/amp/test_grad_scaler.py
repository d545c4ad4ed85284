"""GradScaler, row by row of torch's contract, with torch's own class as the oracle wherever both do the same."""

import copy
import inspect
import pickle
import re

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

import amplab
from amplab.amp import GradScaler

INF = float("inf")
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


# -- __init__ --------------------------------------------------------------------------------------


def test_it_is_one_of_torchs_and_stands_in_three_places():
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    assert amplab.GradScaler is amplab.amp.GradScaler is GradScaler


def test_arguments_and_defaults_are_torchs_and_then_its_own():
    ours, theirs = (inspect.signature(each).parameters for each in (GradScaler, torch.amp.GradScaler))
    assert [(name, ours[name].default) for name in theirs] == [(name, theirs[name].default) for name in theirs]
    assert [name for name in ours if name not in theirs] == ["rule", "floor"]
    assert GradScaler("cpu", 8.0, 3.0, 0.25, 7, True).state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


@BOTH
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_without_cuda_it_warns_and_is_disabled(scaler_type):
    with pytest.warns(UserWarning, match=r"is enabled, but CUDA is not available.  Disabling.") as caught:
        scaler = scaler_type()
    assert not scaler.is_enabled()
    assert caught[0].filename == __file__
    assert not scaler_type(enabled=False).is_enabled()  # no warning


@BOTH
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"growth_factor": 1.0}, "The growth factor must be > 1.0."),
        ({"backoff_factor": 1.0}, "The backoff factor must be < 1.0."),
    ],
)
def test_factors_that_do_not_grow_or_shrink_are_refused(scaler_type, numbers, message):
    with pytest.raises(AssertionError, match=message):
        scaler_type("cpu", **numbers)
    assert not scaler_type("cpu", enabled=False, **numbers).is_enabled()


@BOTH
def test_all_else_is_taken_as_it_comes(scaler_type):
    for device in ("bogus", torch.device("cpu")):
        assert scaler_type(device).is_enabled()
    for numbers in ({"growth_interval": -1}, {"init_scale": 0}, {"init_scale": -4.0}, {"backoff_factor": -1.0}):
        assert scaler_type("cpu", **numbers).is_enabled()


# -- scale -----------------------------------------------------------------------------------------


@BOTH
def test_scale_multiplies_tensors_to_any_depth(scaler_type):
    scaler = scaler_type("cpu", init_scale=4.0)
    one, two = torch.tensor(1.0), torch.tensor([2.0, 3.0])
    assert scaler.scale(one).item() == 4.0
    scaled = scaler.scale([one, (two, [one])])
    assert type(scaled) is list
    assert type(scaled[1]) is tuple
    assert scaled[1][0].tolist() == [8.0, 12.0]
    assert scaled[1][1][0].item() == 4.0
    lazy = scaler.scale(each for each in (one, one))
    assert type(lazy) is map
    assert [each.item() for each in lazy] == [4.0, 4.0]
    assert type(scaler.scale({one: 0})) is map
    assert type(scaler.scale("ab")) is map


@BOTH
@pytest.mark.parametrize("outputs", [1.0, None])
def test_scale_refuses_what_is_neither_tensor_nor_iterable(scaler_type, outputs):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler_type("cpu").scale(outputs)


@BOTH
def test_the_first_scale_makes_the_tensors(scaler_type):
    scaler = scaler_type("cpu", init_scale=4)
    assert scaler._scale is None
    assert scaler.get_scale() == 4
    assert type(scaler.get_scale()) is int
    scaler.scale([torch.tensor(1.0)])
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.shape) == (torch.int32, ())
    assert type(scaler.get_scale()) is float


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_product_has_torchs_dtype(scaler_type, dtype):
    scaler = scaler_type("cpu", init_scale=4.0)
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert scaler.scale(torch.tensor(1.0, dtype=dtype)).dtype is torch.result_type(
        torch.ones((), dtype=dtype), torch.ones((), dtype=torch.float32)
    )
    assert scaler.scale(torch.tensor(1.0, dtype=dtype)).dtype is expected
    assert scaler.scale(torch.ones(2, dtype=dtype)).dtype is dtype


@BOTH
def test_a_disabled_scale_returns_what_it_got(scaler_type):
    scaler = scaler_type("cpu", enabled=False)
    for outputs in (torch.ones(2), [torch.ones(2)], 1.0, "ab", None):
        assert scaler.scale(outputs) is outputs


# -- unscale_ --------------------------------------------------------------------------------------


@BOTH
def test_unscale_divides_and_records_a_verdict_for_each_device(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu", init_scale=8.0)
    backward(scaler, parameter)
    assert scaler.unscale_(optimizer) is None
    assert parameter.grad.item() == 2.0
    row = scaler._per_optimizer_states[id(optimizer)]
    assert row["stage"] is OptState.UNSCALED
    ((device, found_inf),) = row["found_inf_per_device"].items()
    assert device == torch.device("cpu")
    assert (found_inf.shape, found_inf.dtype, found_inf.item()) == ((), torch.float32, 0.0)
    assert scaler._found_inf_per_device(optimizer) is row["found_inf_per_device"]


@BOTH
def test_unscale_of_no_gradients_is_unscaled_and_says_nothing_yet(scaler_type):
    _, optimizer = one_parameter()
    scaler = scaler_type("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.unscale_(optimizer)
    row = scaler._per_optimizer_states[id(optimizer)]
    assert (row["stage"], row["found_inf_per_device"]) == (OptState.UNSCALED, {})
    with pytest.raises(AssertionError, match=r"No inf checks were recorded for this optimizer."):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update."):
        scaler.update()


@BOTH
def test_half_gradients_are_refused(scaler_type):
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = scaler_type("cpu", init_scale=2.0)
    backward(scaler, parameter)
    for method in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients."):
            method(optimizer)
    assert parameter.grad.item() == 4.0


@BOTH
def test_a_parameter_that_is_no_tensor_is_refused(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu")
    backward(scaler, parameter)
    optimizer.param_groups[0]["params"].append("weight")
    with pytest.raises(AssertionError, match=r"expected param to be torch.Tensor, got str"):
        scaler.unscale_(optimizer)


@BOTH
@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1000.1, 0.1, 2.0**-20])
def test_the_reciprocal_is_taken_in_float64(scaler_type, scale):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([1.2345678])
    scaler.unscale_(optimizer)
    inverse = torch.tensor(1.0 / torch.tensor(scale).item(), dtype=torch.float32)
    assert parameter.grad.item() == (torch.tensor(1.2345678) * inverse).item()


# -- step ------------------------------------------------------------------------------------------


@BOTH
def test_a_closure_keyword_is_refused(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu")
    backward(scaler, parameter)
    with pytest.raises(RuntimeError, match=r"Closure use is not currently supported if GradScaler is enabled."):
        scaler.step(optimizer, closure=lambda: 0.0)


@BOTH
def test_step_returns_what_the_optimizer_returns_and_none_when_it_skips(scaler_type):
    class Returning(torch.optim.SGD):
        def step(self, closure=None, *, extra=0):
            super().step()
            return 40 + extra

    parameter = nn.Parameter(torch.ones(1))
    optimizer = Returning([parameter], lr=0.5)
    scaler = scaler_type("cpu", init_scale=4.0)
    backward(scaler, parameter)
    assert scaler.step(optimizer, extra=2) == 42
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, parameter, INF)
    assert scaler.step(optimizer) is None
    assert parameter.item() == 0.0  # from the first step alone


@BOTH
def test_a_disabled_step_steps_and_takes_closures(scaler_type):
    parameter, optimizer = one_parameter()
    parameter.grad = torch.tensor([INF])
    scaler = scaler_type("cpu", enabled=False)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    assert parameter.item() == -INF
    scaler.unscale_(optimizer)
    scaler.update()


@BOTH
def test_gradients_that_go_bad_after_unscale_are_stepped(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu")
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    parameter.grad.fill_(INF)
    scaler.step(optimizer)
    assert parameter.item() == -INF


@BOTH
def test_the_stages_of_an_optimizer(scaler_type):
    parameter, optimizer = one_parameter()
    scaler = scaler_type("cpu")
    backward(scaler, parameter)
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last update\(\)."
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)."):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)."):
        scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


@BOTH
@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_before_any_scale_nothing_else_goes(scaler_type, method):
    parameter, optimizer = one_parameter()
    parameter.grad = torch.ones(1)
    arguments = (4.0,) if method == "update" else (optimizer,)
    message = re.escape(
        f"Attempted {method} but _scale is None.  This may indicate your script did not use "
        "scaler.scale(loss or outputs) earlier in the iteration."
    )
    with pytest.raises(AssertionError, match=message):
        getattr(scaler_type("cpu"), method)(*arguments)


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
        {"growth_interval": -1},
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
def test_the_numbers_have_getters_and_unchecked_setters(scaler_type):
    scaler = scaler_type("cpu")
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    scaler.set_growth_factor(0.5)
    scaler.set_backoff_factor(3.0)
    scaler.set_growth_interval(-1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.5, 3.0, -1)
    assert scaler._get_growth_tracker() == 0


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
