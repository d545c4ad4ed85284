"""GradScaler's scale, unscale_ and step, row by row of torch's contract, with torch's own class as the oracle."""

import inspect
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


# -- __init__ --------------------------------------------------------------------------------------


def test_it_is_an_instance_of_torchs_and_available_under_three_names():
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    assert amplab.GradScaler is amplab.amp.GradScaler is GradScaler


def test_arguments_and_defaults_are_torchs_and_then_its_own():
    ours, theirs = (inspect.signature(each).parameters for each in (GradScaler, torch.amp.GradScaler))
    assert [(name, ours[name].default) for name in theirs] == [(name, theirs[name].default) for name in theirs]
    assert [name for name in ours if name not in theirs] == ["rule", "floor", "num_losses", "combine_grad"]
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


@pytest.mark.parametrize("numbers", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_factors_that_do_not_grow_or_shrink_are_refused(numbers):
    for scaler_type, error in ((torch.amp.GradScaler, AssertionError), (GradScaler, ValueError)):
        with pytest.raises(error, match="factor"):
            scaler_type("cpu", **numbers)
        assert not scaler_type("cpu", enabled=False, **numbers).is_enabled()


@BOTH
def test_the_device_is_not_checked(scaler_type):
    for device in ("bogus", torch.device("cpu")):
        assert scaler_type(device).is_enabled()


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
def test_a_parameter_that_is_not_a_tensor_is_refused(scaler_type):
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
def test_before_the_first_scale_other_calls_raise(scaler_type, method):
    parameter, optimizer = one_parameter()
    parameter.grad = torch.ones(1)
    arguments = (4.0,) if method == "update" else (optimizer,)
    message = re.escape(
        f"Attempted {method} but _scale is None.  This may indicate your script did not use "
        "scaler.scale(loss or outputs) earlier in the iteration."
    )
    with pytest.raises(AssertionError, match=message):
        getattr(scaler_type("cpu"), method)(*arguments)
