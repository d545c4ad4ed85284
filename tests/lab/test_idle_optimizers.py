"""An optimizer that a watched loop never steps is found, the first one too, by which steps are counted."""

import pytest
import torch
from torch import nn

from amplab.lab import watch


@pytest.mark.parametrize("stepped", [(0, 1), (1,), (0,)])
def test_an_optimizer_that_is_never_stepped(stepped):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with watch(model, optimizers) as w:
        for _ in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            w.loss(model(torch.ones(4, 2)).square().mean()).backward()
            for number in stepped:
                optimizers[number].step()
    found = w.findings()
    assert [each.evidence["optimizer"] for each in found] == [n for n in (0, 1) if n not in stepped]
    assert all(each.name == "optimizer-never-stepped" and each.evidence["steps_of_others"] == 8 for each in found)
    assert not any(each._optimizer_step_pre_hooks for each in optimizers)
