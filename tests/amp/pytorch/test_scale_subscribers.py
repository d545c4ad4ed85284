"""What subscribers of a GradScaler are told besides the verdict."""

import torch
from torch import nn

from amplab.amp import GradScaler


def test_subscribers_are_told_the_scale_of_every_backward_of_a_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    records = []
    unsubscribe = scaler.subscribe(records.append)

    def backward():
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()

    def step():
        scaler.step(optimizer)
        scaler.update()
        return records[-1].backward_scales

    backward()
    scaler.update(16.0)
    backward()
    backward()
    assert records[-1].backward_scales == ()  # no step has added them up yet
    assert step() == (64.0, 16.0, 16.0)
    backward()
    assert step() == (16.0,)
    for _ in range(300):  # as in a loop that steps without the scaler
        backward()
    assert step() == (16.0,) * 256
    backward()
    unsubscribe()
    scaler.subscribe(records.append)
    backward()
    assert step() == (16.0,)
