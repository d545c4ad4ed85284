"""FusedAdagrad, FusedAdadelta and FusedRMSprop: torch's rules over fifty steps, and torch's state_dict."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import Adadelta, Adagrad, RMSprop

from amplab.optimizers import FusedAdadelta, FusedAdagrad, FusedRMSprop

LIMIT = 4e-6  # of the largest weight, after 50 steps in float32, each operation rounded by itself
TWINS = {FusedAdagrad: Adagrad, FusedAdadelta: Adadelta, FusedRMSprop: RMSprop}
CASES = [
    (FusedAdagrad, {}),
    (FusedAdagrad, {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    (FusedAdagrad, {"maximize": True}),
    (FusedAdadelta, {}),
    (FusedAdadelta, {"lr": 0.5, "rho": 0.95, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    (FusedRMSprop, {"lr": 1e-3}),
    (FusedRMSprop, {"lr": 1e-3, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    (FusedRMSprop, {"lr": 1e-3, "momentum": 0.9}),
    (FusedRMSprop, {"lr": 1e-3, "centered": True, "eps": 1e-2}),
    (FusedRMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.8, "eps": 1e-2, "maximize": True}),
]


@pytest.mark.parametrize(("ours", "options"), CASES)
def test_fifty_steps_are_torchs(model_of, train, gap, ours, options):
    mine, theirs, exact = model_of(), model_of(), model_of().double()
    train(ours(mine.parameters(), **options), list(mine.parameters()), 50)
    train(TWINS[ours](theirs.parameters(), **options), list(theirs.parameters()), 50)
    train(TWINS[ours](exact.parameters(), **options), list(exact.parameters()), 50)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    assert gap(mine.parameters(), exact.parameters()) < LIMIT
    assert gap(mine.parameters(), model_of().parameters()) > 1e-3


@pytest.mark.parametrize(("ours", "options"), CASES)
def test_state_goes_to_torch_and_training_goes_on(model_of, train, gap, ours, options):
    mine, theirs = model_of(), model_of()
    first = ours(mine.parameters(), **options)
    train(first, list(mine.parameters()), 7)
    theirs.load_state_dict(mine.state_dict())
    second = TWINS[ours](theirs.parameters())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, list(mine.parameters()), 5, seed=2)
    train(second, list(theirs.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT
    left = [optimizer.state_dict()["state"][0] for optimizer in (first, second)]
    assert left[0].keys() == left[1].keys()
    assert left[0]["step"].item() == left[1]["step"].item() == 12.0


@pytest.mark.parametrize(("ours", "options"), CASES)
def test_state_comes_from_torch_and_training_goes_on(model_of, train, gap, ours, options):
    mine, theirs = model_of(), model_of()
    first = TWINS[ours](theirs.parameters(), **options)
    train(first, list(theirs.parameters()), 7)
    mine.load_state_dict(theirs.state_dict())
    second = ours(mine.parameters())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, list(theirs.parameters()), 5, seed=2)
    train(second, list(mine.parameters()), 5, seed=2)
    assert gap(mine.parameters(), theirs.parameters()) < LIMIT


@pytest.mark.parametrize("ours", TWINS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), "state_dict"])
def test_a_copy_of_half_training_goes_on_to_the_bit(model_of, train, ours, way):
    model = model_of(torch.float16)
    optimizer = ours(model.parameters(), lr=1e-3)
    train(optimizer, list(model.parameters()), 5)
    if way == "state_dict":
        other = copy.deepcopy(model)
        twin = ours(other.parameters())
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other, twin = way((model, optimizer))
    train(optimizer, list(model.parameters()), 5, seed=2)
    train(twin, list(other.parameters()), 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    kept = optimizer.state_dict()["state"][0]
    assert {value.dtype for value in kept.values()} == {torch.float32}


def test_the_decay_of_adagrads_w_mode_is_not_adapted():
    weights = []
    for decoupled in (True, False):
        weight = nn.Parameter(torch.full((3,), 2.0))
        weight.grad = torch.full((3,), 1e-6)
        FusedAdagrad([weight], lr=0.1, weight_decay=0.5, adagrad_w_mode=decoupled).step()
        weights.append(weight[0].item())
    # g / sqrt(g^2) is 1 in either mode; the decay is lr wd p = 0.1 beside it, and nothing through it.
    assert weights == pytest.approx([2.0 - 0.1 - 0.1, 2.0 - 0.1], abs=1e-4)


def test_a_momentum_may_begin_later(model_of, train, gap):
    models = [model_of(), model_of()]
    pair = [FusedRMSprop(models[0].parameters(), lr=1e-3), RMSprop(models[1].parameters(), lr=1e-3)]
    for optimizer, model in zip(pair, models, strict=True):
        train(optimizer, list(model.parameters()), 3)
        optimizer.param_groups[0]["momentum"] = 0.9
        for param in model.parameters():
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        train(optimizer, list(model.parameters()), 3)
    assert gap(models[0].parameters(), models[1].parameters()) < LIMIT


@pytest.mark.parametrize("ours", TWINS)
def test_they_are_torchs_classes_with_torchs_checks(ours):
    weight = [nn.Parameter(torch.ones(1))]
    assert isinstance(ours(weight), TWINS[ours])
    with pytest.raises(ValueError, match=r"lr|learning rate"):
        ours(weight, lr=-1.0)


def test_the_defaults_are_apexs():
    weight = [nn.Parameter(torch.ones(1))]
    assert {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": False}.items() <= FusedAdagrad(
        weight
    ).defaults.items()
    assert FusedAdagrad(weight, 0.1, 1e-9, 0.2, False, True).defaults["adagrad_w_mode"] is True
