"""What torch's GradScaler gets wrong, each with a test that shows it there and shows that it is not here."""

import collections

import pytest
import torch
from torch import nn

from amplab.amp import GradScaler

INF = float("inf")
TORCH = torch.amp.GradScaler


def one_parameter(optimizer_type=torch.optim.SGD, **options):
    parameter = nn.Parameter(torch.ones(1))
    return parameter, optimizer_type([parameter], **{"lr": 0.5, **options})


def overflow(scaler, times):
    parameter, optimizer = one_parameter()
    for _ in range(times):
        scaler.scale(parameter.sum() * INF).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scale_of_zero():
    theirs, ours = TORCH("cpu"), GradScaler("cpu")
    overflow(theirs, 200)
    assert theirs.get_scale() == 0.0
    with pytest.warns(UserWarning, match="The loss scale has collapsed"):
        overflow(ours, 200)
    assert ours.get_scale() == torch.finfo(torch.float32).tiny
    parameter, optimizer = one_parameter()
    ours.scale(parameter.sum()).backward()
    ours.step(optimizer)
    assert parameter.item() == 0.5  # 1 - 0.5: it goes on from there


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_uninitialised_momentum_of_fused_sgd_after_a_skipped_first_step(dampening):
    parameters = []
    for fused in (True, False):
        parameter, optimizer = one_parameter(momentum=0.9, dampening=dampening, fused=fused)
        scaler = GradScaler("cpu")
        for fault in (INF, 1.0, 1.0):
            scaler.scale(parameter.square().sum() * fault).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert fault == 1.0 or (not scaler.last_step.stepped and not optimizer.state)
        parameters.append(parameter)
    assert torch.equal(*parameters)


def test_momentum_that_another_group_makes_late_is_made_of_finite_gradients_too():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.5, momentum=0.9, fused=True)
    scaler = GradScaler("cpu")
    for used, fault in (([first], 1.0), ([first, second], INF), ([first, second], 1.0)):
        scaler.scale(sum(used).sum() * fault).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[second]["momentum_buffer"].item() == 1.0
    assert second.item() == 0.5


def test_attributes_that_a_disabled_scaler_lacks():
    theirs, ours = TORCH("cpu", enabled=False), GradScaler("cpu", 8.0, 3.0, 0.25, 7, enabled=False)
    with pytest.raises(AttributeError):
        theirs.get_growth_factor()
    assert (ours.get_growth_factor(), ours.get_backoff_factor(), ours.get_growth_interval()) == (3.0, 0.25, 7)
    assert ours._scale is None
    assert ours.rule is None


Losses = collections.namedtuple("Losses", ["main", "auxiliary"])


def test_namedtuples():
    losses = Losses(torch.tensor(1.0), [torch.tensor(2.0)])
    with pytest.raises(TypeError):
        TORCH("cpu").scale(losses)
    scaled = GradScaler("cpu", init_scale=4.0).scale(losses)
    assert type(scaled) is Losses
    assert (scaled.main.item(), scaled.auxiliary[0].item()) == (4.0, 8.0)


def test_a_new_scale_of_shape_1_and_an_integer():
    theirs, ours = TORCH("cpu"), GradScaler("cpu")
    for scaler in (theirs, ours):
        scaler.scale(torch.ones(()))
    with pytest.raises(AttributeError):
        theirs.update(2)
    for given in (torch.tensor([3.0]), torch.tensor(3), 3):
        ours.update(1.0)
        ours.update(given)
        assert ours.get_scale() == 3.0
    with pytest.raises(TypeError, match="new_scale='3': expected a number"):
        ours.update("3")


def test_a_half_loss_of_one_element():
    loss = torch.ones(1, dtype=torch.float16)
    assert TORCH("cpu").scale(loss).isinf()
    scaled = GradScaler("cpu").scale(loss)
    assert (scaled.dtype, scaled.shape, scaled.item()) == (torch.float32, (1,), 65536.0)


def test_an_overflow_that_the_unscaling_makes():
    steps = []
    for scaler_type in (TORCH, GradScaler):
        parameter, optimizer = one_parameter()
        scaler = scaler_type("cpu", init_scale=2.0**-20)
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([2.0**120])
        scaler.step(optimizer)
        steps.append(parameter.item())
    assert steps == [-INF, 1.0]


def test_a_positional_closure():
    def closure():
        raise AssertionError("called")

    parameter, optimizer = one_parameter()
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    for arguments, keywords in (((closure,), {}), ((), {"closure": closure}), ((), {"closure": None})):
        with pytest.raises(RuntimeError, match=r"Closure use is not currently supported if GradScaler is enabled."):
            scaler.step(optimizer, *arguments, **keywords)
    scaler.step(optimizer, None)
    assert parameter.item() == 0.5


# -- a parameter that two optimizers step ----------------------------------------------------------


def shared(first, second):
    parameter = nn.Parameter(torch.ones(1))
    make = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.25),
        "fused": lambda: torch.optim.SGD([parameter], lr=0.25, fused=True),
        "foreach": lambda: torch.optim.SGD([parameter], lr=0.25, foreach=True),
    }
    return parameter, [make[first](), make[second]()]


def test_a_shared_parameter_is_unscaled_twice_by_torch():
    parameter, optimizers = shared("sgd", "sgd")
    scaler = TORCH("cpu", init_scale=8.0)
    scaler.scale((parameter * 2.0).sum()).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert parameter.grad.item() == 0.25


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("second", ["sgd", "fused", "foreach"])
@pytest.mark.parametrize("first", ["sgd", "fused", "foreach"])
def test_a_shared_parameter_is_unscaled_once(first, second, unscale_first):
    parameter, optimizers = shared(first, second)
    scaler = GradScaler("cpu", init_scale=8.0)
    expected = 1.0
    for fault in (1.0, 1.0, INF, 1.0):
        parameter.grad = None
        scaler.scale((parameter * 2.0).sum() * fault).backward()
        for optimizer in optimizers if unscale_first else ():
            scaler.unscale_(optimizer)
            assert fault != 1.0 or parameter.grad.item() == 2.0
        for optimizer in optimizers:
            scaler.step(optimizer)
            expected -= 0.25 * 2.0 if fault == 1.0 else 0.0
            assert parameter.item() == expected
        scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_other_gradients_of_a_skipped_fused_step_are_still_unscaled_by_the_next_optimizer():
    bad, both = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    fused = torch.optim.Adam([bad, both], lr=0.25, fused=True)
    plain = torch.optim.SGD([both], lr=0.25)
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        both.grad = bad.grad = None
        scaler.scale((both * 2.0 + bad * INF).sum()).backward()
        before = both.item()
        scaler.step(fused)
        assert both.item() == before
        scaler.step(plain)
        assert both.item() == before - 0.25 * 2.0
        scaler.update(8.0)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_shared_gradient_of_another_backward_is_unscaled_again(set_to_none):
    parameter, optimizers = shared("sgd", "sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale((parameter * 2.0).sum()).backward()
            scaler.unscale_(optimizer)
            assert parameter.grad.item() == 2.0
        scaler.update()
