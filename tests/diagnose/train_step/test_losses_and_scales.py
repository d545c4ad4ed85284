"""What a train step shows of losses and loss scales, without an alarm for loops that are right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amplab
from amplab.diagnose import doctor


def half_loss(model, x):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    return F.mse_loss(out.float(), torch.ones(len(x), 1))


@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize("handed", [0, 1])
def test_a_scaler_for_each_optimizer_is_right_though_one_is_handed_over(make, handed):
    torch.manual_seed(0)
    models = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models]
    scalers = [make("cpu", init_scale=2.0**10), make("cpu", init_scale=2.0**10)]
    x = torch.randn(8, 4)

    def train_step():
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(half_loss(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()

    found = doctor(models, train_step=train_step, optimizer=optimizers, scaler=scalers[handed])
    assert not found.harmful, str(found)


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
def test_a_loss_that_is_not_scaled_is_found_where_it_is_added_to_one_that_is(make, summed):
    torch.manual_seed(0)
    model = nn.ModuleDict({"main": nn.Linear(4, 1), "side": nn.Linear(4, 1)})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), make("cpu", init_scale=2.0**10)
    x = torch.randn(8, 4)

    def train_step():
        optimizer.zero_grad()
        scaled, other = scaler.scale(half_loss(model["main"], x)), half_loss(model["side"], x)
        if summed:
            (scaled + other).backward()
        else:
            scaled.backward()
            other.backward()
        scaler.step(optimizer)
        scaler.update()

    (found,) = doctor(model, train_step=train_step, optimizer=optimizer, scaler=scaler).harmful
    assert (found.name, found.module, found.severity) == ("loss-not-scaled", "side", "error")


def test_a_train_step_does_not_hide_updates_that_are_rounded_away():
    """The updates that are lost are smaller than the others, so they are less of the norm than of the number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-5, eps=1e-4)
    x = torch.randn(64, 16)

    def step():
        return F.mse_loss(model(x.half()).float().flatten(), x.mean(1))

    def train_step():
        optimizer.zero_grad()
        step().backward()
        optimizer.step()

    for _ in range(4):
        train_step()
    for given in ({"step": step}, {"train_step": train_step}, {"step": step, "train_step": train_step}):
        found = doctor(model, optimizer=optimizer, **given)
        assert len(found.named("updates-rounded-away")) == 1, list(given)
