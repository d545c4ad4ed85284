"""What rules read of a watched run: losses as far as they were told, who scaled them, and what skipped steps left."""

import math

import torch
from torch import nn

import amplab
from amplab.lab import watch


def test_a_loss_that_nobody_tells_is_no_loss_of_nan():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(tell):
        optimizer.zero_grad()
        loss = tell(model(torch.ones(4, 2)).square().mean())
        loss.backward()
        optimizer.step()
        return loss

    with watch(model, optimizer) as untold:
        for _ in range(6):
            step(lambda loss: loss)
    assert [each.name for each in untold.findings()] == ["loss-not-told"]
    with watch(model, optimizer) as late:  # each is told when its step is over, and goes with the next
        for _ in range(6):
            late.loss(step(lambda loss: loss))
    assert not late.findings()
    with watch(model, optimizer) as told:
        step(told.loss)
        step(lambda loss: told.loss(loss * math.nan))
    (found,) = told.findings()
    assert (found.name, found.evidence["first_step"], told.observation.scaling) == ("nonfinite-loss", 1, "none")
    assert "amp." not in found.remedy.replace("amplab.", "")


def test_statistics_that_a_skipped_step_has_spoilt_stay_in_sight():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = amplab.GradScaler("cpu")
    with watch(model, optimizer, scaler=scaler) as w:
        for number in range(6):
            x = torch.randn(8, 2)
            x[0, 0] = math.nan if number == 2 else 0.0
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ("nonfinite-buffer", "0") in [(each.name, each.module) for each in w.findings().harmful]
