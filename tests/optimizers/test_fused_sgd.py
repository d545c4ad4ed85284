"""FusedSGD: torch's rule over many steps, torch's state_dict, apex's arguments."""

import copy
import pickle

import pytest
import torch
from torch import nn

from amplab.amp import GradScaler
from amplab.optimizers import FusedSGD

LIMIT = 4e-6
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fifty_steps_are_torchs(serving, model_of, train, gap, options):
    mine, theirs, exact = model_of(), model_of(), model_of().double()
    train(FusedSGD(mine.parameters(), lr=0.01, **options), list(mine.parameters()), 50)
    train(torch.optim.SGD(theirs.parameters(), lr=0.01, fused=True, **options), list(theirs.parameters()), 50)
    train(torch.optim.SGD(exact.parameters(), lr=0.01, **options), list(exact.parameters()), 50)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert gap(mine.parameters(), exact.parameters()) < LIMIT
    assert gap(mine.parameters(), model_of().parameters()) > 1e-3


def test_decay_after_the_momentum_is_apexs_formula(serving, train, gap):
    start = torch.linspace(-1, 1, 33)
    weight = nn.Parameter(start.clone())
    train(FusedSGD([weight], 0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True), [weight], 10)
    generator = torch.Generator().manual_seed(1)
    p, b = start.double(), torch.zeros(33).double()
    for _ in range(10):
        b = 0.9 * b + torch.randn(33, generator=generator).double()
        p = p - 0.1 * (b + 0.1 * p)
    assert gap([weight.detach()], [p]) < LIMIT


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("make_scaler", [GradScaler, torch.amp.GradScaler])
def test_momentum_begins_with_the_first_step_that_is_not_skipped(model_of, train, gap, make_scaler, dampening):
    mine, theirs = model_of(), model_of()
    options = {"lr": 0.01, "momentum": 0.9, "dampening": dampening}
    optimizer = FusedSGD(mine.parameters(), **options)
    train(optimizer, list(mine.parameters()), 6, spoil=(0, 1), scaler=make_scaler("cpu", init_scale=8.0))
    twin = torch.optim.SGD(theirs.parameters(), **options)
    train(twin, list(theirs.parameters()), 6, spoil=(0, 1), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fused", [True, None])
def test_state_goes_to_torch_and_back(model_of, train, gap, fused, momentum):
    mine, theirs = model_of(), model_of()
    options = {"lr": 0.01, "momentum": momentum}
    first, second = FusedSGD(mine.parameters(), **options), torch.optim.SGD(theirs.parameters(), fused=fused, **options)
    train(first, list(mine.parameters()), 5)
    theirs.load_state_dict(mine.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, list(mine.parameters()), 5, seed=2)
    train(second, list(theirs.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys()
    again = model_of()
    again.load_state_dict(theirs.state_dict())
    third = FusedSGD(again.parameters(), lr=1.0)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    train(second, list(theirs.parameters()), 5, seed=3)
    train(third, list(again.parameters()), 5, seed=3)
    assert gap(again.parameters(), theirs.parameters()) < LIMIT


def test_a_state_of_torch_before_its_first_step(model_of, train):
    weight, theirs = nn.Parameter(torch.ones(3)), torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1, momentum=0.9)
    saved = theirs.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    optimizer = FusedSGD([weight], 0.1, momentum=0.9)
    optimizer.load_state_dict(saved)
    train(optimizer, [weight], 2)
    assert not torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_go_on_to_the_bit(model_of, train, way):
    model = model_of(torch.bfloat16)
    optimizer = FusedSGD(model.parameters(), 0.01, momentum=0.9, master_weights=True, max_grad_norm=1.0)
    train(optimizer, list(model.parameters()), 3)
    other, twin = way((model, optimizer))
    train(optimizer, list(model.parameters()), 3, seed=2)
    train(twin, list(other.parameters()), 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_schedule_that_begins_a_momentum(model_of, train, gap):
    mine, theirs = model_of(), model_of()
    for make, model in ((FusedSGD, mine), (torch.optim.SGD, theirs)):
        optimizer = make(model.parameters(), lr=0.01)
        train(optimizer, list(model.parameters()), 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, list(model.parameters()), 4)
        optimizer.param_groups[0]["momentum"] = 0.0
        train(optimizer, list(model.parameters()), 2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


def test_what_zero_grad_leaves():
    weight = nn.Parameter(torch.ones(1))
    optimizer = FusedSGD([weight], lr=0.1, materialize_master_grads=False)
    weight.grad = torch.ones(1)
    optimizer.zero_grad()
    assert weight.grad.item() == 0.0
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None


def test_numbers_out_of_range_are_torchs_to_refuse():
    with pytest.raises(ValueError, match="Nesterov"):
        FusedSGD([nn.Parameter(torch.ones(1))], lr=0.1, nesterov=True)


@pytest.mark.parametrize("resumed", ["load_state_dict", "a copied group"])
def test_settings_hold_after_the_state_was_loaded(resumed):
    """Without momentum the state is the same before and after, and the groups are others."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([parameter], lr=1.0)

    def moved():
        before = parameter.detach().clone()
        parameter.grad = torch.ones(3)
        optimizer.step()
        return (before - parameter.detach()).tolist()

    assert moved() == [1.0] * 3
    if resumed == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.25
    assert moved() == [0.25] * 3
