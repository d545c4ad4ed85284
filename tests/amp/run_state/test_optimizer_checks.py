"""A run state with any optimizer that may be saved is loaded into a fresh one; an edited learning rate is refused."""

import copy

import pytest
import torch
from rateless_optimizers import RATELESS
from torch import nn
from torch.optim import Optimizer

from amplab import amp

OF_TORCH = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)]
KINDS = [*(each for each in OF_TORCH if each is not Optimizer), *RATELESS]


def build(kind, **options):
    torch.manual_seed(0)
    model = nn.Embedding(4, 3, sparse=kind is torch.optim.SparseAdam)  # one matrix, which Muon needs
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps=2):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else (closure(), optimizer.step())


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_saved_of_an_optimizer_is_loaded_into_a_fresh_one(tmp_path, kind, trained):
    model, optimizer = build(kind)
    train(model, optimizer, trained)
    amp.save_run_state(tmp_path / "run.pt", model=model, optimizer=optimizer, position=trained)
    other, fresh = build(kind)
    assert amp.load_run_state(tmp_path / "run.pt", model=other, optimizer=fresh).position == trained
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for run in ((model, optimizer), (other, fresh)):
        train(*run)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("rate", [None, -0.1, float("nan"), "0.1"])
def test_a_rate_with_which_the_optimizer_cannot_step_is_refused(tmp_path, rate):
    model, optimizer = build(torch.optim.SGD)
    path = tmp_path / "run.pt"
    amp.save_run_state(path, model=model, optimizer=optimizer)
    state = torch.load(path, weights_only=True)
    state["optimizers"][0]["state"]["param_groups"][0]["lr"] = rate
    torch.save(state, path)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(amp.RunStateError, match=f"lr is {rate!r}: expected a number >= 0"):
        amp.load_run_state(path, model=model, optimizer=optimizer)
    assert optimizer.state_dict() == before
