"""What a step raised, in the words of mixed precision."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import amplab
from amplab.diagnose.rules.raised import finding_of_error


def test_a_block_recomputed_without_its_casts_is_advised_to_use_amplabs_checkpoint():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with amplab.autocast("cpu", dtype=torch.float16):
        loss = checkpoint(block, torch.ones(2, 4), use_reentrant=False).float().sum()
    with pytest.raises(Exception, match=r"torch\.utils\.checkpoint") as refused:
        loss.backward()
    finding = finding_of_error(refused.value, block)
    assert finding.name == "recomputed-without-casts"
    assert "amplab.checkpoint(" in finding.remedy


@pytest.mark.parametrize("make", [torch.amp.GradScaler, amplab.GradScaler])
def test_unscaling_twice_between_two_updates(make):
    model, scaler = nn.Linear(2, 1), make("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_") as refused:
        scaler.unscale_(optimizer)
    finding = finding_of_error(refused.value, model)
    assert (finding.name, finding.severity) == ("unscaled-twice", "error")


def test_a_step_inside_of_the_block_of_scale_loss():
    model, session = nn.Linear(2, 1), amplab.amp.Session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)

    def step():
        with session.casting():
            loss = model(torch.ones(1, 2)).float().sum()
        with session.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            optimizer.step()

    try:
        with pytest.raises(RuntimeError, match="scale_loss") as refused:
            step()
    finally:
        session.reset()
    assert finding_of_error(refused.value, model).name == "stepped-with-scaled-gradients"


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_torchs_checkpoint_is_reported_with_amplabs_as_the_remedy():
    with pytest.raises(CheckpointError) as refused:
        amplab.xray(Checkpointed(), torch.ones(2, 4), autocast=amplab.autocast("cpu", dtype=torch.float16))
    assert any("amplab.checkpoint" in note for note in refused.value.__notes__)
