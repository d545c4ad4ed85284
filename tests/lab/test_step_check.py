"""A step that cannot be run again is looked at: the first output and the first gradient that are not finite."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import amplab
from amplab import amp
from amplab.lab import watch
from amplab.lab.step_check import StepCheck


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize("pack", [lambda logits: {"logits": logits}, Output, lambda logits: [(logits,)]])
def test_a_step_is_examined_for_every_kind_of_output(pack):
    class Packing(nn.Linear):
        def forward(self, x):
            return pack(super().forward(x))

    model = nn.Sequential(nn.Linear(4, 4), Packing(4, 4))
    check = StepCheck(model)
    with torch.no_grad():
        model[1].bias.fill_(torch.inf)
    model(torch.ones(2, 4))
    assert check.seen() == ("1", None)


@pytest.mark.parametrize("scaling", ["torch", "amplab", "apex"])
@pytest.mark.parametrize("bad", [True, False])
def test_without_a_step_the_first_bad_gradient_is_named(scaling, bad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = {"torch": torch.amp.GradScaler("cpu"), "amplab": amplab.GradScaler("cpu")}.get(scaling)
    if scaler is None:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with watch(model, optimizer, scaler=scaler) as w:
        for _ in range(8):
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaling != "apex"):
                loss = w.loss(model(torch.randn(8, 16)).float().square().mean() * (1e6 if bad else 1))
            optimizer.zero_grad()
            if scaler is None:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    amp.reset()
    assert all(record.skipped == bad for record in w.history.records())
    found = [(each.name, each.severity, each.tensor.rpartition(".")[0]) for each in w.findings()]
    assert found == ([("nonfinite-gradient", "note", "gradient of 1")] if bad else [])
