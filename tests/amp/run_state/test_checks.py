"""A run state that does not fit: what differs is named, and nothing is loaded."""

import re

import pytest
import torch
from torch import nn

from amplab import amp


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


def saved_run(path):
    torch.manual_seed(0)
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(8, 16)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    amp.save_run_state(path, model=model, optimizer=optimizer, scaler=scaler)


def wider():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))


def deeper():
    return nn.Sequential(*network(), nn.Linear(4, 4))


def shallower():
    return network()[:4]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backwards(model):
    return torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)


def grouped(model):
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


@pytest.mark.parametrize(
    ("make", "optimize", "said"),
    [
        (wider, sgd, ["model: 4.weight is (4, 32) in the file and (5, 32)", "4.bias is (4,)"]),
        (deeper, sgd, ["model: missing key(s) 5.weight, 5.bias", "groups of [6] parameters in the file and of [8]"]),
        (shallower, sgd, ["model: unexpected key(s) 4.weight, 4.bias"]),
        (network, backwards, ["optimizer: parameter 0 of group 0 is (32, 16) in the file and (4,)"]),
        (network, grouped, ["groups of [6] parameters in the file and of [1, 5]"]),
        (network, lambda model: torch.optim.Adam(model.parameters()), ["Adam needs betas, eps"]),
        (lambda: [network(), network()], lambda models: sgd(models[0]), ["the file has 1 model(s), and 2 were passed"]),
        (network, lambda model: [sgd(model), sgd(model)], ["the file has 1 optimizer(s), and 2 were passed"]),
    ],
    ids=["shape", "missing", "unexpected", "order", "groups", "optimizer", "models", "optimizers"],
)
def test_a_file_of_another_run_is_refused_and_nothing_is_loaded(tmp_path, make, optimize, said):
    path = tmp_path / "run.pt"
    saved_run(path)
    model = make()
    optimizer = optimize(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    models = model if isinstance(model, list) else [model]
    before = [{name: value.clone() for name, value in each.state_dict().items()} for each in models]
    rng = torch.get_rng_state()
    with pytest.raises(amp.RunStateError, match=r"nothing was loaded") as refusal:
        amp.load_run_state(path, model=model, optimizer=optimizer, scaler=scaler)
    for words in said:
        assert words in str(refusal.value)
    for each, values in zip(models, before, strict=True):
        assert all(torch.equal(values[name], value) for name, value in each.state_dict().items())
    assert scaler.get_scale() == 2.0
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(not each.state for each in (optimizer if isinstance(optimizer, list) else [optimizer]))


def resave(path, **changes):
    """Write a run state again with other entries, as a program that edits checkpoints would."""
    state = torch.load(path, weights_only=True)
    torch.save({**state, **changes}, path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scaler": {"scale": 4.0}}, "scaler: growth_factor: expected scale, growth_factor"),
        ({"amp": {"loss_scaler0": {"loss_scale": -1.0, "unskipped": 0}}}, "loss_scale=-1.0: expected a finite number"),
        ({"amp": {"foo": 1}}, 'unexpected key "foo" among the loss scalers'),
        ({"rng": {"torch": torch.zeros(3, dtype=torch.uint8)}}, "saved random states cannot be loaded"),
    ],
    ids=["scaler", "scale", "scalers", "generators"],
)
def test_edited_parts_that_cannot_be_loaded_are_refused(tmp_path, changes, said):
    path = tmp_path / "run.pt"
    saved_run(path)
    resave(path, **changes)
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(amp.RunStateError, match=re.escape(said)) as refusal:
        amp.load_run_state(path, model=model, scaler=scaler)
    assert "nothing was loaded" in str(refusal.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.state_dict()["scale"] == 1024.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": 3}, "model: got a int, expected a torch Module or a list"),
        ({"optimizer": [nn.Linear(1, 1)]}, "optimizer: got a Linear, expected a torch Optimizer or a list"),
        ({"amp": "O1"}, "amp: got a str, expected an amp.Session"),
    ],
)
def test_other_arguments_are_refused(tmp_path, arguments, said):
    with pytest.raises(TypeError, match=said):
        amp.save_run_state(tmp_path / "run.pt", **arguments)


def test_amp_is_either_a_session_or_a_scaler(tmp_path):
    with pytest.raises(TypeError, match=r"^amp and scaler: got both"):
        amp.save_run_state(tmp_path / "run.pt", amp=amp.Session(), scaler=torch.amp.GradScaler("cpu"))


def test_a_session_before_initialize_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="initialize"):
        amp.save_run_state(tmp_path / "run.pt", amp=amp.Session())
    assert list(tmp_path.iterdir()) == []
