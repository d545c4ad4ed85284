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


def clears_first(optimizer, _model, _stepped, train):
    optimizer.zero_grad()
    train()


def clears_values_first(optimizer, _model, _stepped, train):
    optimizer.zero_grad(set_to_none=False)
    train()


def clears_last(optimizer, _model, _stepped, train):
    train()
    optimizer.zero_grad()


def clears_twice(optimizer, _model, stepped, train):
    optimizer.zero_grad()
    train()
    if stepped():
        optimizer.zero_grad()


def replaces_what_is_not_finite(optimizer, model, stepped, train):
    for each in model.parameters():
        if each.grad is not None:
            each.grad.nan_to_num_(0.0, 0.0, 0.0)
    train()
    if stepped():
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
@pytest.mark.parametrize(
    "order", [clears_first, clears_values_first, clears_last, clears_twice, replaces_what_is_not_finite]
)
def test_gradients_that_are_cleared_before_the_next_backward_are_not_left_over(order, make):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), make("cpu", init_scale=2.0**24)
    scales = [0.0, 0.0]

    def train():
        scales[0] = scaler.get_scale()
        scaler.scale(half_loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales[1] = scaler.get_scale()

    def train_step():
        order(optimizer, model, lambda: scales[1] >= scales[0], train)

    for given in (0, 12):
        for _ in range(given):
            train_step()
        found = doctor(model, train_step=train_step, optimizer=optimizer, scaler=scaler)
        assert not found.harmful, str(found)
    with amplab.watch(model, optimizer, scaler=scaler) as watch:
        for _ in watch.batches(range(12)):
            train_step()
    assert not watch.findings().harmful, str(watch.findings())


def test_the_state_is_as_before_when_gradients_are_left_over():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train_step():
        before = scaler.get_scale()
        scaler.scale(half_loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            optimizer.zero_grad()

    train_step()
    weights, state = model.weight.clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    found = doctor(model, train_step=train_step, optimizer=optimizer, scaler=scaler)
    assert [each.name for each in found.harmful] == ["gradients-left-over"]
    assert torch.equal(model.weight, weights)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], state)
    assert model.weight.grad is None
    assert scaler.get_scale() == 2.0**10
